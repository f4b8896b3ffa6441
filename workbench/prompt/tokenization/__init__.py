"""Convert between text and token ids: tokenizers of every file format, and incremental detokenization."""
