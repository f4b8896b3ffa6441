"""The command line: what it prints where, and with which code it ends. Refusals are in test_cli_refusals.py."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

import workbench
import workbench.machine.doctor as doctor
import workbench.measure.generate as generation_module
from compiled_kernels import Backend
from compiled_kernels.level import Level
from compiled_kernels.result_cache import ResultCache, machine_key
from tests.helpers.command_line import Ran, answer, cli, refused
from workbench.cli import app
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.executors.autotune import AUTOTUNE_VERSION
from workbench.runs.condition import MANIFEST, MARKER, fingerprint
from workbench.runs.record import Record

ROOT = Path(__file__).resolve().parents[1]
PROCESS = [sys.executable, "-m", "workbench"]
MAIN: Any = typer.main.get_command(app)
COMMANDS = {name: [*getattr(command, "commands", ())] for name, command in MAIN.commands.items()}
GENERATE = "generate --set backend=eager --max-tokens 8"
EXPERIMENT = """
question: Does [bold] stay? [/]
backend: eager
sampling: {temperature: 0, max_tokens: 4, ignore_eos: true}
workload: {kind: prompts, prompts: ["def f(n):"]}
measure: {ceilings: false, warmup: 0}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    return tmp_path / "small.yaml"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("cli")
    (parent / "small.yaml").write_text(EXPERIMENT)
    answer("run", parent / "small.yaml", "--out", parent)
    (folder,) = parent.glob("small-*")
    return folder


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run_folder, tmp_path / "copy")


@pytest.mark.processes
@pytest.mark.smoke
def test_python_m_workbench_prints_one_object_and_nothing_else() -> None:
    command = [*PROCESS, *GENERATE.split(), "def fibonacci(n):", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result) >= {"text", "token_ids", "finish_reason", "usage", "metrics"}
    count = len(result["token_ids"])
    assert 1 <= count <= 8 and (result["finish_reason"] == "length") == (count == 8)
    usage = result["usage"]
    assert usage["completion_tokens"] == count and usage["prompt_tokens"] >= 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert result["metrics"]["ttft_s"] > 0 and result["metrics"]["backend"] == "eager"


@pytest.mark.processes
def test_the_installed_command_is_the_entry_point() -> None:
    (point,) = entry_points(group="console_scripts", name="workbench")
    assert point.value == "workbench.cli:entry"
    command = [sys.executable, "-c", f"from {point.module} import {point.attr}; {point.attr}()", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"workbench {workbench.__version__}\n", "")


@pytest.mark.processes
@pytest.mark.parametrize("end", ["interrupt", "closed pipe"])
def test_a_process_that_is_stopped_ends_without_a_traceback(end: str) -> None:
    """By Ctrl-C in the midst of a text: code 130. Its reader is gone: code 1."""
    command = [*PROCESS, "generate", "--set", "backend=eager", "--max-tokens", "900", "--temperature", "2", "def f("]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.read(1)  # the text has begun
    if end == "interrupt":
        run.send_signal(signal.SIGINT)
        run.stdout.read()
    run.stdout.close()
    said = run.stderr.read().decode()
    assert "Traceback" not in said and "Exception ignored" not in said
    assert run.wait() == (130 if end == "interrupt" else 1)


def test_generate_streams_prompt_and_text() -> None:
    text = answer(GENERATE, "def f(n):")["text"]
    ran = cli(GENERATE, "def f(n):")
    assert (ran.out, ran.err) == (f"def f(n):{text}\n", "")


def test_a_seed_decides_the_draws() -> None:
    def ids(options: str) -> list[int]:
        return answer(f"{GENERATE} 'x =' --set model.dtype=float32 --temperature 1.5 {options}")["token_ids"]

    assert ids("--set sampling.seed=1") == ids("--set sampling.seed=1")
    assert len({tuple(ids(f"--set sampling.seed={seed}")) for seed in range(3)}) > 1
    assert ids("--set sampling.top_k=1") == ids("--set sampling.top_k=1 --set sampling.seed=9")


def test_speculation_is_reported_and_changes_no_greedy_text() -> None:
    greedy = f"{GENERATE} 'def f(n):' --temperature 0"
    plain = answer(greedy)
    assert plain["metrics"]["speculation"] is None
    found = answer(greedy, "--set", "speculate={kind: draft, num_speculative_tokens: 2}")
    figures = found["metrics"]["speculation"]
    assert found["token_ids"] == plain["token_ids"]
    assert figures["verifications"] and len(figures["acceptance_by_position"]) == 2


def test_a_stop_string_ends_the_text_before_it() -> None:
    text = answer(GENERATE, "def f(n):")["text"]
    stop = text[3:5]
    result = answer(GENERATE, "def f(n):", "--set", f"sampling.stop={json.dumps(['never to be seen', stop])}")
    assert result["text"] == text[: text.index(stop)] and result["finish_reason"] == "stop"


def test_words_behind_two_dashes_are_a_prompt() -> None:
    assert cli(f"{GENERATE} -- --debug").out.startswith("--debug")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ZeroDivisionError("by zero"), 70, "error: ZeroDivisionError: by zero (--debug shows where)\n"),
        (WorkbenchError("first\n  second"), 2, "error: first second\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
    ],
)  # fmt: skip
def test_each_end_has_its_code(raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the workbench itself is distinguished; an error of several lines is reported in one."""

    def broken(*_: object) -> dict:
        raise raised

    monkeypatch.setattr(generation_module, "generate_text", broken)
    ran = cli(f"{GENERATE} x", code=code)
    assert (ran.out, ran.err) == ("", said)


def test_a_text_that_broke_midway_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"text": "", "finish_reason": "error", "error": "logits are NaN"}
    monkeypatch.setattr(generation_module, "generate_text", lambda *_: ended)
    ran = cli(f"{GENERATE} x --json", code=1)
    assert ran.json == ended and ran.err == "error: logits are NaN\n"


@pytest.mark.parametrize(
    "command", ["", *COMMANDS, *(f"{name} {each}" for name in COMMANDS for each in COMMANDS[name])]
)
def test_help_fits_a_screen_and_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is of 80 columns and 40 lines; the first one names every command and cuts no line."""
    monkeypatch.setenv("COLUMNS", "80")
    text = cli(f"{command} --help").out
    assert text.count("\n") <= 40 and max(map(len, text.splitlines())) <= 80
    assert COMMANDS.get(command) or f"Example: workbench {command}" in " ".join(text.split())
    assert command or all(f" {name} " in text for name in COMMANDS) and text.count("...") == 2


def test_no_words_at_all_show_the_help() -> None:
    assert cli("", code=2) == Ran(2, cli("--help").out.removesuffix("\n"), "")


def test_run_shows_a_report_and_leaves_a_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    ran = cli("run small.yaml --set sampling.max_tokens=3")
    (folder,) = file.parent.glob("runs/small-*")
    assert "Does [bold] stay? [/]" in ran.out and "TTFT" in ran.out and f"run folder  runs/{folder.name}\n" in ran.out
    assert "measured run" in ran.err and "measured run" not in ran.out
    assert Record.open(folder).summary["tokens"]["output"] == 3


@pytest.mark.usefixtures("file")
def test_run_as_json_prints_one_object() -> None:
    ran = cli("run small.yaml --out here --json")
    assert ran.err == "" and Path(ran.json["run"]).parent == Path("here")
    assert ran.json["requests"][0]["output_tokens"] == 4 == ran.json["summary"]["tokens"]["output"]


@pytest.mark.usefixtures("file")
def test_run_keeps_the_others_when_one_is_refused() -> None:
    texts = json.dumps(["def f(n):", "a + " * 2000, "", "\ud800"])
    result = answer("run small.yaml --set", f"workload.prompts={texts}", code=1)
    assert [row["finish_reason"] for row in result["requests"]] == ["length", "refused", "refused", "refused"]
    record = Record.open(result["run"])
    record.verify()
    assert record.requests.to_pylist()[0]["output_tokens"] == 4
    assert "leave no room in a context" in cli("inspect", result["run"]).text


def test_inspect(run_folder: Path) -> None:
    assert f"run folder  {run_folder}\n" in cli("inspect", run_folder).out
    result = answer("inspect", run_folder)
    assert result["environment"]["backend"]["name"] == "eager" and result["summary"]["tokens"]["output"] == 4


def test_an_incomplete_or_changed_folder_is_refused(copy: Path) -> None:
    content = bytearray((copy / "summary.json").read_bytes())
    content[20] ^= 1
    (copy / "summary.json").write_bytes(content)
    assert "summary.json is not what was written" in refused("inspect", copy)
    (copy / MARKER).write_text("")
    for command in ("inspect", "reproduce"):
        assert "unfinished (it was killed or is still running)" in refused(command, copy)


def test_reproduce_says_identical(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)
    ran = cli("reproduce .")
    (again,) = copy.parent.glob("reproduce-*")  # beside the old run, not in it
    assert ran.out.splitlines()[0] == "identical tokens in all requests (1)" and str(again) in ran.out
    assert "measured run" in ran.err and "measured run" not in ran.out


def test_reproduce_says_what_differs(copy: Path, tmp_path: Path) -> None:
    table = Record.open(copy).requests
    rows = table.to_pylist()
    true = rows[0]["token_ids"][2]
    rows[0]["token_ids"][2] = true + 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), copy / "requests.parquet")
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"]["requests.parquet"] = fingerprint(copy / "requests.parquet")
    (copy / MANIFEST).write_text(json.dumps(manifest))
    ran = cli("reproduce --json", copy, "--out", tmp_path / "again", code=1)
    assert ran.err == "" and not ran.json["identical"] and ran.json["requests"] == 1
    assert [each["text"] for each in ran.json["tokens"]] == [f"request-0: token 2 was {true + 1}, is {true}"]
    assert Record.open(ran.json["run"]).path.parent == tmp_path / "again"


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"triton": ("no_such_module", ""), "dev": ("pytest", "")})
    monkeypatch.setattr(doctor, "backend_problems", lambda: {"eager": None, "inductor": "no [C++] compiler"})
    ran = cli("doctor")
    assert ran.err == "" and "works" in ran.text and "no [C++] compiler" in ran.text and "[green]" not in ran.text
    assert "pip install 'inference-workbench[triton]'" in ran.text
    found = answer("doctor")
    assert set(found) == {"level", "backends", "capabilities", "auto_backend", "extras", "models", "environment"}
    assert set(found["auto_backend"]["tries"]) <= {str(backend) for backend in Backend}
    assert found["auto_backend"]["reason"] and found["extras"]["dev"] is None
    assert found["backends"] == {"eager": None, "inductor": "no [C++] compiler"}
    assert found["models"] == dict.fromkeys(BUNDLED_MODELS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kept results; tables are as wide as their lines."""
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "600")
    return tmp_path


def test_doctor_shows_what_auto_chose_and_why(cache: Path) -> None:
    assert answer("doctor")["auto_backend"]["trials"] == []
    entry = {
        "chosen": "mlir", "seconds": {"mlir": 0.0005, "eager": 0.004}, "refused": {}, "model": "demo", "threads": 2,
        "untried": {"inductor": "no need"}, "weights": "dense bfloat16", "cache": "int8 bfloat16", "unit": "block",
        "cpu": "X", "here": machine_key(), "rule": AUTOTUNE_VERSION, "date": "2026-11-22 12:00",
    }  # fmt: skip
    kept = ResultCache(cache / "decode_backends.json")
    slow = {"chosen": "inductor", "seconds": {"mlir": 0.009, "eager": 0.002, "inductor": 0.0015}, "untried": {}}
    other = {"here": {}, "refused": {"triton": "broke"}}
    for key, changes in (("a", {}), ("b", other), ("c", {"seconds": {}}), ("d", slow)):
        kept.add(key, {**entry, **changes})
    text = cli("doctor").text
    for words in (
        "mlir 500 µs, eager 4 ms", "inductor: no need", "triton: broke", "with other code", "int8",
        "mlir: clearly slower than eager; eager: not clearly quicker",
    ):  # fmt: skip
        assert words in text, words
    assert text.count("mlir 500 µs") == 2, "the damaged one is left out"


def test_doctor_shows_how_weights_were_laid_out_and_why(cache: Path) -> None:
    tried = {
        "model": "demo", "weights": "dense bfloat16", "cache": "int8 bfloat16", "threads": 2, "cpu": "X",
        "here": {}, "date": "2026-11-22 12:00", "panels": 0.002, "torch": 0.005, "problem": "",
    }  # fmt: skip
    kept = ResultCache(cache / "layouts.json")
    slower = {"torch": 0.001, "problem": "torch's is clearly quicker"}
    for key, changes in (("a", {}), ("b", slower), ("c", {"torch": 0})):
        kept.add(key, {**tried, **changes})
    kept.add("d", {"panels": 0.003, "torch": 0.005, "problem": ""})  # from before it said of what
    text = cli("doctor").text
    assert "panels a product of 512 tokens takes 2 ms from panels, 5 ms by torch 2026" in text
    assert "rows a product of 512 tokens takes 2 ms from panels, 1 ms by torch; torch's is clearly quicker" in text
    assert text.count("a product of 512 tokens") == 2 and "3 ms" not in text, "damaged ones are left out"
    assert [each["chosen"] for each in answer("doctor")["auto_backend"]["layouts"]] == ["panels", "rows"]


@pytest.mark.parametrize(
    ("here", "message"),
    [(None, "eager and inductor work here"), (Level.V3, "level v3 of the instruction set, lowered from v4+vnni by")],
)
def test_doctor_says_what_the_processor_carries_out(
    here: Level | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "current_level", lambda: here)
    monkeypatch.setattr(doctor, "machine_level", lambda: Level.V4_VNNI)
    assert message in cli("doctor").text
