"""ALiBi: no embedding of positions; each head's scores fall in proportion to the distance.

Press et al., 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
section 3:

    score(q, k)  =  q . k / sqrt(d)  -  m_h (q - k),    m_h = 2^(-8 h / heads) for h = 1, ..., heads

The engine has it as `attention.position: alibi`; a test writes it as a score function and compares. The paper trains
with it: weights that were trained with rotary embeddings meet it unprepared.
"""
