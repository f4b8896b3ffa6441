"""Copy the pages into one folder for Sphinx, with adapted links and with blocks made from code and records filled in.

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
    "SECURITY.md": "project/security.md",
    "experiments/LOG.md": "project/log.md",
    "workbench/demo/README.md": "project/demo_models.md",
}
NARROW = 60  # characters of a command that a phone shows on one line or two; longer ones get an empty line between them
COMMANDS = ("workbench ", "python -", "make ", "pip ", "torchrun ", "curl ")
BUILT = re.compile(r"^<!-- built: (\w+) -->$", re.M)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)", re.M | re.S)


def places(root: Path = ROOT) -> dict[str, str]:
    """Return the path on the site of every file of the checkout that has a page or is shown there."""
    docs = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    found = {path: path.removeprefix("docs/") for path in docs} | ELSEWHERE
    for path in sorted((root / "notebooks").glob("*.py")):
        found[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.ipynb"
    for path in sorted((root / "notebooks" / "pictures").glob("*.png")):
        found[f"notebooks/pictures/{path.name}"] = f"notebooks/pictures/{path.name}"
    found["README.md"] = "index.md"
    return {path: place for path, place in found.items() if (root / path).is_file()}


def stage(folder: Path, root: Path = ROOT, blocks: dict[str, Callable[[Path], str]] | None = None) -> list[str]:
    """Write every page of the site into `folder`; return the links and block names that lead nowhere."""
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
            target.write_text(spread(moved(text, path, where, root, problems)), encoding="utf-8")
        elif path.endswith(".png"):
            shutil.copyfile(root / path, target)
    for path, notebook in read_course(root / "notebooks").items():
        text = as_notebook(notebook, lambda cell, path=path: moved(cell, f"notebooks/{path}", where, root, problems))
        (folder / where[f"notebooks/{path}"]).write_text(text, encoding="utf-8")
    return problems


def spread(text: str) -> str:
    """Return the text with command blocks made narrow: each command's trailing comment moves to the line above it."""

    def block(match: re.Match[str]) -> str:
        lines = match[3].splitlines()
        if match[2] or not lines or not all(line.startswith(COMMANDS) or not line.strip() or lines[n - 1].endswith("\\")
                   for n, line in enumerate(lines)):  # fmt: skip
            return match[0]
        spread: list[str] = []
        apart = max(map(len, lines)) > NARROW
        for n, line in enumerate(lines):
            command, _, comment = line.partition("  # ") if "  # " in line else line.partition(" # ")
            spread += [""] * (apart and n > 0 and bool(line.strip()) and not lines[n - 1].endswith("\\"))
            spread += [f"# {comment.strip()}"] * bool(comment) + [command.rstrip()]
        return "```sh\n" + "\n".join(spread) + "\n```"

    return re.sub(r"^(```+)([^\n]*)\n(.*?)^\1$", block, text, flags=re.M | re.S)


def _filled(name: str, path: str, root: Path, blocks: dict[str, Callable[[Path], str]], problems: list[str]) -> str:
    if name not in blocks:
        problems.append(f"{path}: there is no block {name!r}; there are {', '.join(blocks)}")
        return ""
    return blocks[name](root).strip()


def moved(text: str, path: str, where: dict[str, str], root: Path, problems: list[str]) -> str:
    """Return the text of the file `path`, with its links adapted to its place on the site.

    A link to a file of the checkout without a page is replaced by the file's name; a link to nothing is a problem.
    """

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", file):
            return f"{words} (`{target}`)"  # an address to look up: a reader may be offline
        if not file:
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
