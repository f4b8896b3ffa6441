"""Which pages a query reads, chosen by summaries of their keys."""
