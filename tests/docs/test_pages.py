"""Python on the pages of docs/ runs and prints what its page says; commands of docs/scale.md print what it shows.

Other commands are run by tests/fresh_environment.py; that none is forgotten is tools/lint/blocks.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.thorough import THOROUGH
from tools.lint.tree import ROOT, pages
from tools.scale_page import PAGE, TIMED, blocks, printed_by
from workbench.models.store import is_at_hand

# What a page's prose says that its Python prints, as regular expressions in order.
SAID = {
    "docs/guide/agents.md": (r'"name": "double"',),
    "docs/guide/apart.md": (r"Counter\(\{'handed over': 1\}\)",),
    "docs/guide/cache_formats.md": (  # 512 fewer than float32's 6144, in one of six layers
        "5632 bytes a token", "decode 3 ragged right\nmixed right",
    ),
    "docs/guide/conversations.md": (
        "prompt: 22 tokens", r"\n\['template', 'template'\]", "as generated", r"2 turns were cut, \d+ tokens",
    ),
    "docs/guide/samplers.md": ("last layers ", "guided "),
    "docs/guide/serving.md": (
        r"1 0\.\d+ 0\.0 \d+\n", r"end_turn \['thinking', 'text'\] \d+\n16\n", r"\n16 \d+\n", "seconds=300, kept=32",
        "system changed: 16 tokens were computed again", "after the last turn 5 minutes", r"-\d+\.\d", r"\n0\.\d+\n",
        "'completion_tokens': 8, .* 59\n", "'completion_tokens': 8, .* 58\n",
    ),
    "docs/guide/structured_output.md": (
        r"\{'name': '.*', 'age': \d+\}", "'(yes|no)'", r"'\d{4}-\d\d'", r"'\[.*\]'", "uniqueItems",
    ),
    "docs/guide/traces.md": ("not admitted: 2 sequences run, max_num_seqs is 2", "'p50'"),
    "docs/guide/workloads.md": ("alone 0 of .*\nkept 4 of",),
    "docs/real_model.md": ("she ",),
    "docs/tour.md": (
        r"submitted request-\d+\n", "prefilled", "decoded", "finished", "prefill 5 tokens on 1 pages",
        r"cache\.fromat: unknown key; did you mean 'format'\?", "variant +ttft", r"dense .* 960 KiB\nint8 .* 690 KiB",
    ),
}  # fmt: skip
COMMANDS = blocks(PAGE.read_text(encoding="utf-8"))
# One of each kind: memory, capacity, simulate, cost.
TRIED = COMMANDS if THOROUGH else list({block[0].split()[1]: block for block in reversed(COMMANDS)}.values())


def python_of(page: str) -> list[str]:
    """Return a page's blocks of Python in order, but files that its commands read (`# mine.py`) and lines that name the
    reader's own runs."""
    found = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    return [re.sub(r'^.*"runs/.*\n', "", block, flags=re.M) for block in found if not block.startswith("# mine.py")]


def printed(blocks: list[str], name: str) -> list[str]:
    """Run blocks in one namespace, as a reader has it who runs them in order; return what each prints."""
    names: dict[str, object] = {"__name__": "docs"}
    found = []
    for block in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, name, "exec"), names)
        found.append(out.getvalue())
    return found


def unsaid(outputs: list[str], said: tuple[str, ...]) -> list[str]:
    """Return what was said and is not printed, in this order."""
    return [] if re.search(".*?".join(f"(?:{each})" for each in said), "\n".join(outputs), re.S) else list(said)


RUN = {path: blocks for path, text in pages(ROOT).items() if (blocks := python_of(text))}
REAL = pytest.mark.skipif(not is_at_hand("smollm2"), reason="smollm2 is not at hand: `workbench model get smollm2`")
MARKS = {"docs/guide/tensor_parallel.md": pytest.mark.processes} | {
    path: REAL for path, blocks in RUN.items() if any('load("smollm2"' in block for block in blocks)
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page, ())) for page in RUN])
def test_python_of_a_page_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = printed(RUN[page], page)
    for block, output in zip(RUN[page], outputs, strict=True):
        assert bool(output.strip()) == ("print(" in block), block
    assert unsaid(outputs, SAID.get(page, ())) == []


@pytest.mark.parametrize(("command", "output"), TRIED, ids=[command for command, _ in TRIED])
def test_a_command_prints_what_the_page_shows(command: str, output: str) -> None:
    assert printed_by(command) == output, "`python -m tools.scale_page` writes what is printed now"


def test_each_check_can_fail() -> None:
    page = "```python\n# mine.py\n```\n```python\nx = 1\nload('runs/a')\n```\n```python\nprint(x)\n```\n"
    assert printed(python_of(page.replace("'", '"')), "page") == ["", "1\n"]
    assert unsaid(["a 1", "b"], (r"\d", "b")) == [] and unsaid(["a 1", "b"], ("b", r"\d")) == ["b", r"\d"]
    assert SAID.keys() <= RUN.keys() and len(RUN) > 15 and len(COMMANDS) > 10
    assert TIMED.sub("", "a\n24 simulated seconds in 0.4 s\nb\n") == "a\nb\n"
