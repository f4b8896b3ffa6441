"""A text that breaks markup, tables and quotes wherever it is not escaped."""

ODD = "<script>alert('&amp;')</script>\n\"x\" | ' \x00 ﷽"
