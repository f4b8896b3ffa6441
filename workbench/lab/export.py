"""Export executed notebooks as HTML that needs no network.

On the command line: `jupyter nbconvert --to workbench.lab.export.OfflineHTML FILE.ipynb`.

If a notebook stores the widgets' state (nbclient and `nbconvert --execute` store it by default, JupyterLab does not),
nbconvert's own HTML shows a widget's live view, and loads the code for it from a CDN. This exporter always shows the
stored picture. Formulas stay as typed: MathJax would be loaded from a CDN too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbconvert.exporters import HTMLExporter
from traitlets import List, Unicode, default
from traitlets.config import Config

from workbench.lab.execute import VIEW

SVG = "image/svg+xml"


class OfflineHTML(HTMLExporter):
    """An nbconvert exporter with JupyterLab's page style, which shows widgets as pictures and needs no external
    resources."""

    export_from_notebook = "HTML (offline)"  # type: ignore[assignment] (a trait there)
    extra_template_basedirs = List(Unicode(), [str(Path(__file__).parent / "templates")])

    @default("template_name")
    def _template_name_default(self) -> str:
        return "offline"

    @property
    def default_config(self) -> Config:
        kept = Config(super().default_config)
        others = [kind for kind in kept.NbConvertBase.display_data_priority if kind not in (VIEW, SVG)]
        kept.NbConvertBase.display_data_priority = [SVG, *others]  # the HTML is an image without the page's colours
        return kept


def write_html(document: dict[str, Any], path: Path) -> Path:
    """Export an executed notebook as an HTML file that works offline."""
    import nbformat

    text, _ = OfflineHTML().from_notebook_node(nbformat.reads(json.dumps(document), 4))
    path.write_text(text, encoding="utf-8")
    return path
