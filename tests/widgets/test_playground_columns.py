"""Two columns of a Playground: where two texts part, what a play keeps, what presets set, and that an experiment's
verdict follows its rule."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.widgets import CommandInProcess, words
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.widgets import Playground
from workbench.widgets.command_process import CommandProcess
from workbench.widgets.playground.data import Generation
from workbench.widgets.playground.difference import first_difference
from workbench.widgets.playground.experiment_panel import draw_run
from workbench.widgets.playground.history import MAX_ENTRIES, PlayHistory, setting_changes
from workbench.widgets.playground.pair_experiment import (
    ExperimentRun,
    PairQuestion,
    experiment_text,
    pair_experiment,
    write_experiment,
)
from workbench.widgets.playground.presets import ENGINE_PRESETS, PairPreset, zoo_presets
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.playground.settings import initial_experiment
from workbench.widgets.playground.view import NO_PRESET

PROMPT = "def f(x):\n"
SHORT = {"sampling": {"max_tokens": 6}}
IDS = st.lists(st.integers(0, 2), max_size=6)


def naive_difference(left: list[Any], right: list[Any], ended: tuple[bool, bool]) -> int | None:
    """Scan position by position; a text that ended by itself has an end there, any other is unknown from there on."""
    for n in range(max(len(left), len(right)) + 1):
        here = [side[n] if n < len(side) else "end" if ends else None
                for side, ends in zip((left, right), ended, strict=True)]  # fmt: skip
        if None in here or here == ["end", "end"]:
            return None
        if here[0] != here[1]:
            return n
    return None


@given(IDS, IDS, st.tuples(st.booleans(), st.booleans()))
def test_the_first_difference_is_that_of_a_scan(left: list[int], right: list[int], ended: tuple[bool, bool]) -> None:
    found = first_difference(left, right, ended)
    assert found == naive_difference(left, right, ended)
    assert found == first_difference(right, left, (ended[1], ended[0]))
    assert first_difference(left, left, ended) is None


@pytest.fixture(scope="module")
def demo() -> Runner:
    return load("demo", backend="eager")


@pytest.fixture
def pair(demo: Runner, tmp_path: Path) -> Iterator[Playground]:
    pair = Playground(demo, PROMPT, beside={}, folder=tmp_path / "playground")
    for form in pair.settings.forms:
        form.write(SHORT)
    yield pair
    pair.close()
    demo.set_owner(None)
    demo.set_listener(None)


def write(pair: Playground, side: int, values: dict[str, Any]) -> None:
    pair.settings.forms[side].write(values)


def play(pair: Playground) -> None:
    pair.run()
    assert pair.wait() and pair._playing is not None and not any(pair._playing.errors), pair._alert.value


def test_equal_settings_never_differ(pair: Playground) -> None:
    """At temperature 1 too: both sides have one seed, and begin in turn."""
    for form in pair.settings.forms:
        form.write({"sampling": {"temperature": 1.0}})
    begins = []
    for _ in range(3):
        play(pair)
        left, right = ([token.id for token in side.tokens_by_sample[0]] for side in pair.columns)
        difference = pair.difference
        assert left == right and (difference.position, difference.compared) == (None, 6) and not any(difference.drift)
        begins.append(pair._first)
    assert begins[0] != begins[1] and "no difference in 6 tokens" in words(pair.picture())


def test_the_first_token_that_differs_is_marked_in_both(pair: Playground) -> None:
    """The right side may not choose its third token: the mark is there, with the probabilities of both."""
    play(pair)
    third = pair.columns[0].tokens_by_sample[0][2]
    write(pair, 1, {"sampling": {"logit_bias": {str(third.id): -100.0}, "max_tokens": 6}})
    play(pair)
    found = pair.difference
    assert found.position is not None and found.choices is not None
    ids = [[token.id for token in side.tokens_by_sample[0]] for side in pair.columns]
    assert found.position == found.compared == naive_difference(ids[0], ids[1], (False, False))
    for side, choice, text in zip(pair.columns, found.choices, pair.texts, strict=True):
        assert re.findall(r'<b class="[^"]*\bm\b[^"]*" data-key="0\.(\d+)"', text.content) == [str(found.position)]
        assert choice.token == side.tokens_by_sample[0][found.position].spelling
    left, right = found.choices
    assert left.own == pytest.approx(right.other) and left.other == pytest.approx(right.own), "one model, one context"
    assert f"first difference: token {found.position + 1}" in words(pair.picture())
    assert pair._history.entries[0].difference == found.position
    assert "<b>sampling.logit_bias</b>" in pair._changes.value and pair.settings.changes


@pytest.mark.parametrize("beside", [{"cache.format": "int4"}, "INT4 KV cache"])
def test_two_columns_begin_with_settings_that_differ(demo: Runner, beside: Any) -> None:
    """The difference is said beside Run, at its fields, and in the experiment."""
    pair = Playground(demo, PROMPT, beside=beside)
    left, right = pair.experiments
    assert pair.settings.changes == {"cache.format": ("dense", "int4")} and left.sampling.temperature == 0
    assert "cache.format</b> dense | int4" in pair._changes.value and pair.settings.buttons.value == "cache"
    assert pair.panel is not None and pair.panel.name == ("pair" if isinstance(beside, dict) else beside)
    names, question = (pair.panel.name, pair.preset), pair.panel.pair_question
    for leave in (lambda: pair.settings.copy(0), lambda: pair.set_trait("preset", "INT8 KV cache")):
        leave()
        pair.reset()
        assert pair.experiments == (left, right) and (pair.panel.name, pair.preset) == names
        assert pair.panel.pair_question == question
    write(pair, 1, {"cache": {"format": "int8"}})
    assert pair.panel.name == "pair", "the question follows the settings as before"
    with pytest.raises(WorkbenchError, match="settings of 1 columns: there are 2"):
        pair.settings.write({"cache": {"format": "int4"}})
    assert pair.settings.changes == {"cache.format": ("dense", "int8")}
    pair.close()


def test_settings_that_differ_are_marked_at_their_fields(pair: Playground) -> None:
    def marked(side: int) -> list[str]:
        fields = pair.settings.forms[side].panels["cache"].fields
        return [name for name, field in fields.items() if "wb-differs" in field.widget._dom_classes]

    assert marked(0) == marked(1) == [] and "equal" in pair._changes.value
    write(pair, 1, {"cache": {"format": "int4"}})
    assert marked(0) == marked(1) == ["format"]
    pair.settings.copy(1)
    assert marked(0) == marked(1) == [] and not pair.settings.changes and pair.experiments[0].cache.format == "int4"


CHANGES = st.sampled_from([
    {"cache": {"format": "int8"}}, {"cache": {"page_size": 32}}, {"sampling": {"temperature": 0.7, "top_k": 5}},
    {"sampling": {"stop": ["\n\n"]}}, {"attention": {"sliding_window": 128}}, {"backend": "mlir"},
    {"executor": {"kind": "uncached", "oracle": False}}, {"schedule": {"chunk_tokens": 16}},
])  # fmt: skip


def test_restoring_a_play_is_the_identity_on_settings(pair: Playground) -> None:
    """Of any settings: every entry that was added comes back as it was, with its prompt and its seed."""

    @given(
        st.lists(CHANGES, max_size=3),
        st.lists(CHANGES, max_size=3),
        st.integers(0, 2**31 - 1),
        st.text("ab", max_size=4),
    )
    def holds(left: list[Any], right: list[Any], seed: int, prompt: str) -> None:
        pair.settings.write(*pair._initial_values)
        for side, changes in enumerate((left, right)):
            for change in changes:
                write(pair, side, change)
        pair.seed, pair.prompt = seed, prompt
        before = pair.experiments
        values = tuple(each.model_dump(mode="json", exclude={"workload"}) for each in before)
        entry = pair._history.add(prompt=prompt, seed=seed, settings=values, figures=({}, {}))
        pair.settings.write(*pair._initial_values)
        pair.seed, pair.prompt = 0, "other"
        pair.plays.picked = str(entry.number)
        assert pair.experiments == before and not pair.new_seed

    holds()


def test_the_history_is_bounded_and_can_be_exported() -> None:
    history = PlayHistory()
    for n in range(MAX_ENTRIES + 5):
        history.add(prompt="p", seed=n, settings=({"a": n}, {"a": 0}), figures=({"tpot_s": 0.5}, {"tpot_s": None}))
    assert [entry.seed for entry in history.entries] == list(range(MAX_ENTRIES + 4, 4, -1))
    assert json.loads(history.json()) == history.as_values()
    head, first, *rest = history.csv().splitlines()
    assert "tpot_s_2" in head and "settings_1" in head and len(rest) == MAX_ENTRIES - 1 and ",0.5," in first


@pytest.mark.parametrize("preset", ENGINE_PRESETS, ids=lambda each: each.name)
def test_a_preset_sets_both_sides_and_the_experiments_rule(preset: PairPreset, pair: Playground) -> None:
    """Their texts are the engine's law: tests/engine/test_capabilities.py has every backend and cache."""
    assert pair.panel is not None
    pair.preset = preset.name
    if problem := preset.problem(pair._given):
        assert problem in pair._alert.value.replace("&#x27;", "'") or "cannot run here" in pair._alert.value
        return
    assert pair.settings.changes and not pair._alert.value and pair.panel.rule.value == preset.rule
    for form in pair.settings.forms:
        form.write({"sampling": {"max_tokens": 3}})
    assert pair.preset == pair.panel.name == preset.name, "a length that both sides have leaves it the preset's"
    left, right = pair.experiments
    assert pair_experiment(left, right, pair.panel.pair_question)


def test_a_preset_plays(pair: Playground) -> None:
    pair.preset = "with and without speculation"
    for form in pair.settings.forms:
        form.write({"sampling": {"max_tokens": 3}})
    play(pair)
    assert all(side.num_tokens == 3 for side in pair.columns)
    assert pair.difference.position is None


def test_settings_that_leave_a_preset_leave_its_question(pair: Playground) -> None:
    """Else an experiment of an INT8 cache would ask about INT4, under its name."""
    int4, panel = ENGINE_PRESETS[1], pair.panel
    assert panel is not None
    plain = panel.pair_question

    def is_presets() -> bool:
        named = (panel.name, pair._choice.value, pair.preset) == (int4.name,) * 3
        assert named or (panel.name, pair._choice.value, pair.preset) == ("pair", NO_PRESET, NO_PRESET)
        return named

    leaving = (
        lambda: write(pair, 1, {"cache": {"format": "int8"}}),
        lambda: write(pair, 0, {"cache": {"page_size": 128}}),
        lambda: pair.settings.copy(1),
        lambda: [
            form.write({"sampling": {"temperature": 1.0}}) for form in pair.settings.forms
        ],  # its texts are greedy
    )
    for leave in leaving:
        pair._choice.value = int4.name
        assert is_presets() and panel.pair_question == PairQuestion(int4.question, int4.rule)
        leave()
        assert not is_presets() and panel.pair_question == plain
    pair.settings.write(*(side.model_dump(mode="json") for side in int4.experiments(pair._given)))
    assert is_presets() and panel.question.value == int4.question, "settings that are a preset's are the preset"
    panel.question.value = "How much memory does it save?"
    leaving[0]()
    assert panel.pair_question == replace(plain, question="How much memory does it save?") and not is_presets()


def test_a_play_is_listed_with_the_seed_it_had(pair: Playground) -> None:
    """The seed's box and `restore` stay usable while it plays."""
    pair.new_seed, pair.seed = False, 5
    listed = pair._ended

    def change_seed(ended: Any) -> None:
        pair.seed = 7
        listed(ended)

    pair._ended = change_seed  # type: ignore[method-assign] (as a reader would, meanwhile)
    play(pair)
    entry = pair._history.entries[0]
    assert entry.seed == 5 == entry.settings[0]["sampling"]["seed"]


def test_a_warm_up_that_was_stopped_is_none(pair: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next play would compile the rest within its timed tokens."""
    lengths: list[int] = []
    submit = Generation._submit

    def submit_stopped(self: Generation, live: Any, request: Any) -> Any:
        if not lengths:
            pair.stop()
        lengths.append(request.sampling.max_tokens)
        return submit(self, live, request)

    monkeypatch.setattr(Generation, "_submit", submit_stopped)
    play(pair)
    assert pair._playing is not None and pair._playing.stopped
    for thread in threading.enumerate():
        if thread.name == "playground":  # it may come to its end after the play's
            thread.join()
    lengths.append(0)
    for _ in range(2):
        play(pair)
    assert lengths[lengths.index(0) :] == [0, 2, 6, 6, 6, 6], "one warm-up, of the runner that both sides share"


def test_a_preset_that_cannot_run_says_why(pair: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PairPreset("window beside triton", "?", {}, {"backend": "triton", "cache.format": "int4"})
    monkeypatch.setattr("workbench.widgets.playground.presets.ENGINE_PRESETS", (*ENGINE_PRESETS, wrong))
    before = pair.experiments
    pair.preset = wrong.name
    if problem := wrong.problem(pair._given):
        assert "cannot run here" in pair._alert.value and "triton" in problem
        assert pair.experiments == before


def test_every_entry_of_the_zoo_is_a_pair_that_the_demo_model_carries_out() -> None:
    initial = initial_experiment(None, PROMPT, RunnerCache())
    presets = zoo_presets()
    assert len(presets) > 40
    for preset in presets:
        assert preset.problem(initial) == "", preset.name
        left, right = preset.experiments(initial)
        assert preset.describes(initial, left, right) and not preset.describes(initial, left, left)
        assert setting_changes(left.model_dump(mode="json"), right.model_dump(mode="json")), preset.name


@pytest.mark.parametrize("preset", [*ENGINE_PRESETS[:3], *ENGINE_PRESETS[5:7]], ids=lambda each: each.name)
def test_the_experiment_of_a_pair_has_its_sides(preset: PairPreset, tmp_path: Path) -> None:
    """Read back from its file, each variant is the side that it stands for."""
    left, right = preset.experiments(initial_experiment(None, PROMPT, RunnerCache()))
    made = pair_experiment(left, right, PairQuestion(preset.question, preset.rule))
    file = write_experiment(made, tmp_path, preset.name)
    read = Experiment.from_file(file)
    assert read == made and read.question == preset.question
    keep = {"model", "backend", "attention", "cache", "speculate", "sampling", "executor", "schedule"}
    for name, side in (("left", left), ("right", right)):
        assert read.variant(name).model_dump(include=keep) == side.model_dump(include=keep)
    again = write_experiment(made, tmp_path, preset.name)
    assert again != file and file.read_text() == experiment_text(made), "nothing is overwritten"
    with pytest.raises(WorkbenchError, match="there is no figure"):
        pair_experiment(left, right, PairQuestion("?", "speed >= 1"))


def test_a_model_in_memory_serves_other_settings_of_the_cache(demo: Runner) -> None:
    """With the tokens of one loaded for them; where weights differ it is loaded anew, and what cannot be is refused."""
    plain = initial_experiment(None, PROMPT, RunnerCache())
    quantized = plain.with_("cache.format=int8", "sampling.max_tokens=12")
    shared = demo.loaded_model.for_settings(demo.config, quantized)
    assert shared is not None and shared.transformer is demo.model
    runners = Runner(quantized, shared), Runner(quantized)
    long = PROMPT * 30  # so long that some of it is quantized
    texts = ["".join(event.text for event in each.stream(long, max_tokens=12, temperature=0)) for each in runners]
    assert texts[0] == texts[1]
    for other in ("model.dtype=float64", "backend=auto", "attention.sliding_window=64", "backend=mlir"):
        assert demo.loaded_model.for_settings(demo.config, plain.with_(other)) is None
    with pytest.raises(WorkbenchError):
        demo.loaded_model.for_settings(demo.config, plain.with_("cache.format=int4", "cache.page_size=7"))


@pytest.mark.parametrize("command", [CommandInProcess, pytest.param(CommandProcess, marks=pytest.mark.processes)])
def test_a_run_that_was_stopped_or_failed_has_no_verdict(
    command: type[CommandProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so: of a run whose model is not there, and of one that is interrupted at once."""
    monkeypatch.setattr("workbench.widgets.playground.pair_experiment.CommandProcess", command)
    text = "question: '?'\nworkload: {kind: text_agreement}\nvariants: {left: {}, right: {}}\nmodel: nothing\n"
    file = tmp_path / "wrong-001.yaml"
    file.write_text(text)
    run = ExperimentRun(file, lambda: None)
    run.wait()
    assert not run.running and run.problem.startswith("failed") and "no model" in run.problem and not run.verdicts
    assert "failed" in words("".join(draw_run(run, "", "")))
    run = ExperimentRun(file, lambda: None)
    run.stop()
    run.wait()
    assert run.problem.startswith("stopped") and not run.verdicts


def test_sides_of_one_model_load_it_once(pair: Playground) -> None:
    write(pair, 1, {"cache": {"format": "int8"}})
    play(pair)
    runners = pair._runners._runners.values()
    assert len(runners) == 2 and len({id(each.model) for each in runners}) == 1
