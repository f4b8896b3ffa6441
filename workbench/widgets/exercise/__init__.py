"""Ask questions in a notebook and check the answers against computed ones."""
