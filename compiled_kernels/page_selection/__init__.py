"""The choice of the pages that a query reads, by summaries of their keys."""
