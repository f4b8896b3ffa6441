"""An entry of the zoo is a page long, says what it is, and is written against the public API only."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench
from workbench import parts
from workbench.experiment.experiment import Experiment
from workbench.files import OWN_EXPERIMENTS
from workbench.zoo.entry import LoadedEntry, own_figures
from workbench.zoo.folder import ZOO_FOLDER, load_zoo
from workbench.zoo.question import TECHNIQUE, experiment_of

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = load_zoo()
SOURCES = [path for path in sorted(ZOO_FOLDER.glob("*.py")) if path.name != "__init__.py"]
MAX_LINES = 80
PUBLIC = ("workbench", "workbench.parts", "workbench.testing")

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
    "kivi": "docstrings name it as the source of the built-in groups of tokens and of their scales by channel",
    "orca": "a docstring names it as the source of padded batches, with which continuous ones are compared",
    "sarathi": "a docstring names it as the source of mixed steps, which any policy may plan",
    "h2o": "a docstring names it as the source of the built-in heavy hitters; a law holds that both agree",
    "snapkv": "the engine has it built in; the entry is its setting",
    "quarot": "a docstring names it as the source of rotated heads, a setting of any format",
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every import; the name is empty where the module itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


def forbidden_imports(source: str) -> list[str]:
    """Return imports that are neither of the public API, nor torch, nor of the standard library."""
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
    """Return names by which a module could be reached without an import statement, or an inner room."""
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = sorted(names & {"__import__", "eval", "exec", "globals"})
    reached = {f"{node.value.id}.{node.attr}" for node in ast.walk(tree)
               if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}  # fmt: skip
    found += sorted(name for name in reached if name in ("importlib.import_module", "sys.modules"))
    inner = {name.split(".")[1] for name in reached if name.startswith("workbench.")}
    return found + sorted(f"workbench.{name}" for name in inner - {*workbench.__all__, "parts"})


def library_words(stems: set[str], root: Path = ROOT) -> list[str]:
    """Return where the library names one of `stems`, as a word or as a part of an identifier."""
    pattern = re.compile("|".join(rf"(?<![a-z0-9]){_loose(stem)}(?![a-z0-9])" for stem in sorted(stems)), re.I)
    found = []
    for package in ("workbench", "compiled_kernels"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".js", ".j2") and stems:
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    found += [f"{path.relative_to(root)}:{number}: {match[0]}" for match in pattern.finditer(line)]
    return found


def _loose(stem: str) -> str:
    """Return a pattern for the stem however its words are joined: streaming_llm, StreamingLLM, streaming-llm."""
    return "[-_ ]?".join(map(re.escape, stem.split("_")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_imports_the_public_api_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert forbidden_imports(source) == [], "write against `workbench`, `workbench.parts` and `workbench.testing`"
    assert by_other_ways(source) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_file_is_an_entry(path: Path) -> None:
    assert path.stem in ENTRIES, f"{path.with_suffix('.yaml').name} is missing"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_it_is_a_page_with_an_equation_and_a_paper(entry: LoadedEntry) -> None:
    assert entry.lines <= MAX_LINES
    first, _, rest = entry.docstring.partition("\n")
    assert len(first) <= 120 and ":" in first, "first line: the technique's name, a colon, one sentence"
    assert re.search(r"^ {4,}\S.*(=|<=|>=|~|->)", rest, re.M), "an equation, in a block indented by four spaces"
    year = re.search(r"\b(19|20)\d\d\b", entry.settings.paper)
    assert year and year[0] in entry.docstring, "the paper with its year, in the YAML and in the docstring"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_one_line_turns_it_on(entry: LoadedEntry) -> None:
    lines = entry.yaml_file.read_text(encoding="utf-8").splitlines()
    (use,) = [line for line in lines if line.startswith("use:")]
    assert use.rstrip().endswith("}") and len(use) <= 240, "`use: {...}` on one line"
    variant = experiment_of(entry).variant(TECHNIQUE)
    assert Experiment.from_yaml(variant.to_yaml()) == variant
    named = re.findall(r"experiments/zoo/\w+\.py", use)
    assert all(name == f"experiments/zoo/{entry.name}.py" for name in named), "an entry names its own part"
    assert named or not entry.lines or own_figures(entry.source_file), "`use` names no part: its code is never used"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_its_parts_can_be_loaded_from_any_folder(
    entry: LoadedEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.custom import resolve_path

    monkeypatch.chdir(tmp_path)
    for path in re.findall(r"experiments/zoo/\w+\.py:\w+", entry.yaml_file.read_text(encoding="utf-8")):
        assert resolve_path(path) is not None


def test_the_library_knows_no_entry() -> None:
    assert not library_words({*ENTRIES} - ALLOWED.keys()), (
        "extend the API for a class of ideas, not for one technique; a general word goes into ALLOWED, with its reason"
    )


def test_every_allowed_word_is_needed() -> None:
    for word, reason in ALLOWED.items():
        assert reason and word in ENTRIES, f"{word}: is no entry"
        assert library_words({word}), f"{word}: the library does not say it"


def test_what_parts_offers() -> None:
    listed = {name for names in parts.PARTS.values() for name in names}
    assert listed == set(parts.__all__) == set(dir(parts))
    for name in parts.__all__:
        assert getattr(parts, name) is not None
    for names in parts.PARTS.values():
        assert list(names) == sorted(names, key=lambda name: (name[0].islower(), name.lower()))
    with pytest.raises(AttributeError, match="has no attribute 'Histroy'"):
        _ = parts.Histroy  # type: ignore[attr-defined] (the mistake)


def test_the_zoo_is_installed_with_the_package() -> None:
    assert ZOO_FOLDER == OWN_EXPERIMENTS / "zoo" == ROOT / "experiments" / "zoo"
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"zoo/*.yaml"' in declared and '"zoo/records/*.json"' in declared


def test_each_check_can_fail(tmp_path: Path) -> None:
    assert forbidden_imports("from workbench.engine.runner import Runner") == ["workbench.engine.runner.Runner"]
    assert forbidden_imports("import workbench.kv_cache") == ["workbench.kv_cache"]
    assert forbidden_imports("from workbench import engine") == ["workbench.engine"]
    assert forbidden_imports("from workbench.parts import Runner") == ["workbench.parts.Runner"]
    assert forbidden_imports("def f():\n    from . import typical") == ["..typical"]
    assert forbidden_imports("import numpy, einops") == ["numpy", "einops"]
    assert forbidden_imports("from workbench import WorkbenchError, parts\nimport math, torch.nn") == []
    assert by_other_ways("import importlib\nimportlib.import_module('workbench.engine')") == ["importlib.import_module"]
    assert by_other_ways("import workbench\nworkbench.engine.load") == ["workbench.engine"]
    assert by_other_ways("__import__('workbench.engine')") == ["__import__"]
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "a.py").write_text("class FancyIdea: ...\nx = fancy_ideas = no_fancy_idea_2\n")
    assert library_words({"fancy_idea"}, tmp_path) == [
        "workbench/a.py:1: FancyIdea",
        "workbench/a.py:2: fancy_idea",
    ]
