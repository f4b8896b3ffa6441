"""A widget's picture in exported pages, whether the notebook stores the widget's state or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser
from tools.notebooks.page import LabSession
from workbench.lab.execute import VIEW, widget_outputs

nbformat = pytest.importorskip("nbformat", reason="pip install 'inference-workbench[lab]'")
pytestmark = browser
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"><rect width="40" height="40"/></svg>'
SHOWN = [True, True, False, True, False, False]
STATE = "application/vnd.jupyter.widget-state+json"


def notebook(stored: bool) -> Any:
    """Return a notebook as nbclient leaves it (with the widgets' state, by default) or as JupyterLab saves it."""
    pictures = (
        *({"text/html": html} for html in (SVG, "<p>n = 3</p>", "<style>p {color: red}</style><svg></svg>")),
        {"image/svg+xml": SVG}, {"image/svg+xml": "<svg>"}, {"text/plain": "IntSlider()"},
    )  # fmt: skip
    shown = [{"text/plain": "", VIEW: {"model_id": "m", "version_major": 2, "version_minor": 0}, **p} for p in pictures]
    outputs = [nbformat.v4.new_output("display_data", data=data) for data in shown]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("w", id="one", outputs=outputs)])
    if stored:
        state = {"m": {"model_name": "IntSliderModel", "model_module": "@jupyter-widgets/controls", "state": {}}}
        document.metadata["widgets"] = {STATE: {"state": state, "version_major": 2, "version_minor": 0}}
    return document


def test_our_page_shows_the_pictures_and_asks_for_nothing(lab: LabSession, tmp_path: Path) -> None:
    from workbench.lab.export import write_html

    for stored in (False, True):
        document = notebook(stored)
        seen = lab.shown_offline(write_html(document, tmp_path / "ours.html"), widget_outputs(document))
        assert seen == (SHOWN, [])


def test_nbconverts_own_page_shows_them_where_no_state_is_stored(lab: LabSession, tmp_path: Path) -> None:
    from nbconvert.exporters import HTMLExporter

    for stored, expected in ((False, SHOWN), (True, [False] * 6)):
        document, path = notebook(stored), tmp_path / "plain.html"
        path.write_text(HTMLExporter().from_notebook_node(document)[0])
        shown, asked = lab.shown_offline(path, widget_outputs(document))
        assert shown == expected and asked
