"""Show the cache's pages by owner, over steps."""
