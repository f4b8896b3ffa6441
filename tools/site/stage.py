"""Copy the pages into one folder for Sphinx: links follow the files, and blocks made from code and records are filled.

A page of docs/ says `<!-- built: zoo -->` where such a block stands; `tools.site.blocks` makes it.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tools.site.blocks import BLOCKS
from tools.site.notebooks import as_notebook, read_course

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie elsewhere in the checkout, by their place on the site.
ELSEWHERE = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "experiments/LOG.md": "project/log.md",
    "workbench/demo/README.md": "project/demo_models.md",
}
BUILT = re.compile(r"^<!-- built: (\w+) -->$", re.M)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)", re.M | re.S)


def places(root: Path = ROOT) -> dict[str, str]:
    """Return the place on the site of every file of the checkout that has one."""
    docs = {path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")}
    found = {path: path.removeprefix("docs/") for path in docs} | ELSEWHERE
    for path in sorted((root / "notebooks").glob("*.py")):
        found[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.ipynb"
    for path in sorted((root / "notebooks" / "pictures").glob("*.png")):
        found[f"notebooks/pictures/{path.name}"] = f"notebooks/pictures/{path.name}"
    found["README.md"] = "index.md"
    return {path: place for path, place in found.items() if (root / path).is_file()}


def stage(folder: Path, root: Path = ROOT, blocks: dict[str, Callable[[Path], str]] | None = None) -> list[str]:
    """Write every page of the site into `folder`; return links and blocks that lead nowhere."""
    blocks = BLOCKS if blocks is None else blocks
    where, problems = places(root), []
    for path, place in where.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path == "README.md":
            continue  # the front page of the site is docs/index.md
        if path.endswith(".md"):
            text = (root / path).read_text(encoding="utf-8")
            text = BUILT.sub(lambda match, path=path: _filled(match[1], path, root, blocks, problems), text)
            target.write_text(moved(text, path, where, root, problems), encoding="utf-8")
        elif path.endswith(".png"):
            shutil.copyfile(root / path, target)
    for path, notebook in read_course(root / "notebooks").items():
        text = as_notebook(notebook, lambda cell, path=path: moved(cell, f"notebooks/{path}", where, root, problems))
        (folder / where[f"notebooks/{path}"]).write_text(text, encoding="utf-8")
    return problems


def _filled(
    name: str, path: str, root: Path, blocks: dict[str, Callable[[Path], str]], problems: list[str]
) -> str:
    if name not in blocks:
        problems.append(f"{path}: there is no block {name!r}; there are {', '.join(blocks)}")
        return ""
    return blocks[name](root).strip()


def moved(text: str, path: str, where: dict[str, str], root: Path, problems: list[str]) -> str:
    """Return the text of the file `path` with its links as they are from its place on the site.

    A link to a file of the checkout that has no page becomes the file's name; one to nothing is a problem.
    """

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        file, _, anchor = target.partition("#")
        if not file or re.match(r"[a-z]+:", file):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if wanted in where:
            to = posixpath.relpath(where[wanted], posixpath.dirname(where[path]) or ".")
            return f"{picture}[{words}]({to}{'#' + anchor if anchor else ''})"
        if picture or not (root / wanted).exists():
            problems.append(f"{path}: a link to {target}, which is not there")
        return words if wanted in words or f"`{file}`" in words else f"{words} (`{wanted}`)"

    pieces, last = [], 0
    for match in CODE.finditer(text):
        pieces += [LINK.sub(link, text[last : match.start()]), match[0]]
        last = match.end()
    return "".join([*pieces, LINK.sub(link, text[last:])])
