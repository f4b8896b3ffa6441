"""Llama 3 scaling: wavelengths longer than the context are stretched, short ones kept, with a smooth passage.

Llama Team, 2024, "The Llama 3 Herd of Models", as published with Llama 3.1, where pair i turns r(i) times in the
trained context:

    theta'_i  =  (1 - g) theta_i / s + g theta_i,    g = clamp((r(i) - low) / (high - low), 0, 1),  low = 1, high = 4

The demo model was trained with 1,024 tokens; here texts have 2,048, and the baseline has its rotary as it was.
The published models are trained on after the change; here nothing is trained.
"""
