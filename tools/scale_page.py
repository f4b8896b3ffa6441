"""Write the output of its commands into docs/scale.md: `python -m tools.scale_page`.

A block of the page begins with `$ workbench ...`; a command continues on the next line after a backslash. What follows
the command is what it printed, without the line of the time that it took. tests/docs/test_pages.py runs the same.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
BLOCK = re.compile(r"^```\n\$ (workbench (?:.*\\\n)*.*)\n((?:(?!```).*\n)*)```$", re.M)
TIMED = re.compile(r"^.* simulated seconds in .* s\n", re.M)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the page's commands, each with the output that the page shows."""
    return [(command.replace("\\\n", ""), printed) for command, printed in BLOCK.findall(page)]


def printed_by(command: str) -> str:
    """Run a command of the page in this process and return what it prints."""
    from workbench.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(shlex.split(command)[1:])
    if status:
        raise SystemExit(f"{command}: exit {status}")
    lines = (line.rstrip() for line in TIMED.sub("", out.getvalue()).splitlines())
    return "".join(f"{line}\n" for line in lines)


def filled(page: str) -> str:
    """Return the page with the present output of each command."""
    return BLOCK.sub(lambda m: f"```\n$ {m[1]}\n{printed_by(m[1].replace(chr(92) + chr(10), ''))}```", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
