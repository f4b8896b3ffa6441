"""Checks of the notebooks in a real JupyterLab and browser. They may import the whole library; only the command line's
`lab` imports them."""
