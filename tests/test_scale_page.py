"""docs/scale.md: every command prints what the page shows, and every figure of its prose is one of them."""

from __future__ import annotations

import re

import pytest

from tools.scale_page import BLOCK, PAGE, TIMED, blocks, printed_by

TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = blocks(TEXT)
ASSUMED = "## What is assumed"  # a section of figures that no command prints; they are options of the commands
FIGURE = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.,-])\d+\.\d+|(?<![\w.,-])\d{2,}")


def unprinted(text: str) -> list[str]:
    """Return the figures of a page's prose that stand in no command of it and in nothing that one prints."""
    shown = " ".join(f"{command}\n{printed}" for command, printed in blocks(text))
    head, _, rest = text.partition(ASSUMED)
    prose = head + "\n## ".join(rest.split("\n## ")[1:])
    prose = re.sub(r"`[^`]*`", "", BLOCK.sub("", prose))
    return [figure for figure in FIGURE.findall(prose) if not _stands_in(figure, shown)]


def _stands_in(figure: str, shown: str) -> bool:
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", shown) is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("command", "printed"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(command: str, printed: str) -> None:
    assert printed_by(command) == printed, "`python -m tools.scale_page` writes what is printed now"


def test_the_pages_figures_are_printed_by_its_commands() -> None:
    assert len(COMMANDS) == TEXT.count("$ workbench") > 10
    assert unprinted(TEXT) == []


def test_each_check_can_fail() -> None:
    block = "```\n$ workbench memory demo \\\n    --batch 140\n23.4 and 1,140\n```\n"
    page = f"It serves 23.5 requests/s on 140 cards.\n\n{block}"
    assert blocks(page) == [("workbench memory demo     --batch 140", "23.4 and 1,140\n")]
    assert unprinted(page) == ["23.5"] and unprinted(page.replace("140 cards", "40 cards")) == ["23.5", "40"]
    assert TIMED.sub("", "a\n24 simulated seconds in 0.4 s\nb\n") == "a\nb\n"
