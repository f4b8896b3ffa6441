"""Draw standard charts: each function turns typed rows into a `Figure`.

    Figure = points | lines | bars | intervals | spans | columns (rows, Axis, ...)

A figure is a Vega-Lite specification. Widgets, reports, the site and files show its SVG; `altair.Chart.from_dict`
accepts its `spec`. Pictures that are no charts (pages, tokens, prompts, graphs) are drawn with `workbench.svg`.
"""
