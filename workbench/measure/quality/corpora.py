"""Read English prose and Python code out of installed packages, and split them once and for ever.

Rules are shaped on the texts of the half `shape`; verdicts are drawn from the half `verdict`. A text's half follows
from the hash of its name alone. Both models of the evidence may have read these texts in training: what is compared is
the same model with and without a change, not a model's knowledge of them.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from workbench.errors import WorkbenchError

Half = Literal["shape", "verdict"]
MIN_CHARACTERS = 4_000  # of a text: about a quarter of a context of 4,096
MIN_PARAGRAPH = 200  # characters; shorter lines of an article are headings, captions and lists
ARTICLE = re.compile(r"<title>(.*?)</title>.*?<ns>0</ns>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
UNPROSAIC = re.compile(
    r"<!--.*?-->|<ref[^<>]*/>|<(ref|math|gallery|timeline|table|score|code|syntaxhighlight|source)\b.*?</\1>"
    r"|\[\[(?:File|Image|Category):[^\[\]]*\]\]|\{\{[^{}]*\}\}|\{\|[^{}]*\|\}",
    re.DOTALL | re.IGNORECASE,
)
MARKUP = (  # (pattern, replacement), after UNPROSAIC
    (re.compile(r"\[\[(?:[^\[\]|]*\|)*([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[https?:\S+ ?([^\]]*)\]"), r"\1"),
    (re.compile(r"<[^<>]*>|'''|''"), ""),
    (re.compile(r"\s*\([\s;,:]*\)"), ""),
    (re.compile(r"\([\s;,:]+"), "("),
    (re.compile(r"[ \xa0]+"), " "),
)


@dataclass(frozen=True)
class Corpus:
    """Texts within one version of a package. `sha256` is of all bytes that are read, in the order of their paths."""

    package: str
    version: str
    licence: str
    pattern: str  # of files below the package's folder
    sha256: str
    read: Callable[[dict[str, bytes]], dict[str, str]]  # files by path -> texts by name

    @property
    def command(self) -> str:
        return f"pip install {self.package}=={self.version}"


def articles(files: dict[str, bytes]) -> dict[str, str]:
    """Return the prose of Wikipedia's articles, by title: paragraphs without markup, tables, notes and formulas."""
    (dump,) = files.values()
    pages = map(ARTICLE.search, bz2.decompress(dump).decode().split("</page>"))
    return {page[1]: _prose(html.unescape(html.unescape(page[2]))) for page in pages if page}


def _prose(text: str) -> str:
    removed = 1
    while removed:  # templates, tables and links hold one another
        text, removed = UNPROSAIC.subn("", text)
        if not removed:
            text, removed = MARKUP[0][0].subn(MARKUP[0][1], text)
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    paragraphs = (line.strip() for line in text.splitlines())
    return "\n\n".join(p for p in paragraphs if len(p) >= MIN_PARAGRAPH and p[0].isalnum() and p[-1] in '.!?"”')


def modules(files: dict[str, bytes]) -> dict[str, str]:
    """Return the sources of Python modules, by path."""
    return {path: source.decode() for path, source in files.items() if "/tests/" not in path}


CORPORA = {
    "prose": Corpus(
        "gensim",
        "4.4.0",
        "CC BY-SA 3.0",
        "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
        articles,
    ),
    "code": Corpus(
        "networkx",
        "3.6.1",
        "BSD-3-Clause",
        "algorithms/**/*.py",
        "0425f28da6782cbd58c12d4f107d984059fc103d7c33118a3596fdaaebbb4407",
        modules,
    ),
}


def half_of(name: str) -> Half:
    """Return the half of the split that a text belongs to, by the hash of its name."""
    return "verdict" if hashlib.sha256(name.encode()).digest()[0] % 2 else "shape"


def read_corpus(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the texts of one half of a corpus (`prose-shape`) by name, and a description of their source.

    Raises WorkbenchError if the package is not installed, or holds other bytes than those of the known version.
    """
    kind, half = name.split("-")
    corpus = CORPORA[kind]
    spec = find_spec(corpus.package)
    if spec is None or not spec.submodule_search_locations:
        raise WorkbenchError(f"texts {name}: {corpus.package} is not installed; {corpus.command}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob(corpus.pattern))}
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    if digest != corpus.sha256:
        raise WorkbenchError(
            f"texts {name}: {corpus.package} holds other texts (sha256 {digest}, must be {corpus.sha256}); "
            f"{corpus.command}"
        )
    texts = {title: text for title, text in corpus.read(files).items() if len(text) >= MIN_CHARACTERS}
    found = {title: text for title, text in texts.items() if half_of(title) == half}
    source = {"package": f"{corpus.package}=={corpus.version}", "licence": corpus.licence, "sha256": digest}
    return found, {"texts": name, "known": len(found), "listed": len(texts), **source}
