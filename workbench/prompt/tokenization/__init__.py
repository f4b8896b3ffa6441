"""Between text and token ids: tokenizers of every file format, and text from ids as they come."""
