"""A run leaves a whole folder or one that says it is not; it can be read, shown and run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import workbench.experiment.build as runner_module
import workbench.measure.run as run_module
from compiled_kernels import Backend, backend_problems
from tests.helpers.processes import DEVNULL, start_python
from tests.measure.runs import vouched
from tests.measure.small import RUN, shown
from tests.patience import until
from workbench.bench.kernels import decode_step_stages
from workbench.engine.config import ModelConfig
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.executors.select import Backends
from workbench.experiment.experiment import Experiment
from workbench.files import read_yaml
from workbench.machine.ceilings import Ceiling, MachineCeilings
from workbench.measure.run import run
from workbench.reports.reproduce import reproduce
from workbench.runs.condition import MANIFEST
from workbench.runs.record import Record
from workbench.units import format_percent

NAMED = {
    "experiment.yaml", "environment.json", "requests.parquet", "steps.parquet", "tokens.parquet", "summary.json",
    "trace.json",
}  # fmt: skip
MARKUP = "x = '[bold]' [/] [red]#[/red]"


def experiment(**changes: Any) -> Experiment:
    return Experiment.from_values(read_yaml(RUN) | changes)


def prompts(*texts: str, copies: int = 1) -> dict:
    return {"kind": "prompts", "prompts": list(texts), "copies": copies}


@pytest.fixture(scope="module")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Three requests of 40 + 20 random tokens: 59 are cached, in 8 pages of 8."""
    workload = {"kind": "random", "requests": 3, "prompt_tokens": 40, "output_tokens": 20}
    asked = experiment(
        model={"name": "shape:tiny", "dtype": "float32"}, workload=workload, cache={"page_size": 8},
        schedule={"max_num_seqs": 2, "max_num_batched_tokens": 32},
    )  # fmt: skip
    return run(asked, tmp_path_factory.mktemp("runs"), "random", progress=False)


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Prompts of which some cannot run: too long, empty, and no text at all."""
    texts = ("def f(n):", "a + " * 2000, "", "\ud800", MARKUP)
    asked = experiment(workload=prompts(*texts), question=MARKUP, model={"dtype": "float32"})
    return run(asked, tmp_path_factory.mktemp("runs") / f"{'long ' * 20}[bold] [/]", "mixed", progress=False)


def test_the_folder_holds_every_file_and_is_whole(random_run: Record) -> None:
    names = {path.name for path in random_run.path.iterdir()}
    assert names >= NAMED and names == {*random_run.manifest, MANIFEST}
    random_run.verify()
    trace = json.loads((random_run.path / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}


def test_every_token_of_every_request_is_there(random_run: Record) -> None:
    assert [len(row["token_ids"]) for row in random_run.requests.to_pylist()] == [20, 20, 20]
    assert random_run.tokens.num_rows == 60
    steps = random_run.steps.to_pylist()
    assert sum(step["prefill_tokens"] for step in steps) == 3 * 40
    assert sum(step["decode_tokens"] for step in steps) == 3 * 19, "the first token comes out of the prefill"
    assert {row["action"] for row in random_run.decisions.to_pylist()} >= {"admitted", "cut", "waiting"}


def test_the_bytes_of_the_cache_are_those_of_the_formula(random_run: Record) -> None:
    kv = random_run.summary["kv"]
    layers, groups, dim, value_bytes = 2, 2, 16, 4
    assert kv["bytes_per_token_formula"] == 2 * layers * groups * dim * value_bytes
    assert kv["pages_used_peak"] == 2 * 8, "two sequences at once, each of 59 cached tokens in pages of 8"
    assert kv["bytes_used_peak"] == kv["pages_used_peak"] * 8 * kv["bytes_per_token_formula"]
    assert kv["bytes_allocated"] == kv["bytes_allocated_formula"] >= kv["bytes_used_peak"]


def test_the_environment_names_the_backend_and_why(random_run: Record) -> None:
    around, summary = random_run.environment, random_run.summary
    assert around["backend"] == {"name": "eager", "reason": "asked for"} == summary["backend"]
    assert around["packages"]["torch"] and around["threads"]["torch"] and summary["telemetry_share_of_decode"] > 0


@pytest.mark.skipif(
    backend_problems()[Backend.MLIR] is not None, reason=f"backend mlir: {backend_problems()[Backend.MLIR]}"
)
def test_a_model_is_identified_by_its_content(tmp_path: Path) -> None:
    """The same hashes in the summary and in the trace; `kernels show decode_step` shows what they name."""
    record = run(experiment(backend="mlir", model={"name": "demo-draft"}), tmp_path, progress=False)
    trace = json.loads((record.path / "trace.json").read_text())
    found = trace["otherData"]["artifacts"]
    assert found == record.summary["artifacts"]
    assert list(found) == ["blocks 8", "head 8", "decode 1"], "so short a prompt goes as rows"
    model = ModelConfig(name="demo-draft")
    shown = decode_step_stages(model)
    assert shown.artifact == found["decode 1"] and "llvm.func @decode_step" in shown.stages["llvm"].text
    assert decode_step_stages(model, rows=3).artifact == decode_step_stages(model, rows=4).artifact


def test_the_resolved_experiment_is_the_one_that_ran(random_run: Record) -> None:
    kept = Experiment.from_yaml(random_run.experiment_text)
    assert kept.cache.page_size == 8 and kept.model.name == "shape:tiny" and kept.sampling.top_p == 1.0


def test_requests_that_cannot_run_harm_no_other(mixed_run: Record) -> None:
    rows = mixed_run.requests.to_pylist()
    assert [row["finish_reason"] for row in rows] == ["length", "refused", "refused", "refused", "length"]
    assert [row["output_tokens"] for row in rows] == [5, 0, 0, 0, 5]
    for row, message in zip(rows[1:4], ("leave no room in a context of", "is empty", "lone surrogate"), strict=True):
        assert message in row["error"]
    alone = run(experiment(model={"dtype": "float32"}), mixed_run.path.parent, "alone", progress=False)
    assert alone.requests.to_pylist()[0]["token_ids"] == rows[0]["token_ids"]


def test_an_overlong_prompt_is_cut_where_that_was_asked(tmp_path: Path) -> None:
    asked = experiment(workload=prompts("a + " * 2000), schedule={"overflow": "cut_oldest"})
    record = run(asked, tmp_path, progress=False)
    row = record.requests.to_pylist()[0]
    assert row["finish_reason"] == "length" and row["cut_tokens"] > 0
    assert row["prompt_tokens"] + asked.sampling.max_tokens == 1024
    assert f"{row['cut_tokens']} of the oldest prompt tokens were cut" in shown(record)


def test_a_run_where_nothing_runs_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "ceilings_for", fake_ceilings)
    record = run(experiment(workload=prompts(""), measure={"warmup": 0}), tmp_path, progress=False)
    text = shown(record)
    assert "the prompt is empty" in text and "TTFT" in text


def test_an_unwritable_folder_is_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("in the way")
    monkeypatch.setattr(runner_module, "Runner", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(WorkbenchError, match="output folder .*runs: cannot be written .*--out"):
        run(experiment(), tmp_path / "runs", progress=False)


def test_progress_is_no_part_of_the_output(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.progress.LINE_INTERVAL_SECONDS", 0.0)  # short work leaves no line otherwise
    monkeypatch.setattr(run_module, "ceilings_for", fake_ceilings)
    asked = experiment(model={"name": "shape:tiny"}, workload={"kind": "random", "output_tokens": 2}, measure={})
    run(asked, tmp_path, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "warm-up" in err and "measured run" in err and "ceilings" in err
    run(asked, tmp_path, progress=False)
    assert capsys.readouterr() == ("", "")


def test_threads_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(WorkbenchError):
        run(experiment(model={"name": "demmo"}, measure={"threads": 3}), tmp_path, progress=False)
    assert seen == [3, 7]


def fake_ceilings(*working_sets: int, dtypes: tuple[str, ...] = (), compiled: bool = False) -> MachineCeilings:
    def ceiling(kind: str, value: float, dtype: str = "") -> Ceiling:
        return Ceiling(kind, value, "", "planted", 1, 1, 1.0, working_sets[0], level="DRAM", dtype=dtype)

    return MachineCeilings((ceiling("read", 2e10),), tuple(ceiling("gemm", 1e12, dtype) for dtype in dtypes))


def test_the_report_of_a_run(random_run: Record) -> None:
    text, kv = shown(random_run), random_run.summary["kv"]
    for words in ("What now?", "TTFT", "TPOT", "ITL", "p99", "tokens/s", "backend eager (asked for)", "(equal)",
                  f"16 pages x 8 tokens x 512 = {kv['bytes_used_peak']:,}", str(random_run.path)):  # fmt: skip
        assert words in text
    assert "roofline" not in text


def test_what_to_try_next_is_about_the_experiment_that_was_run(random_run: Record, mixed_run: Record) -> None:
    text = shown(mixed_run, Path("mine.yaml"))
    assert "run mine.yaml --set workload.copies=8" in text and "generate" in text
    assert f"run {mixed_run.path / 'experiment.yaml'} --set workload.copies=8" in shown(mixed_run)
    text = shown(random_run)  # in backend eager already, nothing in it is copied, and it is not about the demo model
    assert "try next" in text and not any(words in text for words in ("first_light", "--set", "generate"))


def test_the_report_puts_the_roofline_beside_the_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "ceilings_for", fake_ceilings)
    record = run(experiment(measure={"warmup": 0}), tmp_path, progress=False)
    decode = record.summary["roofline"]["decode"]
    phase = record.summary["phases"]["decode"]
    assert decode["share_of_read_ceiling"] == pytest.approx(phase["predicted_bytes"] / phase["forward_s"] / 2e10)
    assert decode["predicted_s"] == pytest.approx(max(phase["predicted_bytes"] / 2e10, phase["predicted_flops"] / 1e12))
    text = shown(record)
    assert "of read ceiling" in text and format_percent(decode["share_of_read_ceiling"]) in text
    assert "it is read from DRAM at up to 18.6 GiB/s" in text.replace("\n", " ")


def test_nothing_a_user_wrote_is_read_as_markup(mixed_run: Record) -> None:
    text = shown(mixed_run)
    assert text.splitlines()[0] == MARKUP
    assert sum(MARKUP in line for line in text.splitlines()) == 1, "the fifth prompt is behind `and 2 more`"
    assert f"run folder  {mixed_run.path}\n" in text, "a path stays on its line, brackets and all"
    assert "and 2 more requests" in text and "not every request ran" in text


def test_prompts_outputs_and_errors_are_shown_as_they_are(mixed_run: Record, tmp_path: Path) -> None:
    rows = mixed_run.requests.to_pylist()[:3]
    rows[0]["output_text"], rows[1]["error"] = MARKUP, MARKUP
    rows[2].update(error=None, output_text="", token_ids=[])
    copy = shutil.copytree(mixed_run.path, tmp_path / "copy")
    pq.write_table(pa.Table.from_pylist(rows, schema=mixed_run.requests.schema), copy / "requests.parquet")
    asked = experiment(workload=prompts("[bold]one[/bold] ", "two", "[/] three"))
    (copy / "experiment.yaml").write_text(asked.to_yaml())
    lines = shown(vouched(copy)).splitlines()
    assert any(f"[bold]one[/bold] {MARKUP}" in line for line in lines)
    assert sum(MARKUP in line for line in lines) == 2
    assert any("[/] three" in line for line in lines), "an output without text still shows its prompt"


def test_sampled_tokens_are_reproduced_too(tmp_path: Path) -> None:
    asked = experiment(sampling={"temperature": 1.0, "max_tokens": 8, "seed": 5}, workload=prompts("x =", copies=2))
    record = run(asked, tmp_path, progress=False)
    first, second = record.requests.to_pylist()
    assert first["token_ids"] != second["token_ids"], "copies draw with seeds of their own"
    assert reproduce(record, tmp_path / "again", progress=False).identical


def test_a_record_changed_after_the_fact_is_not_reproduced(random_run: Record, tmp_path: Path) -> None:
    copy = shutil.copytree(random_run.path, tmp_path / "copy")
    content = bytearray((copy / "steps.parquet").read_bytes())
    content[100] ^= 1
    (copy / "steps.parquet").write_bytes(content)
    with pytest.raises(WorkbenchError, match="steps.parquet is not what was written"):
        reproduce(Record.open(copy), tmp_path / "again", progress=False)
    assert not (tmp_path / "again").exists()


def test_a_killed_run_says_that_it_is_unfinished(tmp_path: Path) -> None:
    file, out = tmp_path / "long.yaml", tmp_path / "runs"
    asked = experiment(sampling={"max_tokens": 1000, "ignore_eos": True}, workload=prompts("x =", copies=16))
    file.write_text(asked.to_yaml())
    process = start_python(
        "-m", "workbench", "run", str(file), "--out", str(out), "--json", stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        # The model is loaded: the requests come next, and there are too many for them to be done by now.
        until(lambda: list(out.glob("long-*/environment.json")), lambda: process.poll() is None)
    finally:
        process.kill()
        process.wait()
    (folder,) = out.iterdir()
    assert not (folder / "summary.json").exists()
    with pytest.raises(WorkbenchError, match="unfinished .*holds environment.json, experiment.yaml; run it again"):
        Record.open(folder)
    assert not Record.open(folder, incomplete_ok=True).complete


def test_a_record_names_the_backend_that_ran_where_blocks_turned_out_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_module.runner_for

    def runner_for(*arguments: Any, **named: Any) -> Runner:
        runner = made(*arguments, **named)
        runner.core.backends = Backends(Backend.MLIR, Backend.INDUCTOR, Backend.INDUCTOR, "auto", checked=False)
        forward = runner.core.executor.forward

        def first(plan: Any) -> Any:
            runner.core.executor.forward = forward  # type: ignore[method-assign]
            runner.core.fall_back("inductor does not compile here")
            return forward(plan)

        runner.core.executor.forward = first  # type: ignore[method-assign]
        return runner

    monkeypatch.setattr(run_module, "runner_for", runner_for)
    workload = {"kind": "random", "requests": 1, "prompt_tokens": 4, "output_tokens": 2}
    asked = experiment(model={"name": "shape:tiny", "dtype": "float32"}, workload=workload, backend="eager")
    record = run(asked, tmp_path, "random", progress=False)
    expected = {"name": "mlir (prefill: eager)", "reason": "auto; inductor does not compile here"}
    assert record.summary["backend"] == expected
    assert json.loads((record.path / "environment.json").read_text())["backend"] == expected
    assert json.loads((record.path / "trace.json").read_text())["otherData"]["backend"] == expected["name"]
