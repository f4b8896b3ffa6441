"""Check that an HTML page is self-contained: it loads nothing, and its tags are well formed."""

from __future__ import annotations

import base64
import binascii
import re
from html.parser import HTMLParser

LOADING_ATTRIBUTES = {
    "src", "srcset", "data", "poster", "background", "action", "formaction", "manifest", "ping", "cite", "codebase",
    "icon", "imagesrcset", "archive", "profile", "longdesc", "usemap",
}  # fmt: skip
# a fragment (#...) is a place within the page; any other address would be loaded
LINK_ATTRIBUTES = {"href", "xlink:href"}
VOID_TAGS = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
ACTIVE_TAGS = {"script", "iframe", "frame", "object", "embed", "applet", "base", "link", "foreignobject"}
IN_STYLE = re.compile(r"@import\s+[^;]+|url\(\s*[^)]*\)", re.IGNORECASE)
IMAGE = re.compile(r"data:image/svg\+xml;base64,(.*)", re.DOTALL)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.open: list[str] = []
        self.broken: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.broken.append(f"</{tag}> at line {self.getpos()[0]} closes no open tag")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self._style(data)

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ACTIVE_TAGS:
            self.found.append(f"<{tag}>")
        values = {name.lower(): value or "" for name, value in attrs}
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh":
            self.found.append(f"a refresh to {values.get('content')}")
        for name, value in values.items():
            if name == "id":
                self.ids.append(value)
            elif name in LINK_ATTRIBUTES and value.startswith("#"):
                self.targets.append(value[1:])
            elif name in LINK_ATTRIBUTES or (name in LOADING_ATTRIBUTES and not self._is_image(value)):
                self.found.append(f"{tag} {name}={value[:80]}")
            elif name == "style":
                self._style(value)
            elif name.startswith("on"):
                self.found.append(f"{tag} {name}: a script")
            elif re.search(r"url\(\s*['\"]?(?!#)", value, re.IGNORECASE):
                self.found.append(f"{tag} {name}={value[:80]}")

    def _is_image(self, value: str) -> bool:
        """Return whether a value is an SVG image as a data address; as an image it runs no script and loads nothing."""
        match = IMAGE.fullmatch(value)
        try:
            return match is not None and b"<svg" in base64.b64decode(match[1], validate=True)
        except binascii.Error:
            return False

    def _style(self, text: str) -> None:
        self.found += [f"style {each[:80]}" for each in IN_STYLE.findall(text) if "url(#" not in each]


def external_resources(html: str) -> list[str]:
    """List everything that the page would load or run; empty for a self-contained page."""
    return _read(html).found


def markup_errors(html: str) -> list[str]:
    """List unclosed or misplaced tags, duplicate ids, and internal links without a target."""
    reader = _read(html)
    found = [*reader.broken, *(f"<{tag}> is never closed" for tag in reader.open)]
    found += [f"id {each} is used twice" for each in sorted({i for i in reader.ids if reader.ids.count(i) > 1})]
    return found + [f"#{each} leads nowhere" for each in reader.targets if each not in reader.ids]


def _read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader
