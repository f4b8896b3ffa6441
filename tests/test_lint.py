"""Each guard of `python -m tools.lint` finds what is planted, and says what would be right."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from tools.lint import __main__ as lint
from tools.lint.first_run import unmeasured
from tools.lint.front_door import undocumented
from tools.lint.planted_bugs import faults as unplanted
from tools.lint.tree import ROOT
from tools.lint.zoo import by_other_ways, door_of, forbidden_imports, library_words
from tools.planted_bugs import BUGS, PlantedBug

RECORD, SHOWN = "first_light-20261121-102004", "first_light-20261129-030931"
LONG = "x" * 121
FIRST_RUN, ENTRY = ((ROOT / path).read_text() for path in ("docs/first_run.md", "experiments/zoo/top_a.yaml"))
SCALE = "\n\n```\n$ workbench model memory demo \\\n    --batch 140\n23.4 and 1,140\n```\n"
DOCUMENTED = """
def f(a, b, *c):
    '''Do it.

    Args:
        a, b: both.
        c: more
            d: is text.
        {name}: one.
    '''

class Base:
    g: int

class Child(Base):
    '''One.

    Args:
        g: of the base.
        h: of the constructor.
        {field}: none.
    '''

    def __init__(self, h): ...
"""
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# One request\n", "Nobody waits here."]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", '"""Which of them?"""'], "outputs": ["told"]},
    ]
}
# By guard: a file, and texts of it with words of the fault each has; None: none.
PLANTED: dict[str, tuple[str, dict[str, str | None]]] = {
    "layout": (
        "tests/a/test_x.py",
        {
            "from tests.b.test_y import z": "no test imports a test",
            "import tests.test_y": "no test imports a test",
            "from .test_y import z": "no test imports a test",
            "run('from tests.b import test_y')": "no test imports a test",
            "from tests.helpers.rows import rows\nfrom workbench.testing import test_names": None,
            "draw = random.Random()": "no seed",
            "draw = Random(os.urandom(8))": "no seed",
            "draw = random.Random(run_seed())": None,
        },
    ),
    "words": (
        "tests/test_a.py",
        {
            "def f(holdings): ...": "1: 'holdings' is no word of the field; say KVCacheManager",
            "MOST_WORK = 1": "'MOST_WORK'",
            "\ndef test_what_is_told(): ...": "2: 'told'",
            "HeldBack, set_backs": "'set_backs'",
            "# A batch and its company.": "'company'",
            "A request is set back, which\nno lane notices.": "2: 'lane'",
            "Planets estimate knobless explanes, planed.": None,
        },
    ),
    "docstrings": (
        "tests/a.py",
        {
            '"""What it is."""': "1: 'What it is.' is no sentence",
            '%run\n"""Which of them?"""': "2: 'Which of them?",
            '"""Say what it is."""': None,
            DOCUMENTED.format(name="e", field="h"): "2: 'e' below Args",
            DOCUMENTED.format(name="b", field="i"): "15: 'i' below Args",
            DOCUMENTED.format(name="b", field="g"): None,
        },
    ),
    "reasons": (
        "tests/a.py",
        {
            "skipif(a)": "skips without a reason",
            "pytest.skip()": "skips without a reason",
            "pytest.importorskip('a')": "skips without a reason",
            "skipif(a, reason='b')\npytest.skip('b')": None,
        },
    ),
    "clocks": (
        "tests/test_a.py",
        {
            "began = time.monotonic()": "time.monotonic",
            "assert perf_counter() - began < 1": "perf_counter",
            "assert time.process_time() - began < MAX_SECONDS": "time.process_time",
            "began = time.thread_time_ns()": "time.thread_time_ns",
            "clock = time.process_time": "time.process_time",
            "time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)": "time.clock_gettime",
            "began = resource.getrusage(resource.RUSAGE_SELF).ru_utime": "resource.getrusage",
            "assert os.times().user < 1": "os.times",
            "assert psutil.Process().cpu_times().user < 1": "cpu_times",
            "now = datetime.datetime.now()": "datetime.now",
            "run('print(time.process_time())')": "in a text: process_time(",
            "time.sleep(0.1)": "time.sleep",
            "assert job.wait(60)": "wait(60)",
            "thread.join(2 * 5)": "join(2 * 5)",
            "subprocess.run(words, timeout=60)": "timeout=60",
            "@pytest.mark.timeout(600)\ndef test(): ...": "mark.timeout(600)",
            "page.set_default_timeout(120_000)": "set_default_timeout(120000)",
            "page.ask('v.wait(60)')": "in a text: wait(6",
            "@settings(deadline=200)\ndef test(): ...": "deadline",
            "settings(suppress_health_check=[HealthCheck.function_scoped_fixture])": "too_slow",
            "assert timing.seconds < 0.1": "seconds < 0.1",
            "assert 2e-6 > row['wall_s'] / 2000": "wall_s < 2e-06",
            "assert 0 < timing.seconds < 5": "seconds < 5",
            "assert job.wait() and thread.join(limit(5))\nsubprocess.run(words, timeout=limit(60))": None,
            "assert 0 < timing.seconds and timing.p10 <= timing.seconds <= timing.p90": None,
            "until(lambda: file.exists())\nsettings(deadline=None)\n', '.join(names)": None,
            "assert output_tokens_per_s < 4 and seconds == 2.0": None,
        },
    ),
    "scale": (
        "docs/scale.md",
        {
            f"It serves 23.5 requests/s on 140 cards.{SCALE}": "23.5 is printed by no command",
            f"It serves 23.4 requests/s on 40 cards.{SCALE}": "40 is printed by no command",
            f"It serves 23.4 requests/s on 140 cards.{SCALE}": None,
            f"$ workbench cost{SCALE}": "1 blocks for 2 commands",
        },
    ),
    "figures": (
        "README.md",
        {
            "It decodes 1,142 tokens/s here.": "1,142: no record is named",
            "It is 1.38 times as fast.": "1.38: no record is named",
            f"It decodes 1,143 tokens/s (`{RECORD}`).": f"1,143: not in {RECORD}",
            f"It decodes 1,142 tokens/s (`{RECORD}`).": None,
            f"It takes 6.79 ms (`experiments/records/{RECORD}.json`).": None,
            f"It prints (`{RECORD}`):\n\n```\nTTFT 6.78\n1,064 tokens/s\n```\n": f"6.78: not in {RECORD}",
            f"It prints (`{RECORD}`):\n\n```\nTTFT 6.79\n1,064 tokens/s\n```\n": None,
            "It prints:\n\n```\nTTFT 6.79\n1,064 tokens/s\n```\n": "4: 6.79: no record is named",
            "See `experiments/records/none-20260101-000000.json`.": "there is no such record",
            f"See `{RECORD}`.\n\nIt takes 120.15 ms.": "3: 120.15: no record is named",
            "```\nworkbench generate --max-tokens 96 --temperature 0.8\n```\nand four times as much": None,
        },
    ),
    "first_run": (
        "docs/first_run.md",
        {
            "# No block": "names no record",
            FIRST_RUN.replace("tokens/s", "tokens/h"): "not what first_light-",
            FIRST_RUN: None,
        },
    ),
    "release": (
        "CITATION.cff",
        {"version: 0.0.1": "version is '0.0.1'", "authors: [{name: Me, age: 3}]": "those of LICENSE"},
    ),
    "front_door": (
        "notebooks/01_a.py",
        {
            "from workbench.engine.runner import Runner": "1: workbench.engine.runner;",
            "import tools.course": "tools.course",
            "x = runner.Live": "Live",
            "import workbench\nfrom workbench import widgets\nimport torch": None,
        },
    ),
    "pages": (
        "docs/guide/python.md",
        {
            f"# A\n{LONG}": "2: 121 characters",
            "a\n\n\nb": "3: two blank lines",
            "Families that are read, with their fields: llama, lama. What a config": "'lama'; list every family",
            "Families that are read: mistral. What a config": "'llama'; list every family",
            "Families are read": "no number of families",
        },
    ),
    "records": (
        "experiments/records/a-20260101-000000.json",
        {
            json.dumps({"experiment": {"lane": "auto"}}): "lane",
            json.dumps({"experiment": "question: a?\nlane: auto\n"}): "lane",
            json.dumps({"experiment": "question: a?\nworkload: {kind: prompts, prompts: [a]}\n"}): None,
        },
    ),
    "blocks": (
        "docs/guide/a.md",
        {
            "```\nmake nothing\n```": "2: nothing runs 'make nothing'",
            "```sh\nls\n```": "nothing runs 'ls'",
            "```\nworkbench rnu x.yaml\n```": "rnu",
            "```\nworkbench run x.yaml --sett a=1\n```": "--sett",
            "```\nworkbench run\n```": "workbench run:",
            "```\nworkbench run x.yaml --set a=mine.py:Coldest\n```": "mine.py has no Coldest",
            "```yaml\nmodel: demo-chat\nserver: {prot: 80}\n```": "prot",
            "```\nworkbench doctor\nmake demo\n```\n```python\nx\n```": None,
        },
    ),
    "zoo": (
        "experiments/zoo/wrong.py",
        {
            "import torch": "no entry; write wrong.yaml",
            "from workbench.engine.runner import Runner": "workbench.engine.runner.Runner; write against",
            "import importlib\nimportlib.import_module('workbench.engine')": "importlib.import_module",
        },
    ),
}


def test_every_guard_can_fail() -> None:
    modules = {path.stem for path in Path(lint.__file__).parent.glob("*.py")} - {"__init__", "__main__", "tree"}
    assert modules == {*lint.GUARDS} == {*PLANTED, "planted_bugs"}
    assert all(any(texts.values()) for _, texts in PLANTED.values())


def found(guard: str, root: Path, path: str, text: str) -> list[str]:
    """Return the faults that a guard finds in one file, which lies beside an entry of the zoo."""
    for name in ("Makefile", "experiments/zoo/top_a.py", "experiments/zoo/top_a.yaml", path):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n" if name == path else (ROOT / name).read_text())
    return [fault for fault in import_module(f"tools.lint.{guard}").faults(root) if fault.startswith(f"{path}:")]


@pytest.mark.parametrize("guard", PLANTED)
def test_what_is_planted_is_found(guard: str, tmp_path: Path) -> None:
    path, texts = PLANTED[guard]
    for number, (text, words) in enumerate(texts.items()):
        faults = found(guard, tmp_path / str(number), path, text)
        assert all(";" in fault and fault.count("\n") == 0 for fault in faults)
        assert any(words in fault for fault in faults) if words else not faults, (text, faults)


def test_a_fault_ends_the_command_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert lint.main(["scale"]) == 0 and capsys.readouterr().out == "1 guards, no faults\n"
    monkeypatch.setattr("tools.lint.scale.faults", lambda: iter(["a.md:1: wrong; right"]))
    assert lint.main(["scale"]) == 1 and capsys.readouterr().out == "a.md:1: wrong; right\n1 guards, 1 faults\n"


def test_notebooks_are_read_by_their_cells(tmp_path: Path) -> None:
    for guard, fault in {"words": "2: 'nobody'", "docstrings": "4: 'Which"}.items():
        assert fault in found(guard, tmp_path / guard, "notebooks/a.ipynb", json.dumps(NOTEBOOK))[0]


def test_an_ignore_without_a_reason_is_found(tmp_path: Path) -> None:
    text = "x = 1  # type: ignore[a]\nx = 1  # noqa: E1\nx = 1  # noqa: E1 (why)\nx = 1  # type: ignore[a]  # why"
    faults = found("reasons", tmp_path, "workbench/a.py", text)
    assert [fault.split(":")[1] for fault in faults] == ["1", "2"]


def test_an_entry_that_is_no_page_is_found(tmp_path: Path) -> None:
    broken = ENTRY.replace("use: {", "use:\n  {")
    assert any("one line" in fault for fault in found("zoo", tmp_path, "experiments/zoo/top_a.yaml", broken))
    hidden = ENTRY.replace("use: {", "use: {measure.rounds: 2, ")
    assert any("no door: measure" in fault for fault in found("zoo", tmp_path, "experiments/zoo/top_a.yaml", hidden))
    assert [door_of(name) for name in ("cache.evict", "cache.codec", "model")] == ["Eviction", "CacheFormat", ""]
    for source in (
        "from workbench.parts import Runner",
        "import workbench.kv_cache",
        "from workbench import engine",
        "def f():\n    from . import typical",
        "import numpy",
    ):
        assert forbidden_imports(source), source
    assert forbidden_imports("from workbench import WorkbenchError, parts\nimport math, torch.nn") == []
    assert by_other_ways("import workbench\nworkbench.engine.load") == ["workbench.engine"]
    assert by_other_ways("__import__('workbench.engine')") == ["__import__"]
    found("zoo", tmp_path, "workbench/a.py", "class FancyIdea: ...\nx = fancy_ideas = no_fancy_idea_2")
    words = library_words({"fancy_idea", "other"}, tmp_path)
    assert words == [("workbench/a.py:1", "fancy_idea"), ("workbench/a.py:2", "fancy_idea")]


def test_a_bug_that_does_not_apply_is_found(tmp_path: Path) -> None:
    bug = BUGS[0]
    (tmp_path / bug.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.file, tmp_path / bug.file)
    planted = [(bug.old, bug.new), (bug.old, "("), ("no such text", "")]
    bugs = [PlantedBug(bug.breaks, bug.file, old, new, ("tests/gone.py",)) for old, new in planted]
    faults = [fault for fault in unplanted(tmp_path, bugs) if "there is no tests/gone.py" not in fault]
    assert len(faults) == 2 and "syntax" in faults[0] and "occurs 0 times" in faults[1]
    assert len(list(unplanted(tmp_path, bugs[:1]))) == 1


def test_what_a_function_or_a_record_does_not_say_is_found() -> None:
    def load(name, pages: int = 1) -> None:
        """Load it."""

    assert [fault.split(";")[1] for fault in undocumented("load", load)] == [" annotate it", " show a call"]
    record = json.loads((ROOT / "experiments" / "records" / f"{SHOWN}.json").read_text())
    assert list(unmeasured(record)) == []
    record["summary"]["decode_tokens_per_s"] += 1
    record["demo"]["printed"] += "/tmp/x"
    assert [fault.split(" ")[0] for fault in unmeasured(record)] == ["decode_tokens_per_s", "the"]
