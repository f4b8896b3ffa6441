"""Sphinx's settings for the site. `python -m tools.site` stages the pages and runs Sphinx with this file."""

from __future__ import annotations

import sys
from typing import Any

# jsonschema, which MyST-NB imports, compiles a grammar of addresses for 4 seconds where it finds this package.
absent: dict[str, Any] = {"rfc3987_syntax": None}
sys.modules.update(absent)

project = "Inference Workbench"
author = "the Inference Workbench's authors"
copyright = author  # noqa: A001 (Sphinx reads this name)
html_title = project

extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # pictures were saved when the notebooks ran
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # nothing is fetched
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4
smartquotes = False  # docstrings quote code
highlight_language = "none"  # a block without a language is a command or what one printed
suppress_warnings = [
    "myst.header",  # the log and generated pages begin sections at any level
]

html_theme = "furo"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0a5c99", "color-brand-content": "#0a5c99"},
    "dark_css_variables": {"color-brand-primary": "#6cb6ff", "color-brand-content": "#6cb6ff"},
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
