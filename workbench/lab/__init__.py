"""Run JupyterLab with the notebooks, either for a user (`start`) or in a headless browser that checks them
(`check`)."""
