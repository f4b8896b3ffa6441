"""Check that every code block and every command of README and docs/ is run by something, or is listed with a reason.

Python blocks are run by tests/docs/test_pages.py, commands by tests/fresh_environment.py (a step of .ci/run); a command
that is not run there must still parse.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml

from tests.fresh_environment import LEFT_OUT, Step, left_out, steps
from tools.lint.tree import ROOT, line_of, pages
from workbench.claims.claim import Claim
from workbench.claims.technique import LoadedTechnique
from workbench.cli import app
from workbench.cli.init import TEMPLATE
from workbench.errors import WorkbenchError
from workbench.serve.config import ServeConfig

# Blocks that are no commands of ours and no Python: how each begins, by page, and what holds it.
OTHERS: dict[str, dict[str, str]] = {
    "README.md": {"text -> prompt/": "a drawing"},
    "docs/first_run.md": {
        "How fast does the demo": "output; tools/lint/first_run.py holds it to its record",
        "pip install dist": "tests/fresh_environment.py installs the wheel and runs these commands in a new folder",
    },
    "docs/scale.md": {"$ workbench": "tests/docs/test_pages.py runs the commands and compares what they print"},
    "docs/guide/attention.md": {"backend 'mlir' does not": "a message; tests/testing/test_attention_kit.py holds it"},
    "docs/guide/apart.md": {"pages of prefill": "a message; tests/cluster holds it"},
    "docs/guide/fleets.md": {
        "config = workbench.EngineConfig": "tests/cluster runs the same calls; processes take long to start",
        "os.kill": "tests/cluster kills replicas",
        "   0.0": "output of a run",
        "cluster.deploy": "tests/cluster deploys; the page leaves lines out",
    },
    "docs/guide/claims.md": {"says: ": "tests/claims/test_claims.py measures it"},
    "docs/guide/models.md": {
        "pip download": "tests/models runs the client against a folder of wheels",
        "pip install 'inference-workbench[hub]'": "tests/models/test_hub.py asks an endpoint of its own",
    },
    "docs/guide/serving.md": {
        "curl": "tests/serve asks the same addresses by HTTP",
        'pip install "lm-eval': "experiments/lm_eval_parity.py runs it; it wants an environment of its own",
        "st run": "tests/serve/test_schema.py runs schemathesis in process",
        "model: demo-chat": "a server's settings: read below",
    },
    "docs/guide/workloads.md": {"question: ": "tests/measure/test_compare_variants.py runs one with this workload"},
    "docs/zoo.md": {"technique: ": "an entry: read below"},
    "docs/guide/tensor_parallel.md": {"torchrun": "tests/tensor_parallel starts the same ranks"},
}
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(workbench [^`\n]+)`")
OURS = ("workbench ", "python -")
ACTIVATE = "source .venv/bin/activate"  # by it a shell finds the commands below
# The pages that a reader begins with, in a checkout.
ACTIVATED = ("README.md", "docs/index.md", "docs/guide/index.md", "docs/real_model.md", "docs/tour.md")


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield blocks that are neither run nor listed, commands that do not parse, and listed rows that match no block."""
    read = pages(root)
    found: list[Step] = []
    for path, text in read.items():
        known = OTHERS.get(path, {})
        others = list(other_blocks(text, _targets(root)))
        for block in others:
            if not block.startswith(tuple(known)):
                first = block.splitlines()[0]
                yield f"{path}:{line_of(text, block)}: nothing runs {first!r}; ```python, commands, or a row in OTHERS"
        for start in known:
            if not any(block.startswith(start) for block in others):
                yield f"{path}:1: no block begins with {start!r}; take its row out of OTHERS"
        for line, reason in _unreadable(path, text):
            yield f"{path}:{line}: {reason}; settings as of today"
        for words in INLINE.findall(text):
            error = None if "..." in words else usage_error(shlex.split(words.split(" && ")[0])[1:])
            if error and "Missing parameter" not in error:  # a sentence may name a command without its arguments
                yield f"{path}:{line_of(text, words)}: {words}: {error}; `workbench --help` lists what there is"
        if path in ACTIVATED and ACTIVATE not in text:
            yield f"{path}:1: no `{ACTIVATE}`; say it before the first command, or `workbench` is not found"
        if path == "docs/scale.md":  # tests/docs/test_pages.py runs its commands
            continue
        for step in dict.fromkeys(steps(text)):
            found.append(step)
            for fault in _faults(step):
                yield f"{path}:{line_of(text, step.command)}: {step.command}: {fault}"
    for start, reason in LEFT_OUT.items():
        if not reason or not any(step.command.startswith(start) for step in found):
            yield f"tests/fresh_environment.py:1: no command begins with {start!r}; take its row out of LEFT_OUT"


def _targets(root: Path) -> set[str]:
    file = root / "Makefile"
    return set(re.findall(r"^(\w+):", file.read_text(encoding="utf-8"), re.M)) if file.exists() else set()


def other_blocks(page: str, targets: set[str]) -> Iterator[str]:
    """Yield the blocks of a page that need a listed reason: all except Python, tables of contents, and blocks with only
    this project's commands."""
    for language, block in BLOCK.findall(page):
        lines = [line for line in block.splitlines() if line.strip()]
        ours = not language and all(
            line.startswith((*OURS, ACTIVATE)) or (line.startswith("make ") and line.split()[1] in targets)
            for line in lines
        )
        if language != "python" and not language.startswith("{") and not ours:
            yield block


def _faults(step: Step) -> Iterator[str]:
    """Yield what is wrong with a command: its options, the file above it, or that a kit is not run."""
    if step.command.startswith("workbench ") and (error := usage_error(shlex.split(step.command)[1:])):
        yield f"{error}; `workbench --help` lists what there is"
    for file, name in re.findall(r"([\w/]+\.py):(\w+)", step.command):
        own = dict(step.files).get(file, "")
        if name not in own and not (ROOT / file).is_file() and not left_out(step.command):
            yield f"{file} has no {name}; show the file above the command, its name in the first line"
    if "workbench.testing" in step.command and left_out(step.command):
        yield "a kit that is not run; take its row out of LEFT_OUT"


def usage_error(words: list[str]) -> str | None:
    """Return the error of a `workbench` command line, or None if it is right; nothing is run."""
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


def _unreadable(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) of YAML that is no server's settings, no claim and no entry of the zoo."""
    for language, block in BLOCK.findall(text):
        if language == "yaml":
            try:
                values = yaml.safe_load(block)
                if "technique" in values:
                    _read_entry(values)
                else:
                    (Claim if "says" in values else ServeConfig).model_validate(values)
            except (WorkbenchError, ValueError, OSError) as error:
                yield line_of(text, block), " ".join(str(error).split())


def _read_entry(values: dict[str, Any]) -> None:
    """Read an entry of the zoo beside the sampler that `workbench init` writes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "entry.yaml").write_text(yaml.safe_dump(values))
        (Path(folder) / "entry.py").write_text((TEMPLATE / "sampler.py").read_text(encoding="utf-8"))
        entry = LoadedTechnique.load(Path(folder) / "entry.yaml")
    for part in (part for parts in entry.settings.use.values() for part in parts):
        if not (TEMPLATE / part["path"].partition(":")[0]).is_file():
            raise WorkbenchError(f"{part['path']}: no file of `workbench init`")
