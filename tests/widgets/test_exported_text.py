"""Spaces of texts and code in an exported page: as many as there were."""

from __future__ import annotations

import html
import re

import pytest

from workbench import svg
from workbench.widgets.kernels import picture as kernels
from workbench.widgets.kernels.fusion import FusionMarks
from workbench.widgets.tokens import picture as tokens
from workbench.widgets.tokens import text

pytest.importorskip("nbconvert", reason="pip install 'inference-workbench[lab]'")
nbformat = pytest.importorskip("nbformat", reason="pip install 'inference-workbench[lab]'")
CODE = "def f(x):\n    if x:\n\n        return  x\n"
PIECES = ("def f(x):", "\n", "    ", "if x:", "\n\n", "        ", "return", "  ", "x", "\n", " ")


def whole(page: str) -> list[str]:
    """Return the text of each `pre` element of widgets."""
    found = re.findall(r'<pre [^>]*class="wb-[^>]*>(.*?)</pre>', page, re.S)
    return [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]


def test_an_export_keeps_every_space() -> None:
    from workbench.lab.export import OfflineHTML

    pieces = [text.GeneratedToken(number, piece, piece) for number, piece in enumerate(PIECES)]
    cuts = tuple(tokens.TokenizedPiece(number, piece.encode(), piece) for number, piece in enumerate(PIECES))
    pictures = (
        svg.html(text.draw_generated_text("\n  asked\n", {0: pieces, 1: pieces}, {0: "  <i>&amp;"}, {})),
        tokens.draw_tokenizations([tokens.Tokenization("demo", 9, len(CODE), cuts)]),
        kernels.draw_kernel(
            kernels.KernelPage("add", "eager", "source", CODE, FusionMarks(), {"eager": {"source": 4}})
        ),
    )
    drawn = whole("".join(pictures))
    assert len(drawn) == 3 and "".join(PIECES) + "  <i>&amp;" in drawn[0] and "        return  x" in drawn[2]
    outputs = [nbformat.v4.new_output("display_data", data={"text/html": each}) for each in pictures]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("w", outputs=outputs)])
    assert whole(OfflineHTML().from_notebook_node(document)[0]) == drawn
