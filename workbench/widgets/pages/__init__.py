"""The cache's pages by owner, over steps."""
