"""Chunked attention: three layers of four see their own chunk of the text, the fourth all of it, without positions.

Meta, 2025, "The Llama 4 herd" (iRoPE), with chunks of c tokens:

    chunked   visible(q, k)  =  k <= q  and  floor(k / c) = floor(q / c)
    global    score(q, k)    =  q . k / sqrt(d)  (1 + a log(1 + floor(q / f))),  without rotary

The model is trained with it and has chunks of 8,192 tokens. Weights trained with rotary in all layers meet layers
without it unprepared, so here the global layers keep theirs.
"""
