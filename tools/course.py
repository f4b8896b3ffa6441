"""Write the notebooks' own descriptions into the pages that list them: docs/course.md (a table of questions), README.md
(the titles), the start page (a list), and the foot of every notebook (links to its neighbours).

    .venv/bin/python -m tools.course

tests/lab/test_course.py holds all to the notebooks.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from workbench.lab.course import START_PAGE, neighbours, questions_table, read_course, start_list, titles_list

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by `python -m tools.course`: begin -->\n", "<!-- made by `python -m tools.course`: end -->\n"
FOOT = '# %% [markdown] tags=["foot"]\n'
COLUMNS = 118


def pages() -> dict[Path, str]:
    """Return the new text of every page, by path, with the parts that are written from the notebooks."""
    course = read_course(ROOT / "notebooks")
    titles = textwrap.fill(f"Its notebooks: {titles_list(course)}.", COLUMNS, break_on_hyphens=False)
    blocks = {ROOT / "docs" / "course.md": questions_table(course), ROOT / "README.md": f"{titles}\n"}
    made = {page: _with_block(page.read_text(encoding="utf-8"), block) for page, block in blocks.items()}
    for name in (START_PAGE, *(each.file for each in course)):
        page = ROOT / "notebooks" / name
        text = page.read_text(encoding="utf-8")
        if name == START_PAGE:
            text = _with_block(text, start_list(course), "# ")
        made[page] = _with_foot(text, neighbours(course, name))
    return made


def _with_block(page: str, made: str, mark: str = "") -> str:
    """Return a page with its block renewed; `mark` begins each of its lines."""
    begin, end = f"{mark}{BEGIN}", f"{mark}{END}"
    before, _, rest = page.partition(begin)
    block = textwrap.indent(f"\n{made}\n", mark, lambda line: True).replace(f"{mark}\n", f"{mark.rstrip()}\n")
    return f"{before}{begin}{block}{end}{rest.partition(end)[2]}"


def _with_foot(notebook: str, made: str) -> str:
    """Return a notebook whose last cell is its foot."""
    return f"{notebook.partition(FOOT)[0].rstrip()}\n\n{FOOT}{textwrap.indent(made, '# ')}"


def main() -> None:
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
