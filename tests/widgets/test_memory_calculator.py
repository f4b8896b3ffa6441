"""The memory calculator says what `workbench model memory` says, to scale, and holds it against a loaded model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.events import of
from tests.helpers.published_configs import DEEPSEEK_V3
from tests.helpers.widgets import controls, marks
from tests.thorough import tries
from workbench.engine.load import load
from workbench.kv_cache.format import FORMATS
from workbench.memory.measured import compare_memory, runner_bytes_by_table, step_bytes
from workbench.memory.report import cache_terms, estimate_memory, read_spec_and_remarks, report_for
from workbench.model.memory import longest_context
from workbench.model.shapes import named_shape
from workbench.trace.events import Stepped, StepPlanned
from workbench.widgets import MemoryCalculator

NAMES = st.sampled_from(["demo", "shape:tiny", "shape:llama-3.1-8b"])
SETTINGS = st.fixed_dictionaries({
    "context": st.integers(1, 300_000), "batch": st.integers(1, 300), "dtype": st.sampled_from(["bfloat16", "float32"]),
    "weights": st.sampled_from(["dense", "int8", "int4"]), "cache": st.sampled_from(FORMATS),
    "step_tokens": st.integers(1, 2048), "page_size": st.sampled_from([1, 16, 64]),
})  # fmt: skip
WINDOWS = st.sampled_from([(), ("attention.sliding_window=96", "attention.num_sink_tokens=4")])


@pytest.fixture(scope="module")
def calculator() -> MemoryCalculator:
    return MemoryCalculator()


@settings(max_examples=tries(25))
@given(NAMES, SETTINGS, st.sampled_from(["h100", "h200", "24GiB"]))
def test_it_says_what_the_command_says(
    calculator: MemoryCalculator, name: str, chosen: dict[str, Any], memory: str
) -> None:
    for trait, value in ({"model": name, "memory": memory} | chosen).items():
        setattr(calculator, trait, value)
    size = {"h100": "80GB", "h200": "141GB"}.get(memory, memory)
    found, picture = calculator.found, calculator.picture()
    assert found == report_for(name, memory=size, **chosen)
    parts = ("weight_bytes", "cache_bytes", "activation_bytes", "total_bytes")
    assert all(f"{found[part]:,}" in picture for part in parts)


@settings(max_examples=tries(60))
@given(NAMES, SETTINGS, WINDOWS)
def test_the_formula_is_the_cache(name: str, chosen: dict[str, Any], changes: tuple[str, ...]) -> None:
    spec = read_spec_and_remarks(name)[0]
    counted = estimate_memory(spec, changes=changes, **chosen)
    found = cache_terms(counted)
    assert -1e-6 < counted.memory.sequence_bytes - sum(term.bytes for term in found) < 1
    for term in found:
        product = 1.0
        for number in re.findall(r"(?:^|× )([\d,.]+)", str(term)):
            product *= float(number.replace(",", ""))
        assert product == pytest.approx(term.bytes, rel=1e-9)


@settings(max_examples=tries(60))
@given(NAMES, SETTINGS, WINDOWS, st.integers(10**6, 10**12), st.floats(0, 1))
def test_the_longest_context_fits_and_one_token_more_does_not(
    name: str, chosen: dict[str, Any], changes: tuple[str, ...], room: int, share: float
) -> None:
    spec = read_spec_and_remarks(name)[0]
    counted = estimate_memory(spec, changes=changes, **chosen)
    longest = longest_context(counted.memory, counted.tables, room, chosen["page_size"])

    def total(context: int) -> int:
        asked: dict[str, Any] = chosen | {"context": context}
        return estimate_memory(spec, changes=changes, **asked).memory.total_bytes

    if longest is None:
        assert changes and total(round(2**40 * share) + 1) <= room
    else:
        assert longest == 0 or (total(longest) <= room and total(round((longest - 1) * share) + 1) <= room)
        steady = chosen["cache"] == "dense" and (not changes or chosen["page_size"] == 1)
        assert not steady or total(longest + 1) > room


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("weights", ["dense", "int4"])
def test_a_loaded_model_takes_what_was_predicted(cache: str, weights: str) -> None:
    runner = load("demo", backend="eager", cache=cache, weights=weights, pages=40, listener=(events := []).append)
    view = MemoryCalculator(runner=runner)
    assert (view.cache, view.weights, view.context) == (cache, weights, 1024)
    rows, report = compare_memory(runner), report_for("demo", cache=cache, weights=weights)
    assert rows[0].predicted == report["weight_bytes"] and rows[2].measured == report["cache_bytes_per_token"]
    tables = estimate_memory(runner.model.spec, cache=cache).tables
    pages = sum(41 * 64 * part.bytes_per_token for part in tables)  # 40, and the null page
    assert rows[1].predicted == rows[1].measured == pages
    assert rows[0].measured - rows[0].predicted == sum(buffer.nbytes for buffer in runner.model.buffers())
    assert all(f"{row.measured:,.10g}" in view.picture() for row in rows)
    list(runner.stream("def f(x):" * 30, max_tokens=4))
    view.throttle.flush()
    assert f"{view._last['stepped'].kv_bytes:,}</td>" in view.shown.content  # type: ignore
    view.close()
    formed, stepped = of(StepPlanned, events), of(Stepped, events)
    for before, after in zip(formed, stepped, strict=True):
        spans = [(span.start, span.tokens) for span in before.spans]
        assert step_bytes(runner_bytes_by_table(runner), spans, 64) == after.kv_bytes


def test_an_absent_model_is_reported_and_nothing_is_lost() -> None:
    view = MemoryCalculator("shape:tiny")
    before = view.found
    view.model = "no-<b>such"
    assert "no-&lt;b&gt;such" in view.picture() and 'role="alert"' in view.picture() and view.found == before
    view.model = "demo"
    assert not view.error and "alert" not in view.picture() and view.found["model"] == "target"
    view.memory = "80 cows"
    assert "such as 80GB" in view.picture()


def test_latent_attention_has_a_formula_and_no_packed_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    view = MemoryCalculator(tmp_path, context=1000)
    assert "61 layers × 576 dim (512 latent + 64 rotary) × 2 bytes × 1,000 tokens" in view.picture()
    view.cache = "int8"
    assert "not possible: cache: layer 0 keeps latent rows" in view.picture() and 'role="alert"' in view.picture()


def test_controls_and_bars_set_the_state() -> None:
    view = MemoryCalculator(named_shape("llama-3.1-8b"), batch=3)
    labels = controls(view)
    labels["context"].value = 4096
    labels["cache"].value = FORMATS.index("int4")
    assert (view.context, view.cache, view.batch) == (4096, "int4", 3)
    view.batch = 7
    assert labels["batch"].value == 7
    view.shown.picked = "fp8"
    assert view.cache == FORMATS[labels["cache"].value] == "fp8"
    kinds = dict(labels["model"].options)
    labels["model"].value = kinds["shape:tiny"]
    assert view.found["model"] == "tiny"
    labels["model"].value = kinds["a text"]
    assert view.found["model"] == "tiny" and not view.error, "nothing is written there yet"
    assert [mark["data-key"] for mark in marks(view.picture())] == [*FORMATS]
