"""Find addresses in built pages that lead to other machines, to no file, or to no anchor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ADDRESSES = ("href", "src", "srcset", "poster", "data", "action", "xlink:href")
OUTSIDE = re.compile(r"(?:https?:)?//|javascript:|mailto:")


class Page(HTMLParser):
    """The addresses that a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.addresses += [values[name] for name in ADDRESSES if name in values]


def broken_addresses(folder: Path) -> list[str]:
    """Return the addresses in a folder of HTML that lead outside of the folder, to no file, or to no anchor."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    return [f"{path.relative_to(folder)}: {fault}" for path in pages for fault in _faults(path, pages, folder)]


def _faults(path: Path, pages: dict[Path, Page], folder: Path) -> Iterator[str]:
    for address in dict.fromkeys(pages[path].addresses):
        file, _, anchor = unquote(address).partition("#")
        target = (path.parent / file.partition("?")[0]).resolve() if file else path
        if address.startswith("data:"):
            continue
        if OUTSIDE.match(address):
            yield f"leads outside: {address}"
        elif folder.resolve() not in target.parents or not target.is_file():
            yield f"leads to no file: {address}"
        elif anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("svg-"):
            yield f"leads to no anchor: {address}"


def fetched(style: str) -> list[str]:
    """Return the addresses of other machines that a style sheet loads from."""
    found = re.findall(r"url\(\s*['\"]?([^'\")]*)", style) + re.findall(r"@import\s+['\"]([^'\"]*)", style)
    return [address for address in found if OUTSIDE.match(address)]
