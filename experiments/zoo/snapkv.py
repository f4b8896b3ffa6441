"""SnapKV: after the prompt those tokens stay that its last queries look at, with their neighbours.

Li et al., 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", section 4, with w observed queries:

    F(i)  =  sum over the last w queries of the prompt of softmax(q . k / sqrt(d))_i
    C(i)  =  mean of F over i - p // 2 ... i + p // 2              (pooling, so that details stay whole)
    keep  =  the last w tokens, and of the others those with the highest C

It is built in, so this entry needs no part of its own: `cache.evict: {kind: snapkv, observe: w, pool: p}`. Each
key/value head chooses for itself, by the sum over its query heads. All output is kept.
"""
