"""Read and write GGUF files: metadata, tensors in blocks of codes, and model families."""
