"""Save a widget's picture in the notebook's file, in addition to the live view."""

from __future__ import annotations

import re
from urllib.parse import quote

_DRAWING = re.compile(r'<svg\b[^>]*\bclass="(?:wb-pic|marks)\b.*?</svg>', re.DOTALL)
_STYLES = re.compile(r"<style>.*?</style>", re.DOTALL)
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_WIDTH = re.compile(r'\bwidth="([\d.]+)"')
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_SAFE = (
    " ':/?=,;()!*@$+[]{}|"  # unquoted in a data URL within an attribute; %, #, &, <, >, " and line breaks are quoted
)
_CHART_STYLE = "background:var(--jp-layout-color0,#fff);"  # of a chart, which has its page's where it is part of one
# Replaces the image by its drawing, in the page's colours. JupyterLab removes this script from an untrusted notebook.
_INLINE = (
    "<script>for(const image of document.currentScript.parentNode.querySelectorAll('img.wb-drawn'))"
    "image.outerHTML=decodeURIComponent(image.getAttribute('src').split(',').slice(1).join(','))</script>"
)


def saved_picture(picture: str) -> dict[str, str]:
    """Return a picture in the forms that a notebook stores, by MIME type.

    A single drawing is saved twice: as SVG for exports that show no HTML (PDF, and the pages of `workbench lab`), and
    as an image within HTML for notebooks. JupyterLab removes style, SVG and scripts from the HTML of an untrusted
    notebook but leaves images: so every drawing is an image.
    """
    styles = "".join(dict.fromkeys(_STYLES.findall(picture)))  # one drawing may hold the styles of all
    pieces = _DRAWING.sub(lambda found: _image(found[0], styles), picture)
    if pieces == picture:
        return {"text/html": picture}
    kept = {"text/html": f"<div>{pieces}{_INLINE}</div>"}
    return {"image/svg+xml": picture, **kept} if picture.startswith("<svg") else kept


def _image(drawing: str, styles: str) -> str:
    """Return a drawing as an `<img>` element, with `styles` inside its SVG."""
    title, width = _TITLE.search(drawing), _WIDTH.search(drawing)
    whole = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", _STYLES.sub("", drawing).replace("</svg>", f"{styles}</svg>"))
    whole = whole.replace('<svg style="', f'<svg style="{_CHART_STYLE}', 1)
    size = f' width="{float(width[1]):.0f}"' if width else ""
    alt = title[1].replace('"', "&quot;") if title else ""
    return f'<img class="wb-drawn" alt="{alt}"{size} src="data:image/svg+xml,{quote(whole, safe=_SAFE)}">'
