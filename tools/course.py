"""Write what the notebooks say of themselves into docs/course.md (the table of questions) and README.md (the titles).

    .venv/bin/python -m tools.course           # writes both
    .venv/bin/python -m tools.course --check   # says which is not as the notebooks have it

tests/lab/test_course.py holds both to the notebooks.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from workbench.lab.course import questions_table, read_course, titles_list

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by `python -m tools.course`: begin -->\n", "<!-- made by `python -m tools.course`: end -->\n"
COLUMNS = 118


def pages() -> dict[Path, str]:
    """Return the text of each page as the notebooks have it now."""
    course = read_course(ROOT / "notebooks")
    titles = textwrap.fill(f"Its notebooks: {titles_list(course)}.", COLUMNS, break_on_hyphens=False)
    blocks = {ROOT / "docs" / "course.md": questions_table(course), ROOT / "README.md": f"{titles}\n"}
    return {page: _with_block(page.read_text(encoding="utf-8"), block) for page, block in blocks.items()}


def _with_block(page: str, made: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [(page, text) for page, text in pages().items() if page.read_text(encoding="utf-8") != text]
    for page, text in stale:
        print(f"{page.relative_to(ROOT)} {'is not as the notebooks have it' if check else 'is written'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
