"""The examples on a pretrained model: claims are held to what comes out, and a wrong one is shown as wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import real_examples
from experiments.real_examples import EXAMPLES, SETTINGS, TIRED, Examples, Finding, strongest
from tests.helpers.refusals import refuses
from workbench import load
from workbench.engine.runner import Runner
from workbench.models.store import is_at_hand
from workbench.own_folder import OWN_EXPERIMENTS

COMMAND = "workbench model get smollm2"
at_hand = pytest.mark.skipif(not is_at_hand("smollm2"), reason=f"smollm2 is not at hand: `{COMMAND}`")


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load("smollm2", **SETTINGS)


def held(finding: Finding) -> list[bool]:
    return [holds for _, holds, _ in finding.claims]


@at_hand
def test_filters_remove_what_is_claimed_and_no_word_sees_a_later_one(runner: Runner) -> None:
    finding = EXAMPLES["next token"](runner)
    assert held(finding) == [True] * 5 + [finding.rows[0][0] == "' it'"]
    sees, *_, earlier, last, _ = held(EXAMPLES["bank"](runner))
    assert (sees, earlier, last) == (False, False, True)


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
def test_stops_repetition_and_form_are_kept_whatever_the_model_says(runner: Runner) -> None:
    finding = EXAMPLES["extraction"](runner)
    stopped, oslo, _, again, valid, true, _ = held(finding)
    assert stopped and "<" not in finding.rows[0][1] and again and valid
    assert oslo == (finding.rows[0][1] == "Oslo")
    assert true == (json.loads(finding.claims[5][2]) == real_examples.TRUTH)


@at_hand
def test_a_prefix_is_written_once_and_a_call_of_numbers_gives_the_product(runner: Runner) -> None:
    written, read, *_ = held(EXAMPLES["system prompt"](runner))
    _, may, must, right, _ = held(EXAMPLES["tool"](runner))
    assert written and read and (may, must, right) == (False, True, True)


def test_a_wrong_claim_is_shown_as_wrong() -> None:
    finding = Finding("a title", ("a", "b"), [("x", 1)], [("2 + 2 is 4", True, "4"), ("it says 5", False, "'4'")])
    assert "✓ right  2 + 2 is 4" in str(finding) and "✗ wrong  it says 5" in str(finding)


def test_the_strongest_head_is_found_wherever_it_is() -> None:
    weights = torch.tensor([[0.25, 0.5, 0.0], [0.0, 0.125, 0.75]])
    assert strongest(weights, 3) == [(1, 2, 0.75), (0, 1, 0.5), (0, 0, 0.25)]


def test_an_example_is_computed_once_and_anew_for_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(runner: object, words: int = 2) -> Finding:
        return Finding(f"{words} words", (), (), ())

    monkeypatch.setattr(real_examples, "is_at_hand", lambda name: True)
    monkeypatch.setattr(real_examples, "load", lambda *_, **__: object())
    monkeypatch.setattr(real_examples, "EXAMPLES", {"words": words})
    examples = Examples()
    assert examples.find("words") is examples.find("words")
    longer = examples.find("words", words=5)
    assert longer.title == "5 words" and longer is examples.find("words") is examples.find("words", words=5)


def test_without_the_model_the_last_record_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_DATA_DIR", str(tmp_path))
    examples = Examples()
    record = json.loads(max((OWN_EXPERIMENTS / "records").glob("real_examples-*.json")).read_text())
    assert examples.runner is None and COMMAND in str(examples) and record["date"][:10] in str(examples)
    for name in EXAMPLES:
        assert examples.find(name).claims == record["findings"][name]["claims"]
        assert examples.find(name).title in str(examples.find(name))
    refuses(f"is not fetched, or incomplete: `{COMMAND}` fetches it", Examples, tmp_path)
