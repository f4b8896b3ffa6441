"""Cross-layer attention: every second layer reads the keys and values of the layer below, so the cache is half.

Brandon et al., 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", section 3, for a sharing
factor of 2:

    layer 2i      =  softmax(Q_2i K_2i^T / sqrt(d)) V_2i
    layer 2i + 1  =  softmax(Q_(2i+1) K_2i^T / sqrt(d)) V_2i

The paper trains models so. Here a trained layer's own key and value projections are left out.
"""
