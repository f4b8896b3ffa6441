"""Guards of text, words, figures, pages and of how tests are written: `python -m tools.lint` (`make lint`)."""
