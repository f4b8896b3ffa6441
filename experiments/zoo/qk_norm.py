"""Query-key normalisation: queries and keys of each head are normed before their product.

Henry et al., 2020, "Query-Key Normalization for Transformers", section 3 (with root-mean-square norms: Dehghani et al.,
2023):

    score(q, k)  =  g  q . k / (|q| |k|)

The norms have weights of 1 here, so that |q| = |k| = sqrt(d); with `scale` s the factor is g = s d, and sqrt(d) for the
usual scale. The paper learns g and trains with it.
"""
