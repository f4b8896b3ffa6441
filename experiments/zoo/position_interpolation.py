"""Position interpolation: positions of a longer text are squeezed into those that were trained.

Chen et al., 2023, "Extending Context Window of Large Language Models via Positional Interpolation", equation 4:

    f'(x, m)  =  f(x, m L / L'),    L tokens trained, L' wanted

The demo model was trained with 1,024 tokens; here texts have 2,048, and the baseline has its rotary as it was.
The paper trains on for 1,000 steps at the new length; here nothing is trained.
"""
