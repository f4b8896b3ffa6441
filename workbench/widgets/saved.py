"""A picture as a notebook's file keeps it, beside the live view."""

from __future__ import annotations

import re
from urllib.parse import quote

_DRAWING = re.compile(r'<svg\b[^>]*\bclass="wb-pic\b.*?</svg>', re.DOTALL)
_STYLES = re.compile(r"<style>.*?</style>", re.DOTALL)
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_WIDTH = re.compile(r'\bwidth="([\d.]+)"')
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_SAFE = (
    " ':/?=,;()!*@$+[]{}|"  # in an attribute's value and in the address of data: all but %, #, &, <, >, " and breaks
)
# Puts the drawing in the image's place, in the colours of the page. A notebook that is not trusted loses it.
_INLINE = (
    "<script>for(const image of document.currentScript.parentNode.querySelectorAll('img.wb-drawn'))"
    "image.outerHTML=decodeURIComponent(image.getAttribute('src').split(',').slice(1).join(','))</script>"
)


def saved_picture(picture: str) -> dict[str, str]:
    """Return a picture by MIME type.

    A lone drawing is there twice: as SVG for exports (PDF, and the pages of `workbench lab`), which show no HTML, and
    as an image within HTML for notebooks. JupyterLab takes style, SVG and scripts out of the HTML of a notebook that it
    does not trust, and leaves images: so every drawing is an image.
    """
    styles = "".join(dict.fromkeys(_STYLES.findall(picture)))  # one drawing may have those of all
    pieces = _DRAWING.sub(lambda found: _image(found[0], styles), picture)
    if pieces == picture:
        return {"text/html": picture}
    kept = {"text/html": f"<div>{pieces}{_INLINE}</div>"}
    return {"image/svg+xml": picture, **kept} if picture.startswith("<svg") else kept


def _image(drawing: str, styles: str) -> str:
    """Return a drawing as an image with these styles."""
    title, width = _TITLE.search(drawing), _WIDTH.search(drawing)
    whole = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", _STYLES.sub("", drawing).replace("</svg>", f"{styles}</svg>"))
    size = f' width="{float(width[1]):.0f}"' if width else ""
    alt = title[1].replace('"', "&quot;") if title else ""
    return f'<img class="wb-drawn" alt="{alt}"{size} src="data:image/svg+xml,{quote(whole, safe=_SAFE)}">'
