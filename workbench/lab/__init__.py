"""JupyterLab on the notebooks: opened for a person (`start`), or by a headless browser that checks them (`check`)."""
