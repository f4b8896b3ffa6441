"""Executed notebooks as HTML that needs no network.

On the command line: `jupyter nbconvert --to workbench.lab.export.OfflineHTML FILE.ipynb`.

nbconvert's own HTML takes a widget's live view where the notebook stores the widgets' state (nbclient and `nbconvert
--execute` store it by default; JupyterLab does not), and then asks a CDN for the code that draws it. Here
the picture beside the view is taken in either case. Formulas stay as they were typed: MathJax would be asked for too.
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
    """JupyterLab's page with every widget as its picture, and nothing that is loaded from elsewhere."""

    export_from_notebook = "HTML (offline)"  # type: ignore[assignment] (a trait there)
    extra_template_basedirs = List(Unicode(), [str(Path(__file__).parent / "templates")])

    @default("template_name")
    def _template_name_default(self) -> str:
        return "offline"

    @property
    def default_config(self) -> Config:
        kept = Config(super().default_config)
        others = [kind for kind in kept.NbConvertBase.display_data_priority if kind not in (VIEW, SVG)]
        kept.NbConvertBase.display_data_priority = [SVG, *others]  # its HTML is an image, without the page's colours
        return kept


def write_html(document: dict[str, Any], path: Path) -> Path:
    """Export an executed notebook, offline."""
    import nbformat

    text, _ = OfflineHTML().from_notebook_node(nbformat.reads(json.dumps(document), 4))
    path.write_text(text, encoding="utf-8")
    return path
