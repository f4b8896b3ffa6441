"""The site: its pages, pictures and links."""
