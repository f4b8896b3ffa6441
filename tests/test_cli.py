"""The command line: what it prints where, and with which code it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import workbench
import workbench.measure.run as generation_module
from compiled_kernels import Backend
from compiled_kernels.level import Level
from workbench.cli import main
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.runs.condition import MANIFEST, MARKER, fingerprint
from workbench.runs.record import Record

ROOT = Path(__file__).resolve().parents[1]
GENERATE = ["generate", "--backend", "eager", "--max-tokens", "8"]
COMMANDS = ["run", "generate", "reproduce", "inspect", "doctor"]
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
    assert main(["run", str(parent / "small.yaml"), "--out", str(parent), "--json"]) == 0
    (folder,) = parent.glob("small-*")
    return folder


def reported(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the reported error: one line on stderr, nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


def test_generate_as_a_process_prints_one_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "workbench", "generate", "def fibonacci(n):", "--max-tokens", "8", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--backend", "eager"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result) >= {"text", "token_ids", "finish_reason", "usage", "metrics"}
    count = len(result["token_ids"])
    assert 1 <= count <= 8 and (result["finish_reason"] == "length") == (count == 8)
    usage = result["usage"]
    assert usage["completion_tokens"] == count and usage["prompt_tokens"] >= 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert result["metrics"]["ttft_s"] > 0 and result["metrics"]["backend"] == "eager"


def test_generate_streams_prompt_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "def f(n):", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main([*GENERATE, "def f(n):"]) == 0
    assert capsys.readouterr() == (f"def f(n):{text}\n", "")


def test_a_seed_decides_the_draws(capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*options: str) -> list[int]:
        assert main([*GENERATE, "x =", "--json", "--dtype", "float32", "--temperature", "1.5", *options]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    assert ids("--seed", "1") == ids("--seed", "1")
    assert len({tuple(ids("--seed", str(seed))) for seed in range(3)}) > 1
    assert ids("--top-k", "1") == ids("--top-k", "1", "--seed", "9")


def test_speculation_is_reported_and_changes_no_greedy_text(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: str) -> dict:
        assert main([*GENERATE, "def f(n):", "--temperature", "0", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    plain = said()
    assert plain["metrics"]["speculation"] is None
    stops = "{kind: draft, confidence_threshold: 0.4}"
    for how in ("prompt_lookup", "draft", "{kind: draft, num_speculative_tokens: 2}", stops):
        found = said("--speculate", how)
        assert found["token_ids"] == plain["token_ids"]
        figures = found["metrics"]["speculation"]
        if how != "prompt_lookup":  # which may find nothing to propose
            most = len(figures["acceptance_by_position"])
            assert figures["verifications"] and (most <= 4 if how == stops else most == (2 if "2" in how else 4))


def test_a_stop_string_ends_the_text_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GENERATE, "def f(n):", "--json"])
    text = json.loads(capsys.readouterr().out)["text"]
    stop = text[3:5]
    assert main([*GENERATE, "def f(n):", "--json", "--stop", "never to be seen", "--stop", stop]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == text[: text.index(stop)] and result["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*GENERATE, ""], "the prompt is empty"),
        ([*GENERATE, "a + " * 2000], "leave no room in a context of 1024"),
        ([*GENERATE, "\udcff"], "the lone surrogate U+DCFF is no character"),
        ([*GENERATE, "x", "--model", "demmo"], "no model 'demmo'"),
        ([*GENERATE, "x", "--model", "shape:tiny"], "no tokenizer"),
        (
            [*GENERATE, "x", "--backend", "egaer"],
            "unknown backend 'egaer'; did you mean 'eager'?; known here: auto, eager",
        ),
        ([*GENERATE, "x", "--dtype", "int7"], "model.dtype: Input should be 'auto', 'float32'"),
        ([*GENERATE, "x", "--temperature", "nan"], "sampling: temperature: "),
        ([*GENERATE, "x", "--max-tokens", "-1"], "max_tokens: Input should be greater than or equal to 1"),
        ([*GENERATE, "x", "--top-p", "2"], "top_p: "),
        ([*GENERATE, "x", "--seed", "-1"], "seed: "),
        ([*GENERATE, "x", "--stop", ""], "a stop string must not be empty"),
        ([*GENERATE, "x", *["--stop", "x"] * 10_000], "at most 64 stop strings, 10000 were given"),
        ([*GENERATE, "x", "--tempreature", "1"], "No such option: --tempreature"),
        (["generate"], "Missing argument"),
        (["generate", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "x", "--speculate", "drafts"], "speculate.kind: 'drafts' is unknown; did you mean 'draft'?"),
        (["generate", "x", "--speculate", "{kind"], "--speculate {kind: not YAML"),
        (["genrate", "x"], "No such command 'genrate'"),
        (["run", "nowhere.yaml"], "nowhere.yaml: cannot read this experiment"),
        (["run", "small.yaml", "--set", "sampling"], "write it as path=value"),
        (["run", "small.yaml", "--set", "sampling.temprature=1"], "did you mean 'temperature'?"),
        (["run", "small.yaml", "--set", "backend=egaer"], "unknown backend"),
        (["run", "small.yaml", "--out", "small.yaml"], "output folder small.yaml: cannot be written"),
        (["inspect", "nowhere"], "run nowhere: no such folder"),
        (["inspect", "."], "this is no run folder"),
        (["reproduce", "nowhere"], "run nowhere: no such folder"),
    ],
    ids=lambda value: " ".join(value)[:60].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.usefixtures("file")
def test_a_mistake_is_one_line_and_code_2(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    assert main(words) == 2
    assert expected in reported(capsys)
    assert [path for path in Path().iterdir() if path not in before and path.name != "runs"] == []
    assert list(Path("runs").glob("*")) == []


@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_shows_where(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "nowhere"]
    assert main(["--debug", *words] if place == "first" else [*words, "--debug"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Traceback") and "run nowhere: no such folder" in err.splitlines()[-1]


def test_what_stands_behind_two_dashes_is_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--", "--debug"]) == 0
    assert capsys.readouterr().out.startswith("--debug")


def test_a_fault_of_our_own_is_distinguished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(generation_module, "generate_text", broken)
    assert main([*GENERATE, "x"]) == 70
    assert reported(capsys) == "error: ZeroDivisionError: division by zero (--debug shows where)\n"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, BrokenPipeError])
def test_an_interruption_is_no_error_of_ours(stop: type[BaseException], monkeypatch, capsys) -> None:
    def stopped(*_: object) -> dict:
        raise stop

    monkeypatch.setattr(generation_module, "generate_text", stopped)
    assert main([*GENERATE, "x"]) == (130 if stop is KeyboardInterrupt else 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_text_that_broke_midway_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {"text": "", "finish_reason": "error", "error": "logits are NaN"}
    monkeypatch.setattr(generation_module, "generate_text", lambda *_: ended)
    assert main([*GENERATE, "x", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == ended and err == "error: logits are NaN\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"Example: workbench {command}" in " ".join(out.split()) and err == ""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f" {command} " in out for command in COMMANDS) and "--debug" in out
    assert "Example: workbench run experiments/first_light.yaml" in out


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    words = "".join(capsys.readouterr())
    assert "Usage: workbench" in words and "error:" not in words


def test_run_shows_a_report_and_leaves_a_folder(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    assert main(["run", "small.yaml", "--set", "sampling.max_tokens=3"]) == 0
    out, err = capsys.readouterr()
    (folder,) = file.parent.glob("runs/small-*")
    assert "Does [bold] stay? [/]" in out and "TTFT" in out and f"run folder  runs/{folder.name}\n" in out
    assert "measured run" in err and "measured run" not in out
    assert Record.open(folder).summary["tokens"]["output"] == 3


def test_run_as_json_prints_one_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "small.yaml", "--out", "here", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == "" and Path(result["run"]).parent == Path("here")
    assert result["requests"][0]["output_tokens"] == 4 == result["summary"]["tokens"]["output"]


def test_run_keeps_the_others_when_one_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = json.dumps(["def f(n):", "a + " * 2000, "", "\ud800"])
    assert main(["run", "small.yaml", "--set", f"workload.prompts={texts}", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [row["finish_reason"] for row in result["requests"]] == ["length", "refused", "refused", "refused"]
    record = Record.open(result["run"])
    record.verify()
    assert record.requests.to_pylist()[0]["output_tokens"] == 4
    assert main(["inspect", result["run"]]) == 0
    assert "leave no room in a context" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_inspect(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run_folder)]) == 0
    assert f"run folder  {run_folder}\n" in capsys.readouterr().out
    assert main(["inspect", str(run_folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["environment"]["backend"]["name"] == "eager" and result["summary"]["tokens"]["output"] == 4


@pytest.mark.parametrize("command", ["inspect", "reproduce"])
def test_an_incomplete_folder_is_refused(command: str, run_folder: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run_folder, tmp_path / "copy")
    (tmp_path / "copy" / MARKER).write_text("")
    assert main([command, str(tmp_path / "copy")]) == 2
    assert "unfinished (it was killed or is still running)" in reported(capsys)


def test_a_file_changed_by_a_byte_is_named(run_folder: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run_folder, tmp_path / "copy")
    content = bytearray((tmp_path / "copy" / "summary.json").read_bytes())
    content[20] ^= 1
    (tmp_path / "copy" / "summary.json").write_bytes(content)
    assert main(["inspect", str(tmp_path / "copy")]) == 2
    assert "summary.json is not what was written" in reported(capsys)


def test_reproduce_says_identical(run_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(shutil.copytree(run_folder, tmp_path / "copy"))
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)
    assert main(["reproduce", "."]) == 0
    out, err = capsys.readouterr()
    (again,) = tmp_path.glob("reproduce-*")  # beside the old run, not in it
    assert out.splitlines()[0] == "identical tokens in all 1 requests" and str(again) in out
    assert "measured run" in err and "measured run" not in out


def test_reproduce_says_what_differs(run_folder: Path, tmp_path: Path, capsys) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    table = Record.open(copy).requests
    rows = table.to_pylist()
    true = rows[0]["token_ids"][2]
    rows[0]["token_ids"][2] = true + 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), copy / "requests.parquet")
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"]["requests.parquet"] = fingerprint(copy / "requests.parquet")
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert main(["reproduce", str(copy), "--out", str(tmp_path / "again"), "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == "" and not result["identical"] and result["requests"] == 1
    assert [each["text"] for each in result["tokens"]] == [f"request-0: token 2 was {true + 1}, is {true}"]
    assert Record.open(result["run"]).path.parent == tmp_path / "again"


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import workbench.machine.doctor as doctor

    monkeypatch.setattr(doctor, "EXTRAS", {"triton": ("no_such_module", ""), "dev": ("pytest", "")})
    monkeypatch.setattr(doctor, "backend_problems", lambda: {"eager": None, "inductor": "no [C++] compiler"})
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.replace("│", " ").split())
    assert err == "" and "works" in text and "no [C++] compiler" in text and "[green]" not in text
    assert "pip install 'inference-workbench[triton]'" in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"level", "backends", "capabilities", "auto_backend", "extras", "models", "environment"}
    assert (
        set(found["auto_backend"]["tries"]) <= {str(backend) for backend in Backend} and found["auto_backend"]["reason"]
    )
    assert found["backends"] == {"eager": None, "inductor": "no [C++] compiler"}
    assert found["models"] == dict.fromkeys(BUNDLED_MODELS) and found["extras"]["dev"] is None


def test_doctor_shows_what_auto_chose_and_why(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from compiled_kernels.result_cache import ResultCache, machine_key
    from workbench.executors.autotune import AUTOTUNE_VERSION

    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auto_backend"]["trials"] == []
    entry = {
        "chosen": "mlir", "seconds": {"mlir": 0.0005, "eager": 0.004}, "refused": {}, "model": "demo", "threads": 2,
        "untried": {"inductor": "no need"}, "weights": "dense bfloat16", "cache": "int8 bfloat16", "unit": "block",
        "cpu": "X", "here": machine_key(), "rule": AUTOTUNE_VERSION, "date": "2026-11-22 12:00",
    }  # fmt: skip
    kept = ResultCache(tmp_path / "decode_backends.json")
    slow = {"chosen": "inductor", "seconds": {"mlir": 0.009, "eager": 0.002, "inductor": 0.0015}, "untried": {}}
    other = {"here": {}, "refused": {"triton": "broke"}}
    for key, changes in (("a", {}), ("b", other), ("c", {"seconds": {}}), ("d", slow)):
        kept.add(key, {**entry, **changes})
    monkeypatch.setenv("COLUMNS", "600")
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    verdicts = "mlir: clearly slower than eager; eager: not clearly quicker"
    expected = (
        "mlir 0.50 ms, eager 4.00 ms",
        "inductor: no need",
        "triton: broke",
        "with other code",
        "int8",
        verdicts,
    )
    for words in expected:
        assert words in text, words
    assert text.count("mlir 0.50 ms") == 2, "the damaged one is left out"


def test_doctor_shows_how_weights_were_laid_out_and_why(capsys, monkeypatch, tmp_path: Path) -> None:
    from compiled_kernels.result_cache import ResultCache

    tried = {
        "model": "demo", "weights": "dense bfloat16", "cache": "int8 bfloat16", "threads": 2, "cpu": "X",
        "here": {}, "date": "2026-11-22 12:00", "panels": 0.002, "torch": 0.005, "problem": "",
    }  # fmt: skip
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "600")
    kept = ResultCache(tmp_path / "layouts.json")
    slower = {"torch": 0.001, "problem": "torch's is clearly quicker"}
    for key, changes in (("a", {}), ("b", slower), ("c", {"torch": 0})):
        kept.add(key, {**tried, **changes})
    kept.add("d", {"panels": 0.003, "torch": 0.005, "problem": ""})  # from before it said of what
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "panels a product of 512 tokens takes 2.00 ms from panels, 5.00 by torch 2026" in text
    assert "rows a product of 512 tokens takes 2.00 ms from panels, 1.00 by torch; torch's is clearly quicker" in text
    assert text.count("a product of 512 tokens") == 2 and "3.00 ms" not in text, "damaged ones are left out"
    assert main(["doctor", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["auto_backend"]["layouts"]
    assert [each["chosen"] for each in layouts] == ["panels", "rows"]


@pytest.mark.parametrize(
    ("here", "message"),
    [(None, "eager and inductor work here"), (Level.V3, "level v3 of the instruction set, held down from v4+vnni by")],
)
def test_doctor_says_what_the_processor_carries_out(here: Level | None, message: str, capsys, monkeypatch) -> None:
    import workbench.machine.doctor as doctor

    monkeypatch.setattr(doctor, "current_level", lambda: here)
    monkeypatch.setattr(doctor, "machine_level", lambda: Level.V4_VNNI)
    assert main(["doctor"]) == 0
    assert message in " ".join(capsys.readouterr().out.split())


def test_an_error_of_several_lines_is_reported_in_one(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*_: object) -> dict:
        raise WorkbenchError("first\n  second")

    monkeypatch.setattr(generation_module, "generate_text", broken)
    assert main([*GENERATE, "x"]) == 2
    assert reported(capsys) == "error: first second\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"workbench {workbench.__version__}\n"
