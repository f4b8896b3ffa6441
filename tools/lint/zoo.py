"""Check that an entry of the zoo is at most a page long, states what it is, and uses only the public API."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import workbench
from tools.lint.tree import ROOT
from workbench import parts
from workbench.claims.comparison import TECHNIQUE
from workbench.claims.technique import LoadedTechnique, experiment_of, load_zoo, own_figures
from workbench.custom import resolve_path
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment

MAX_LINES = 80
PUBLIC = ("workbench", "workbench.parts", "workbench.testing")

# The door of the core through which a setting passes; the longest name that begins it counts.
DOORS = {
    "attention": "AttentionRule",
    "backend": "Program",
    "cache": "CacheFormat",
    "cache.evict": "Eviction",
    "cache.prefix": "Policy",  # the one that asks which tokens are cached
    "sampling": "Filter",
    "sampling.beams": "Decoding",
    "sampling.best_of": "Decoding",
    "sampling.constraint": "Constraint",
    "sampling.ranking": "Decoding",
    "sampling.sampler": "Sampler",
    "sampling.search": "Decoding",
    "schedule": "Policy",
    "speculate": "Proposer",
}
# Stems of entries that are general words, or names of what the engine itself has for any part, and may therefore occur
# in the library: each with the reason. Any other stem in the library would be a change for one technique alone.
ALLOWED = {
    "alibi": "a setting of any attention: `position: alibi`",
    "dynamic_ntk": "a docstring names it as the source of a kind of rotary scaling",
    "gated_attention": "a class of Qwen 3 Next's layers, with trained gates",
    "grouped_query": "what every attention here is",
    "nope": "columns without rotary in DeepSeek's latent attention",
    "ntk_aware": "a docstring of rotary scaling",
    "qk_norm": "a setting of any attention",
    "yarn": "a kind of rotary scaling",
    "dry": "the command `sweep --dry-run`",
    "prompt_lookup": "the engine has it built in; the entry restates it as a part, and a law holds that both agree",
    "streaming_llm": "docstrings name it as the source of windows with sinks, which are settings of any attention",
    "typical": "a word of English",
    "quest": "a docstring names it as an example of a choice of pages, which any function is",
    "moba": "as quest",
    "mirostat": "a field of llama.cpp's, which the server refuses by name",
    "top_a": "as mirostat",
    "xtc": "as mirostat",
    "kivi": "docstrings name it as the source of the built-in groups of tokens and of their scales by channel",
    "orca": "a docstring names it as the source of padded batches, with which continuous ones are compared",
    "sarathi": "a docstring names it as the source of mixed steps, which any policy may plan",
    "h2o": "a docstring names it as the source of the built-in heavy hitters; a law holds that both agree",
    "snapkv": "the engine has it built in; the entry is its setting",
    "quarot": "a docstring names it as the source of rotated heads, a setting of any format",
}


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield faults of the entries and their sources, and places where the library names an entry."""
    folder = root / "experiments" / "zoo"
    try:
        entries = load_zoo(folder)
    except WorkbenchError as error:
        yield f"experiments/zoo:1: {error}; mend the entry"
        return
    for entry in entries.values():
        yield from (f"experiments/zoo/{entry.name}.yaml:1: {fault}" for fault in _faults(entry))
    for path in sorted(folder.glob("*.py")):
        if path.name == "__init__.py":
            continue
        where, source = f"experiments/zoo/{path.name}:1", path.read_text(encoding="utf-8")
        if path.stem not in entries:
            yield f"{where}: no entry; write {path.stem}.yaml beside it"
        for name in (*forbidden_imports(source), *by_other_ways(source)):
            yield f"{where}: {name}; write against {', '.join(PUBLIC)}"
    words: dict[str, list[str]] = {}
    for place, stem in library_words({*entries}, root):
        words.setdefault(stem, []).append(place)
    for stem in words.keys() - ALLOWED.keys():
        yield f"{words[stem][0]}: knows the entry {stem}; extend the API for a class of ideas, or a row in ALLOWED"
    for stem, reason in ALLOWED.items():
        if not reason or stem not in words:
            yield f"tools/lint/zoo.py:1: no entry {stem!r}, or the library does not say it; take its row out of ALLOWED"


def door_of(setting: str) -> str:
    """Return the part of the core that a setting of an entry acts through (its "door", see shared/design.md); empty if
    there is none."""
    return DOORS.get(setting) or (door_of(setting.rpartition(".")[0]) if "." in setting else "")


def _faults(entry: LoadedTechnique) -> Iterator[str]:
    first, _, rest = entry.docstring.partition("\n")
    year = re.search(r"\b(19|20)\d\d\b", entry.settings.paper)
    if entry.lines > MAX_LINES:
        yield f"{entry.lines} lines; a page of {MAX_LINES}"
    if len(first) > 120 or ":" not in first:
        yield "the docstring's first line; the technique's name, a colon, one sentence"
    if not re.search(r"^ {4,}\S.*(=|<=|>=|~|->)", rest, re.M):
        yield "no equation; in a block of the docstring, indented by four spaces"
    if year is None or year[0] not in entry.docstring:
        yield "no year of the paper; in `paper` and in the docstring"
    text = entry.file.read_text(encoding="utf-8")
    if not all(map(door_of, entry.settings.use)):
        yield f"`use` passes through no door: {', '.join(entry.settings.use)}; a setting of DOORS"
    use = [line for line in text.splitlines() if line.startswith("use:")]
    if len(use) != 1 or not use[0].rstrip().endswith("}") or len(use[0]) > 240:
        yield "more than one line turns it on; `use: {...}` on one line"
    variant = experiment_of(entry).variant(TECHNIQUE)
    if Experiment.from_yaml(variant.to_yaml()) != variant:
        yield "its experiment is not read back from its YAML; settings that YAML can hold"
    named = re.findall(r"experiments/zoo/\w+\.py", "".join(use))
    if any(name != f"experiments/zoo/{entry.name}.py" for name in named):
        yield f"`use` names {', '.join(named)}; its own part"
    if not named and entry.lines and not own_figures(entry.source_file):
        yield "`use` names no part; its code is never used"
    with tempfile.TemporaryDirectory() as anywhere, contextlib.chdir(anywhere):  # parts are found from any folder
        for path in re.findall(r"experiments/zoo/\w+\.py:\w+", text):
            try:
                resolve_path(path)
            except WorkbenchError as error:
                yield f"{' '.join(str(error).split())}; a part of its own"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every import of a syntax tree; the name is empty if the module itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


def forbidden_imports(source: str) -> list[str]:
    """Return the imports that are neither from the public API, nor torch, nor from the standard library."""
    wrong = []
    for module, name in imported(ast.parse(source)):
        whole = f"{module}.{name}" if name else module
        top = module.split(".")[0]
        if top in ("__future__", "torch") or top in sys.stdlib_module_names:
            continue
        known = {"workbench": workbench.__all__, "workbench.parts": parts.__all__}.get(module)
        if module not in PUBLIC or (name and known is not None and name not in [*known, "parts"]):
            wrong.append(whole)
    return wrong


def by_other_ways(source: str) -> list[str]:
    """Return the names by which a source could reach a module without an import statement, or an inner package of
    workbench."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = sorted(names & {"__import__", "eval", "exec", "globals"})
    reached = {f"{node.value.id}.{node.attr}" for node in ast.walk(tree)
               if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}  # fmt: skip
    found += sorted(name for name in reached if name in ("importlib.import_module", "sys.modules"))
    inner = {name.split(".")[1] for name in reached if name.startswith("workbench.")}
    return found + sorted(f"workbench.{name}" for name in inner - {*workbench.__all__, "parts"})


def library_words(stems: set[str], root: Path = ROOT) -> list[tuple[str, str]]:
    """Return (file:line, stem) for each place where the library contains one of `stems`, as a word or within an
    identifier.

    The words of a stem may be joined in any way: streaming_llm, StreamingLLM, streaming-llm."""
    loose = {stem.replace("_", ""): stem for stem in stems}
    words = "|".join("[-_ ]?".join(map(re.escape, stem.split("_"))) for stem in sorted(stems, key=len, reverse=True))
    pattern = re.compile(rf"(?<![a-z0-9])(?:{words})(?![a-z0-9])", re.I)
    found = []
    for package in ("workbench", "compiled_kernels"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".js", ".j2"):
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    for match in pattern.finditer(line):
                        stem = loose[re.sub(r"[-_ ]", "", match[0]).lower()]
                        found.append((f"{path.relative_to(root).as_posix()}:{number}", stem))
    return found
