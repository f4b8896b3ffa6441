"""NTK-aware scaling: a larger base slows the slow frequencies of rotary, and leaves the quick ones.

bloc97, 2023, "NTK-Aware Scaled RoPE" (Peng et al., 2023, equation 16), for s times the context and heads of d columns:

    base'  =  base s^(d / (d - 2))

The demo model was trained with 1,024 tokens; here texts have 2,048, and the baseline has its rotary as it was.
Heads of 64 columns and s = 2 give 10,000 * 2^(64/62) = 20,452.
"""
