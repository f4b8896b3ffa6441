"""The examples on a pretrained model: claims are held to what comes out, and a wrong one is shown as wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import real_examples
from experiments.real_examples import EXAMPLES, SETTINGS, TIRED, Examples, Finding, claims_table, strongest
from tests.helpers.refusals import refuses
from workbench import load
from workbench.engine.runner import Runner
from workbench.files import OWN_EXPERIMENTS
from workbench.models.known import KNOWN
from workbench.models.store import is_at_hand

KNOWN_MODEL = KNOWN[real_examples.MODEL]
at_hand = pytest.mark.skipif(
    not is_at_hand(KNOWN_MODEL.name), reason=f"{KNOWN_MODEL.name} is not at hand: `{KNOWN_MODEL.command}`"
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load(KNOWN_MODEL.name, **SETTINGS)


def held(finding: Finding) -> list[bool]:
    return [holds for _, holds, _ in finding.claims]


@at_hand
def test_filters_remove_what_is_claimed(runner: Runner) -> None:
    finding = EXAMPLES["next token"](runner)
    assert held(finding)[:5] == [True] * 5
    assert held(finding)[5] == (finding.rows[0][0] == "' it'")


@at_hand
def test_the_head_that_is_found_is_the_one_that_the_cache_shows(runner: Runner) -> None:
    finding = EXAMPLES["pronoun"](runner)
    assert runner.tokenizer is not None
    names = [runner.tokenizer.decode([each]) for each in runner.tokenizer.encode(TIRED)]
    cat, it = names.index(" cat"), names.index(" it")
    events = runner.stream(TIRED, max_tokens=2_000, ignore_eos=True)
    request = next(event.request_id for event in events if event.kind == "decoded")
    shown = runner.inspect(request, [it]).weights
    layer, head, weight, _ = finding.rows[0]
    assert weight == pytest.approx(float(shown[layer][head, 0, cat]), abs=0.02)
    assert weight == pytest.approx(max(float(each[:, 0, cat].max()) for each in shown.values()), abs=0.02)
    assert held(finding)[0] and not held(finding)[-1]  # causal: a later word moves nothing


@at_hand
def test_words_do_not_see_what_comes_after_them(runner: Runner) -> None:
    sees, *_, earlier, last, _ = held(EXAMPLES["bank"](runner))
    assert (sees, earlier, last) == (False, False, True)


@at_hand
def test_stops_repetition_and_form_are_kept_whatever_the_model_says(runner: Runner) -> None:
    finding = EXAMPLES["extraction"](runner)
    stopped, left_out, oslo, _, again, valid, true, _ = held(finding)
    assert stopped and left_out and again and valid
    assert oslo == (finding.rows[0][1] == "Oslo")
    assert true == (json.loads(finding.claims[6][2]) == real_examples.TRUTH)


def test_a_wrong_claim_is_shown_as_wrong() -> None:
    finding = Finding("a title", ("a", "b"), [("x", 1)], [("2 + 2 is 4", True, "4"), ("it says 5", False, "'4'")])
    assert "✓ right  2 + 2 is 4" in str(finding) and "✗ wrong  it says 5" in str(finding)
    assert [row[:2] for row in claims_table({"sums": finding}).rows] == [("sums", "✓ right"), ("sums", "✗ wrong")]


@given(st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 3))
def test_the_strongest_head_is_found_wherever_it_is(weights: list[list[float]], count: int) -> None:
    found = strongest(torch.tensor(weights), count)
    assert [value for *_, value in found] == sorted((each for row in weights for each in row), reverse=True)[:count]
    assert all(weights[layer][head] == value for layer, head, value in found)


def test_without_the_model_the_last_record_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_DATA_DIR", str(tmp_path))
    examples = Examples()
    record = json.loads(sorted((OWN_EXPERIMENTS / "records").glob("real_examples-*.json"))[-1].read_text())
    assert examples.runner is None and set(record["findings"]) == set(EXAMPLES)
    assert KNOWN_MODEL.command in str(examples) and record["date"][:10] in str(examples)
    for name, values in record["findings"].items():
        assert examples.find(name).claims == values["claims"] and str(examples.find(name))
    assert len(examples.claims().rows) == sum(len(each["claims"]) for each in record["findings"].values())
    refuses(f"is not at hand, and .* has no record: `{KNOWN_MODEL.command}`", Examples, tmp_path)
