"""Read and write Hugging Face folders: config.json, weights, saving."""
