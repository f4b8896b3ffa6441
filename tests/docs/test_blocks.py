"""Every block of code and every command of README and docs/ is run by a test, or has a row with a reason here.

Python blocks are run by tests/test_docs.py, commands by tests/fresh_environment.py (a step of .ci/run); a command that
is left out there still has to parse.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.fresh_environment import documented, documented_pages
from tests.test_docs import PAGES, ROOT
from workbench.cli import app
from workbench.cli.init import TEMPLATE
from workbench.serve.config import ServeConfig
from workbench.zoo.entry import LoadedEntry

# Blocks that are no commands of ours and no Python: how each begins, by page, and what holds it.
OTHERS = {
    "README.md": {"text -> prompt/": "a drawing"},
    "docs/first_run.md": {
        "How fast does the demo": "output; tests/test_readme_block.py holds it to its record",
        "pip install dist": "tests/fresh_environment.py installs the wheel and runs these commands in a new folder",
    },
    "docs/scale.md": {"$ workbench": "tests/test_scale_page.py runs the commands and compares what they print"},
    "docs/guide/attention.md": {"backend 'mlir' cannot": "a message; tests/testing/test_attention_kit.py holds it"},
    "docs/guide/apart.md": {"pages of prefill": "a message; tests/cluster holds it"},
    "docs/guide/fleets.md": {
        "config = workbench.EngineConfig": "tests/cluster runs the same calls; processes take long to start",
        "os.kill": "tests/cluster kills replicas",
        "   0.0": "output of a run",
        "cluster.deploy": "tests/cluster deploys; the page leaves lines out",
    },
    "docs/guide/serving.md": {
        "curl": "tests/serve asks the same addresses by HTTP",
        'pip install "lm-eval': "experiments/lm_eval_parity.py runs it; it wants an environment of its own",
        "st run": "tests/serve/test_schema.py runs schemathesis in process",
        "model: demo-chat": "a server's settings: read below",
    },
    "docs/zoo.md": {"technique: ": "an entry: read below"},
    "docs/guide/tensor_parallel.md": {"torchrun": "tests/tensor_parallel starts the same ranks"},
}
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.M | re.S)
OURS = ("workbench ", "python -")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def other_blocks(page: Path) -> Iterator[str]:
    """Yield blocks of a page that no test runs: not Python, not only commands of this project, no list of contents."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line for line in block.splitlines() if line.strip()]
        ours = not language and all(
            line.startswith(OURS) or (line.startswith("make ") and line.split()[1] in targets) for line in lines
        )
        if language != "python" and not language.startswith("{") and not ours:
            yield block


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_is_run_or_has_a_reason(page: Path) -> None:
    known = OTHERS.get(name_of(page), {})
    unknown = [block for block in other_blocks(page) if not block.startswith(tuple(known))]
    assert not unknown, "write it as ```python or as commands, or give it a row in OTHERS with what holds it"


def test_every_row_is_needed() -> None:
    for name, rows in OTHERS.items():
        blocks = list(other_blocks(ROOT / name))
        for start in rows:
            assert any(block.startswith(start) for block in blocks), (name, start)


def test_every_page_is_looked_at() -> None:
    found = {path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("reference", "project")}
    assert found | {ROOT / "README.md"} == set(PAGES)
    assert set(documented_pages()) == set(PAGES) - {ROOT / "docs" / "scale.md"}


def commands() -> list[str]:
    return sorted({step.command for step in documented() if step.command.startswith("workbench ")})


@pytest.mark.parametrize("command", commands())
def test_a_command_parses(command: str) -> None:
    """Its options and arguments are those of today, also where the command takes too long to be run."""
    assert usage_error(shlex.split(command)[1:]) is None


def usage_error(words: list[str]) -> str | None:
    """Return what is wrong with a command line of `workbench`, None if nothing is; run nothing."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="workbench")
    try:
        while hasattr(command, "resolve_command") and words and not words[0].startswith("-"):
            name, command, words = command.resolve_command(context, words)
            context = command.context_class(command, parent=context, info_name=name)
        command.make_context(context.info_name, words, parent=context.parent)
    except Exception as error:
        if getattr(error, "exit_code", None) != 2:
            raise
        return str(error)
    return None


def yaml_of(page: str) -> Any:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [block for language, block in BLOCK.findall(text) if language == "yaml"]
    return yaml.safe_load(block)


def test_settings_in_yaml_are_read() -> None:
    config = ServeConfig.model_validate(yaml_of("guide/serving.md"))
    assert config.server.max_waiting == 64 and config.cache.format == "int8"


def test_an_entry_of_the_zoo_is_one(tmp_path: Path) -> None:
    (tmp_path / "top_a.yaml").write_text(yaml.safe_dump(yaml_of("zoo.md")))
    (tmp_path / "top_a.py").write_text((TEMPLATE / "sampler.py").read_text(encoding="utf-8"))
    entry = LoadedEntry.load(tmp_path / "top_a.yaml")
    ((part,),) = entry.settings.use.values()
    assert (TEMPLATE / part["path"].partition(":")[0]).is_file() and entry.settings.kind == "sampling"


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nworkbench run a\nmake demo\n```\n```python\nx\n```\n```\nmake nothing\n```\n```yaml\na: 1\n```\n"
    )
    assert list(other_blocks(page)) == ["make nothing\n", "a: 1\n"]
    for wrong in (["rnu", "x.yaml"], ["run", "x.yaml", "--sett", "a=1"], ["kernels", "shwo"], ["run"]):
        assert usage_error(wrong)
