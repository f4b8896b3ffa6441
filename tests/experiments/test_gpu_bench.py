"""The parts of `gpu_bench` that run without a GPU: its cases, torch's forms beside ours, a part's reported end."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

from compiled_kernels import Backend, cases
from compiled_kernels.backends import backend_problems
from compiled_kernels.capabilities import GAPS
from experiments import gpu_bench, gpu_kernels, gpu_models, gpu_timing
from tests.thorough import THOROUGH


def test_every_operator_of_the_backend_is_checked() -> None:
    without = {gap.operator for gap in GAPS if gap.backend is Backend.TRITON and gap.case == "*"}
    assert set(gpu_bench.CHECKED) == {suite.operator for suite in cases.suites()} - without - {"linear"}


@pytest.mark.parametrize("operator", ["rms_norm", "add_rms_norm", "linear_quantized", "top_logprobs"])
def test_torchs_forms_give_the_same(operator: str) -> None:
    suite = cases.suite_of(operator)
    exact = [case for case in suite.cases if case.arguments["dtype"] == torch.float32]
    inputs = suite.make_inputs(min(exact, key=lambda case: case.cost.bytes))
    form = gpu_kernels.torch_form(operator, inputs)
    assert form is not None
    found, expected = form(), suite.call(*inputs, backend=Backend.EAGER)
    if operator == "add_rms_norm":
        expected = expected[1]
    found, expected = (each if isinstance(each, tuple) else (each,) for each in (found, expected))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spans", [(1, 1), (9, 9)])
def test_attention_over_keys_in_order_gives_the_same(spans: tuple[int, int]) -> None:
    suite = cases.suite_of("paged_attention")
    shape = {"num_kv_heads": 2, "queries_per_kv": 2, "dim": 8, "size": 4, "dtype": torch.float32}
    inputs = suite.input_maker(torch.Generator().manual_seed(0), contexts=(9, 9), spans=spans, **shape)
    form = gpu_kernels.torch_form("paged_attention", inputs)
    assert form is not None
    found = form().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found, suite.call(*inputs, backend=Backend.EAGER), rtol=1e-5, atol=1e-5)


def test_attention_of_ragged_contexts_has_no_form_in_order() -> None:
    suite = cases.suite_of("paged_attention")
    inputs = suite.make_inputs(next(case for case in suite.cases if case.shape == "decode 3 ragged"))
    assert gpu_kernels.torch_form("paged_attention", inputs) is None


def test_what_is_measured_has_names_of_its_own() -> None:
    for quick in (True, False):
        names = [(suite.operator, case.name) for suite, case in gpu_kernels.llama_cases(quick)]
        assert len(set(names)) == len(names) > 10


def test_spread() -> None:
    found = gpu_timing.spread([float(number) for number in range(11)])
    assert (found["seconds"], found["p10"], found["p90"]) == (5, 1, 9)


@pytest.mark.skipif(backend_problems()[Backend.TRITON] is None, reason="a GPU is here")
def test_a_part_that_breaks_says_so_and_keeps_its_rows(tmp_path: Path) -> None:
    part = gpu_bench.BenchmarkPart("check rotary", False, tmp_path)
    (tmp_path / "check rotary.jsonl").write_text('{"status": "ok"}\n{"sta')
    found = part.finished(60)
    assert found["rows"] == [{"status": "ok"}] and "needs a CUDA device" in " ".join(found["error"].split())
    assert "1 rows, 0 of them failed" in gpu_bench.summarize_part(found) and "ended with" in gpu_bench.summarize_part(
        found
    )
    slow = gpu_bench.BenchmarkPart("check rotary", False, tmp_path)
    assert "not done after" in slow.finished(0)["error"]


@pytest.mark.interpreter
@pytest.mark.skipif(find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'")
@pytest.mark.parametrize(
    "part", ["check rotary", "kernels", "model int4", "ptx", *(["model dense", "model int8"] if THOROUGH else [])]
)
def test_a_rehearsal_without_a_gpu_plays_every_part(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    played = gpu_bench.BenchmarkPart(part, True, tmp_path).finished(1200)
    assert played["rows"] and not gpu_bench.failures(played)


def test_the_parts_fit_into_the_time_of_the_whole() -> None:
    assert gpu_bench.CHECK_SECONDS + sum(gpu_bench.PARTS.values()) <= gpu_bench.SECONDS


def test_engines_take_turns_and_their_medians_are_reported() -> None:
    order: list[tuple[str, int]] = []

    def engine(name: str, seconds: list[float], fails: bool = False):
        def turn(number: int) -> dict:
            order.append((name, number))
            if fails:
                raise RuntimeError("out of\n memory")
            return {"tokens": 8, "wall_seconds": seconds[number]}

        return lambda work, batch: turn

    engines = {
        "workbench": engine("workbench", [90, 1, 2, 4]), "transformers": engine("transformers", [90, 4, 8, 2]),
        "broken": engine("broken", [], fails=True),
    }  # fmt: skip
    rows = {row["engine"]: row for row in gpu_models._in_turn(engines, "decode", 1, "int8", {})}
    assert [name for name, _ in order] == ["workbench", "transformers", "broken", *["workbench", "transformers"] * 3]
    assert rows["workbench"]["tokens_per_s"] == 4 and rows["workbench"]["spread"] == [2, 8]
    assert rows["transformers"]["tokens_per_s"] == 2 and rows["transformers"]["weights"] == "dense"
    assert rows["workbench"]["weights"] == "int8" and rows["workbench"]["runs"] == 3
    assert rows["broken"]["error"] == "RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([{"part": "a", "rows": [{"status": "ok"}, {"status": "gap"}]}], 0),
        ([{"part": "a", "rows": [{"status": "ok"}]}, {"part": "b", "rows": [{"status": "failed"}]}], 1),
        ([{"part": "a", "rows": [{"error": "broke"}]}], 1),
        ([{"part": "a", "rows": [], "error": "not done after 9 s"}], 1),
    ],
)
def test_it_ends_with_1_where_anything_failed(
    parts: list, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_bench, "play", lambda quick: parts)
    monkeypatch.setattr("workbench.machine.environment.environment", lambda: {})
    with pytest.raises(typer.Exit) as ended:
        gpu_bench.main(tmp_path, False, None, None)
    assert ended.value.exit_code == code
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["parts"] == parts
