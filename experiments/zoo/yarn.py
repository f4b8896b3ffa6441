"""YaRN: slow frequencies of rotary are interpolated, quick ones kept, and scores sharpened.

Peng et al., 2023, "YaRN: Efficient Context Window Extension of Large Language Models", equations 17 to 22, where pair i
turns r(i) times in the trained context:

    theta'_i  =  (1 - g) theta_i / s + g theta_i,    g(r(i)) = 0 below beta_slow, 1 above beta_fast, straight between
    softmax(q . k t),    sqrt(t) = 0.1 log(s) + 1

The demo model was trained with 1,024 tokens; here texts have 2,048, and the baseline has its rotary as it was.
The factor of cosines and sines is 0.1 log(2) + 1 = 1.0693. The paper trains on for 400 steps; here nothing is trained.
"""
