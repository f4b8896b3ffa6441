"""StreamingLLM: each query sees the last `w` tokens and the first `s`, the attention sinks.

Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks", section 3:

    visible(q, k)  =  k <= q  and  (q - k < w  or  k < s)
    o_q            =  sum over visible k of softmax_k(q . k / sqrt(d)) v_k

Pages between the sinks and the window are freed, so the cache has a bound. It needs no part of its own: window and
sinks are settings of every attention. Here positions stay those of the text; the paper renumbers the tokens in its
cache, which matters only beyond the context that the model was trained with.
"""
