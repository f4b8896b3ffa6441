"""Select the pages that each query reads, by summaries of the pages' keys."""
