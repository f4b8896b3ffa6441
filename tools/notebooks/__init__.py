"""Check the notebooks in a real JupyterLab and browser. This package may import the whole library; only the command
line's `lab` imports it."""
