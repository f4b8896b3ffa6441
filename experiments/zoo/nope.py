"""NoPE: a causal decoder without any encoding of positions.

Kazemnejad et al., 2023, "The Impact of Positional Encoding on Length Generalization in Transformers", section 2:

    score(q, k)  =  q . k / sqrt(d)

The causal mask alone breaks the symmetry of positions. The paper trains with none: weights that were trained with
rotary embeddings meet it unprepared.
"""
