"""YOCO: a first half with windows, one layer's global keys and values, and a second half that reads only these.

Sun et al., 2024, "You Only Cache Once: Decoder-Decoder Architectures for Language Models", section 2:

    self-decoder    layer l of the first half   =  softmax(Q_l K_l^T / sqrt(d)) V_l  in a window
    cross-decoder   layer l of the second half  =  softmax(Q_l K^T / sqrt(d)) V,  K and V of one layer

For six layers: two with a window, one full whose keys and values the three after it read; a deeper model repeats these
six. The paper trains such models. Here trained projections of keys and values are left out.
"""
