"""The Playground shows the runner's own text; it can be stopped, changed, removed, and is never lost in silence."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.widgets import words
from tests.patience import limit, until
from workbench import stop_button
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.trace.events import Decoded
from workbench.widgets import Playground
from workbench.widgets.playground.history import PlayHistory, draw_history
from workbench.widgets.playground.settings import non_default

PROMPT = "def f(x):\n"


@pytest.fixture(scope="module")
def demo() -> Runner:
    return load("demo", backend="eager")


@pytest.fixture
def play(demo: Runner) -> Iterator[Playground]:
    play = Playground(demo, PROMPT)
    play.new_seed = False
    play.settings.write({"sampling": {"max_tokens": 20, "temperature": 1.0}})
    yield play
    play.stop()
    play.wait()
    play.close()
    demo.set_owner(None)
    demo.set_listener(None)


def ran(play: Playground) -> bool:
    """Play, and return whether it has ended."""
    play.run()
    return play.wait()


def test_what_is_played_is_what_the_runner_gives(play: Playground, demo: Runner) -> None:
    seen: list[tuple[bool, str]] = []
    play.observe(lambda change: seen.append((change["new"], play.output)), "running")
    assert ran(play)
    events = list(demo.stream(PROMPT, max_tokens=20))
    ids = [event.token_id for event in events if isinstance(event, Decoded)]
    assert [piece.id for piece in play.played.tokens_by_sample[0]] == ids
    text = "".join(event.text for event in events)
    assert play.played.text() == text and text in words(play.texts[0].content, "")
    assert seen == [(True, ""), (False, text)] and play.output == text
    assert all(said in words(play.shown.content) for said in ("20 tokens", "length", " ms", "KiB"))


def test_every_token_has_its_chance_and_the_others_there_were(play: Playground) -> None:
    play.settings.write({"sampling": {"temperature": 0.0, "logprobs": 7}})
    assert ran(play)
    for piece in play.played.tokens_by_sample[0]:
        shares = [share for _, share in piece.alternatives]
        assert len(shares) == 7 and shares == sorted(shares, reverse=True) and piece.probability == shares[0]


def test_settings_of_sampling_take_effect_without_another_runner(play: Playground) -> None:
    assert ran(play)
    first, runners = play.played.text(), list(play._runners._runners.values())
    play.seed = 7
    assert ran(play) and play.played.text() != first
    assert list(play._runners._runners.values()) == runners


def test_other_settings_make_a_runner_and_few_are_kept(play: Playground) -> None:
    for size in (16, 32, 64, 8):
        play.settings.write({"cache": {"page_size": size}, "sampling": {"max_tokens": 2}})
        assert ran(play) and not play._alert.value
    kept = list(play._runners._runners.values())
    assert [runner.store.page_size for runner in kept] == [32, 64, 8]


def test_stop_ends_it_within_a_step_or_two(play: Playground) -> None:
    play.settings.write({"sampling": {"max_tokens": 1000, "ignore_eos": True}})
    play.run()
    until(lambda: play.played.num_tokens >= 3)
    assert play.running and play._run_button.disabled and not play._stop_button.disabled
    play.stop()
    seen = play.played.num_tokens
    assert play.wait() and play.played.finish_reasons == {0: "cancelled"} and play.played.num_tokens <= seen + 3
    assert not play._run_button.disabled and play._stop_button.disabled and "cancelled" in play.shown.content


def test_reset_is_as_it_was_made(play: Playground) -> None:
    play.settings.write({"sampling": {"top_k": 3}, "cache": {"format": "int8"}})
    play.prompt = "class A:"
    play.run()
    play.reset()
    assert play.experiment == play._initial[0] and (play.prompt, play.new_seed) == (PROMPT, True)
    assert not play.played.num_tokens and play.output == "" and 'data-key="0.0"' not in play.texts[0].content


def test_a_mistake_is_reported_and_cannot_be_run(play: Playground) -> None:
    play.settings.write({"sampling": {"beams": 3, "stop": ["x"]}})
    assert play._run_button.disabled and play.experiment is None
    play.run()
    assert not play.played.num_tokens
    play.settings.write({"sampling": {"beams": 0, "stop": []}})
    assert not play._run_button.disabled


def test_what_cannot_be_carried_out_is_said_in_the_widget(play: Playground) -> None:
    play.prompt = ""
    assert ran(play) and "the prompt is empty" in play._alert.value
    play.prompt = PROMPT
    play.settings.write({"cache": {"format": "int8", "page_size": 32}})
    assert ran(play) and 'role="alert"' in play._alert.value
    assert "groups of 64 tokens do not divide pages of 32" in play._alert.value
    assert "cache.quant_group" in "".join(
        each.value for each in play.settings.forms[0].panels["cache"]._alerts.values()
    )


def test_history_escapes_what_was_typed() -> None:
    typed, history = '<img src=x onerror="alert(1)">', PlayHistory()
    sides = ({"sampling": {"stop": [typed]}}, {"sampling": {"stop": []}})
    for settings in (sides[:1], sides):
        history.add(prompt=typed, seed=0, settings=settings, figures=({},) * len(settings), remark=typed)
    page = draw_history(history.entries, sides[1])
    assert page.count("&lt;img") == 6 and "<img" not in page


def ids_of(printed_by: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(printed_by, {})
    return out.getvalue()


def test_what_was_played_can_be_taken_away(play: Playground) -> None:
    play.seed = 11
    play.settings.write(
        {
            "sampling": {"temperature": 0.8, "stop": ["zzz"], "logit_bias": {"5": -1.5}},
            "speculate": {"kind": "prompt_lookup"},
            "cache": {"prefix": {"kind": "radix"}, "format": "int8"},
        }
    )
    assert ran(play) and play.played.num_tokens == 20 and play.copied is not None
    assert Experiment.from_yaml(play.copied.yaml.text) == play.last == play.experiment
    assert ids_of(play.copied.python.text) == play.played.text()


def test_copied_are_the_settings_that_are_shown(play: Playground) -> None:
    assert play.copied is not None
    assert Experiment.from_yaml(play.copied.yaml.text) == play.experiment  # before anything was played
    assert ran(play)
    played = play.copied.yaml.text
    play.settings.write({"sampling": {"top_k": 7}})
    assert play.copied.yaml.text != played and Experiment.from_yaml(play.copied.yaml.text) == play.experiment
    play.prompt = "class A:"
    assert "class A:" in play.copied.python.text and "'top_k': 7" in play.copied.python.text
    play.settings.write({"sampling": {"beams": 3, "stop": ["x"]}})
    assert play.copied.yaml.text == play.copied.python.text == ""  # what cannot be run


def test_each_run_has_a_new_seed_that_is_shown_and_gives_the_same_again(demo: Runner) -> None:
    play = Playground(demo, PROMPT)
    assert play.new_seed and play.experiment.sampling.temperature == 0.7 and play.copied is not None
    seeds, texts = [], []
    for _ in range(4):
        assert ran(play)
        seeds.append(play.last.sampling.seed)
        texts.append(play.output)
        assert f">{seeds[-1]}<" in play.shown.content and play.seed == seeds[-1]
        assert Experiment.from_yaml(play.copied.yaml.text) == play.last
    assert len(set(seeds)) > 1 and len(set(texts)) > 1
    play.new_seed = False
    assert ran(play) and play.output == texts[-1] == ids_of(play.copied.python.text)
    play.close()


def test_a_runner_that_is_made_while_its_view_is_closed_is_let_go(demo: Runner, gate: Gate) -> None:
    play = Playground(demo, PROMPT)
    play.settings.write(OTHER)
    play.run()
    assert gate.begun.wait()
    threads = playing()
    assert ends(play.close)
    gate.open.set()
    for each in threads:
        each.join()
    gc.collect()
    assert gate.made.is_set() and gate.runner is not None and gate.runner() is None


def test_no_tip_repeats_its_label(play: Playground) -> None:
    with_tip = 0
    for made in play.settings.forms[0]._builder.fields:
        control = getattr(made, "_list", None) or getattr(made, "_check", None) or made.widget
        tip = getattr(control, "tooltip", None)
        assert tip is None or tip.strip() and tip.strip() != control.description, control.description
        with_tip += tip is not None
    assert with_tip > 70


def test_samples_are_shown_apart(play: Playground) -> None:
    play.settings.write({"sampling": {"n": 3, "max_tokens": 5}})
    assert ran(play) and set(play.played.tokens_by_sample) == {0, 1, 2}
    play.settings.write({"sampling": {"n": 1, "beams": 2}})
    assert ran(play) and len(play.played.tokens_by_sample[0]) == 5 and not play._alert.value
    assert play.played.finish_reasons == {0: "length", 1: "not_chosen"} and "sample 1 not_chosen" in play.picture()


def test_a_play_of_the_history_comes_back(play: Playground) -> None:
    assert ran(play)
    before, text = play.experiment, play.output
    play.prompt = "x = "
    play.settings.write({"sampling": {"max_tokens": 3}})
    play.seed = 7
    assert ran(play) and [entry["number"] for entry in play.history] == [2, 1]
    assert "sampling.max_tokens: 3" in play.plays.content and "restore play 1" in play.picture()
    play.plays.picked = "1"
    assert play.plays.picked == ""
    assert play.experiment == before and not play.new_seed
    assert ran(play) and play.output == text and len(play.history) == 3


def test_what_grows_is_sent_once(play: Playground) -> None:
    sent: list[Any] = []
    play.texts[0].send = lambda message, *_: sent.append(message)  # type: ignore[method-assign]
    assert ran(play)
    pieces = [piece for message in sent for piece in message["pieces"]]
    places = [message["at"] for message in sent]
    assert places == sorted(set(places)) and all(piece in play.texts[0].content for piece in pieces)
    assert sum(len(message["pieces"]) for message in sent) <= 20


def test_what_a_model_says_is_not_markup(play: Playground, demo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.tokenizer is not None
    (sign,) = demo.tokenizer.encode("<")
    play.prompt = "<script>alert(1)</script>"
    play.settings.write({"sampling": {"logit_bias": {str(sign): 100.0}, "max_tokens": 4, "temperature": 0.0}})
    assert ran(play) and play.played.text() == "<<<<"
    assert "<script" not in play.picture() and "&lt;script&gt;" in play.picture() and "<<" not in play.picture()
    monkeypatch.setattr(type(play._playing), "status", "<b>&")
    play.redraw()
    assert "&lt;b&gt;&amp;" in play._status.value


def test_only_what_differs_is_said_and_its_kind_with_it() -> None:
    plain = {"a": {"kind": "x", "n": 1, "m": 1}, "b": {"kind": "x"}, "c": {}, "d": 1}
    values = {"a": {"kind": "x", "n": 2, "m": 1}, "b": {"kind": "y", "n": 1}, "c": {"k": 1}, "d": True, "e": None}
    short = {"a": {"kind": "x", "n": 2}, "b": {"kind": "y", "n": 1}, "c": {"k": 1}, "d": True, "e": None}
    assert non_default(values, plain) == short and non_default(plain, plain) == {}


def test_it_begins_with_what_it_is_given(tmp_path: Path, demo: Runner) -> None:
    file = tmp_path / "mine.yaml"
    workload = {"kind": "prompts", "prompts": ["a", "b"]}
    given = Experiment.from_values({"question": "q", "sampling": {"seed": 3}, "backend": "eager", "workload": workload})
    file.write_text(given.to_yaml())
    assert Playground(given).experiment == Playground(str(file)).experiment
    play = Playground(given)
    assert not play.new_seed and play.experiment.sampling == given.sampling, "a given experiment keeps its seed"
    assert play.prompt == "a" and play.experiment.question == "q"
    assert Playground("demo-draft").experiment.model.name == "demo-draft"
    assert Playground(demo).experiment.backend == "eager"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr("workbench.experiment.build.runner_for", gate.runner_for)
    yield gate
    gate.open.set()


class Gate:
    """Runners are made when it opens, and not before."""

    def __init__(self) -> None:
        self.begun, self.open, self.made = threading.Event(), threading.Event(), threading.Event()
        self.runner: weakref.ref[Runner] | None = None  # the last that was made

    def runner_for(self, experiment: Experiment, report: Callable[[str], None], **given: Any) -> Runner:
        self.begun.set()
        assert self.open.wait()
        runner = runner_for(experiment, report, **given)
        self.runner = weakref.ref(runner)
        self.made.set()
        return runner


def playing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "playground"]


OTHER = {"cache": {"page_size": 32}, "sampling": {"max_tokens": 5}}


def ends(work: Callable[[], object]) -> bool:
    """Return True if `work` ends before the gate opens."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit(5))
    return not thread.is_alive()


def test_a_run_that_was_reset_has_no_say_in_the_next(play: Playground, gate: Gate) -> None:
    play.settings.write(OTHER)
    play.run()
    assert gate.begun.wait() and play.running
    assert ends(play.reset)
    assert not play.running and not play._run_button.disabled and play._stop_button.disabled
    play.settings.write(OTHER | {"sampling": {"max_tokens": 1000, "ignore_eos": True}})
    play.run()
    second = play._playing
    assert second is not None
    until(lambda: len(playing()) == 2)
    threads = playing()
    gate.open.set()
    until(lambda: sum(each.is_alive() for each in threads) == 1 and second.played[0].num_tokens > 3)
    assert play.running and play._run_button.disabled and not play._stop_button.disabled
    assert play.played is second.played[0]
    play.stop()
    assert play.wait() and not play.running and play.output == second.played[0].text() != ""


def test_stop_does_not_wait_for_the_runner_to_be_made(play: Playground, gate: Gate) -> None:
    play.settings.write(OTHER)
    play.run()
    assert gate.begun.wait()
    play.stop()
    assert play.wait() and not play.running and not play._run_button.disabled and play._stop_button.disabled
    until(lambda: "stopped; what was begun of its runner still goes on" in play._status.value)
    gate.open.set()
    assert gate.made.wait()
    until(lambda: "stopped" not in play._status.value)
    assert not play.played.num_tokens and not play._alert.value
    gate.begun.clear()
    assert ran(play) and play.played.num_tokens == 5 and not gate.begun.is_set()  # it was kept


def test_the_stop_button_ends_the_making_of_a_runner(play: Playground, gate: Gate) -> None:
    play.settings.write(OTHER)
    play.run()
    assert gate.begun.wait() and play._playing in stop_button._STOPPABLE
    for work in tuple(stop_button._STOPPABLE):
        work.stop()
    assert play.wait() and not play.running


def test_a_closed_view_plays_no_more(demo: Runner) -> None:
    """See test_closing.py for what it leaves behind."""
    play = Playground(demo, PROMPT)
    play.close()
    assert ran(play) and "the view is closed" in play._alert.value
