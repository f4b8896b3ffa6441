"""GGUF files: values, blocks of codes, families, reading and writing."""
