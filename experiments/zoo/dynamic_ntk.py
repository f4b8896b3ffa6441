"""Dynamic NTK scaling: the base grows only with texts that are longer than those that were trained.

emozilla, 2023, "Dynamically Scaled RoPE" (Peng et al., 2023, section 3.3), for a text that may reach L' tokens:

    base'  =  base (s L' / L - (s - 1))^(d / (d - 2))  where L' > L,  else base

The demo model was trained with 1,024 tokens; here texts have 2,048, and the baseline has its rotary as it was.
L' is the length that a sequence may reach, prompt and output, so that its keys have one base throughout.
"""
