"""Check texts, words, figures, pages, and the way tests are written: `python -m tools.lint` (`make lint`)."""
