"""Local and global layers: five layers with a window, then one that sees the whole text.

Gemma Team, 2025, "Gemma 3 Technical Report", section 2 (windows alternating with full attention: Beltagy et al., 2020):

    visible(q, k)  =  0 <= q - k < w   in five layers of six,    k <= q   in the sixth

Layers with a window free the pages behind it, so the cache of a long text is nearly that of the sixth layer alone. The
technical report trains with it.
"""
