"""Which pages a query reads, chosen by summaries of their keys."""

from compiled_kernels.page_selection.api import select_pages, summarize_pages
from compiled_kernels.page_selection.selection import PageSelection, page_selection

__all__ = ["PageSelection", "page_selection", "select_pages", "summarize_pages"]
