"""The view's figures of drafted tokens agree with the runner's events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import until
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import RunFolder
from workbench.runs.metrics import acceptance_metrics
from workbench.trace.events import Event, Finished, Stepped, Verified
from workbench.trace.recorder import Recorder
from workbench.widgets import RunnerThread, SpeculationView
from workbench.widgets.speculation.data import DraftVerification, SpeculationTables, place_tokens, speculation_speed

PROMPT = "def read_file(path):\n    with open(path) as f:\n        return f.read()\n\ndef write_file(path, text):\n"
IN_TEXT = ("plain", "accepted", "corrected", "bonus")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = load("demo", backend="eager", speculate={"kind": "prompt_lookup", "num_speculative_tokens": 3})
    yield runner
    RunnerThread.attach(runner).stop()
    runner.owner, runner.telemetry.listener = None, None


@pytest.fixture(scope="module")
def events(runner: Runner) -> list[Event]:
    """Two requests together, recorded."""
    recorder = Recorder()
    leave = RunnerThread.attach(runner).listen(recorder.record)
    way = SamplingParameters(max_tokens=24, temperature=0, ignore_eos=True)
    ids = runner.make_requests(PROMPT, {})[0].prompt_ids
    list(runner.stream([Request("first", ids, way), Request("second", ids[:-4], way)]))
    leave()
    return recorder.events


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[DraftVerification]]:
    """An output and its checks, as a runner could have made them: the last may be cut off by the request's end."""
    output: list[int] = []
    checks: list[DraftVerification] = []
    for step in range(draw(st.integers(0, 6))):
        drafted = draw(st.lists(st.integers(0, 9), max_size=4))
        if not drafted:
            output.append(draw(st.integers(0, 9)))
            continue
        accepted = draw(st.integers(0, len(drafted)))
        given = [*drafted[:accepted], draw(st.integers(10, 19))]
        checks.append(DraftVerification(step, tuple(drafted), accepted, len(output), tuple(given)))
        output += given
    if checks and draw(st.booleans()):
        last = checks.pop()
        kept = draw(st.integers(1, len(last.emitted)))
        output = [*output[: last.index], *last.emitted[:kept]]
        checks.append(DraftVerification(last.step, last.token_ids, last.accepted, last.index, last.emitted[:kept]))
    return output, checks


@given(histories())
def test_every_token_is_in_its_place(made: tuple[list[int], list[DraftVerification]]) -> None:
    output, checks = made
    found = place_tokens(output, checks)
    assert [piece.token for piece in found if piece.kind in IN_TEXT] == output
    for number, check in enumerate(checks, 1):
        mine = [piece for piece in found if piece.verification == number]
        assert [p.token for p in mine if p.draft_position] == list(check.token_ids)  # the whole draft, in its order
        count = {kind: sum(p.kind == kind for p in mine) for kind in (*IN_TEXT, "rejected", "untried", "unused")}
        assert count["accepted"] + count["unused"] == check.accepted
        assert count["rejected"] == (check.accepted < len(check.token_ids))
        assert count["accepted"] + count["corrected"] + count["bonus"] == len(check.emitted)
        assert not (count["rejected"] and count["bonus"]) and not count["plain"]
    assert [piece.verification for piece in found if piece.verification] == sorted(
        piece.verification for piece in found if piece.verification
    )


def test_of_events_it_shows_each_request_and_the_runs_figures(runner: Runner, events: list[Event]) -> None:
    view = SpeculationView(events, tokenizer=runner.tokenizer)
    ends = {event.request_id: event.token_ids for event in events if isinstance(event, Finished)}
    checks = [event for event in events if isinstance(event, Verified)]
    figures = view.figures
    assert figures["verifications"] == len(checks) and figures["drafted_tokens"] == sum(
        len(e.token_ids) for e in checks
    )
    assert figures["accepted_tokens"] == sum(e.accepted_tokens for e in events if isinstance(e, Stepped)) > 0
    for name in ("first", "second"):
        view.sequence = name
        found = place_tokens(view.token_ids, view._run.verifications_of(name))
        assert tuple(p.token for p in found if p.kind in IN_TEXT) == ends[name] == tuple(view.token_ids)
        drafted = [token for e in checks if e.request_id == name for token in e.token_ids]
        assert [p.token for p in found if p.draft_position] == drafted
        assert view.verification == len(view._run.verifications_of(name)) == view.steps.step
    with pytest.raises(WorkbenchError, match="this run has first, second"):
        view.sequence = "third"


def test_one_goes_through_the_checks(runner: Runner, events: list[Event]) -> None:
    view = SpeculationView(events, tokenizer=runner.tokenizer)
    count = view.verification
    for number in range(count + 1):
        view.steps.step = number
        assert view.verification == number
        picture = view.picture()
        assert (f"Verification {number} of {count}" in picture) == (number > 0)
        assert f'data-key="k{number + 1}"' not in picture and (number == 0 or f'data-key="k{number}"' in picture)
    view.shown.picked = "draft:1"  # a bar is no check
    view.shown.picked = "k2"
    assert view.verification == view.steps.step == 2


def test_a_record_is_shown_as_its_events_are(events: list[Event], tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.events = events
    folder = RunFolder.create(tmp_path, "one")
    for name in ("tokens", "steps", "verifications"):
        folder.write_table(f"{name}.parquet", getattr(recorder, name)())
    path = folder.finish()
    assert (
        0
        < sum(row["accepted"] for row in recorder.verifications())
        < sum(row["drafted"] for row in recorder.verifications())
    )
    there, here = SpeculationView(path), SpeculationView(events)
    assert there.picture() == here.picture() and there.figures == here.figures
    assert there.figures == acceptance_metrics(recorder.verifications(), recorder.steps())
    older = RunFolder.create(tmp_path, "older")  # its checks say how many, and not which
    rows = [{k: v for k, v in row.items() if k != "token_ids"} for row in recorder.verifications()]
    for name, table in (("tokens", recorder.tokens()), ("steps", recorder.steps()), ("verifications", rows)):
        older.write_table(f"{name}.parquet", table)
    view = SpeculationView(older.finish())
    assert "?</span>" in view.picture() and view.figures == here.figures


def test_a_runner_drafts_and_does_not_in_turn(runner: Runner) -> None:
    drafts, view = runner.core.speculator, SpeculationView(runner, PROMPT, max_tokens=24, rounds=1)
    view.wait()
    assert view._problem == "" and runner.core.speculator is drafts
    assert len(view.token_ids) == 24 and view.token_ids == view.plain_token_ids
    assert "the same 24 as plain" in view.shown.content
    assert view.figures["accepted_tokens"] > 0 and view.verification > 0
    found = view.speeds
    assert found is not None and not found.own and found.measured > 0 and found.predicted is not None
    assert "predicted speed-up" in view.picture()


def test_other_drafts_are_lent_to_the_runner(runner: Runner) -> None:
    drafts = runner.core.speculator
    view = SpeculationView(
        runner, PROMPT, speculate={"kind": "draft", "num_speculative_tokens": 2}, rounds=0, max_tokens=9
    )
    view.wait()
    assert runner.core.speculator is drafts and view.figures["drafted_tokens"] > 0 == (view.speeds or 0)
    assert max(len(check.token_ids) for check in view._run.verifications_of(view.sequence)) == 2
    assert view.plain_token_ids is None and "nothing was timed" in view.picture()


def test_stopped_the_runner_drafts_as_before(runner: Runner) -> None:
    drafts, view = runner.core.speculator, SpeculationView(runner, PROMPT, max_tokens=900, ignore_eos=True)
    view.stop()
    view.wait()
    assert runner.core.speculator is drafts and view.speeds is None and "not known" in view.picture()
    other = SpeculationView(runner, PROMPT, max_tokens=900, ignore_eos=True)
    until(lambda: other._comparison.events.current or not other._comparison.working)  # type: ignore[union-attr]
    RunnerThread.attach(runner).stop()  # as the kernel's stop button does
    other.wait()
    assert runner.core.speculator is drafts and other.speeds is None and 0 < len(other.token_ids) < 900


def test_two_views_on_one_runner_do_not_disturb_each_other(runner: Runner) -> None:
    """Each drafts what it drafts alone, in every round."""
    drafts = runner.core.speculator

    def view(most: int, rounds: int) -> SpeculationView:
        speculate = {"kind": "prompt_lookup", "num_speculative_tokens": most}
        return SpeculationView(runner, PROMPT, speculate=speculate, rounds=rounds, max_tokens=12)

    def drafted(view: SpeculationView) -> list[list[tuple[int, ...]]]:
        assert view._comparison is not None and view._problem == ""
        return [[e.token_ids for e in events if isinstance(e, Verified)] for events in view._comparison.events.drafted]

    alone = [drafted(view(most, 0).wait()) for most in (2, 4)]
    together = [view(most, 1) for most in (2, 4)]
    assert "waits for another view" in together[1].picture()
    assert [drafted(each.wait()) for each in together] == [2 * each for each in alone]
    assert alone[0] != alone[1] and runner.core.speculator is drafts
    assert len({each.sequence for each in together}) == 2


def test_who_waits_for_another_view_can_be_stopped(runner: Runner) -> None:
    first = SpeculationView(runner, PROMPT, max_tokens=900, ignore_eos=True)
    second = SpeculationView(runner, PROMPT, max_tokens=16)
    third = SpeculationView(runner, PROMPT, max_tokens=16, rounds=0)
    second.stop()
    second.wait()
    assert first._working and not second._working and second.token_ids == []
    first.stop()
    assert len(third.wait().token_ids) == 16


def row(step: int, wall: float, drafted: int, given: int) -> dict:
    phase = "decode" if step else "prefill"
    return {
        "step": step, "phase": phase, "requests": 1, "wall_seconds": wall, "drafted_tokens": drafted,
        "decode_tokens": given, "draft_seconds": 0.0,
    }  # fmt: skip


def test_the_prediction_is_leviathans_and_time_is_of_steps_that_decode() -> None:
    """Two tokens drafted in four of five steps, a third of which stand where tried; steps take three plain ones. Not
    counted are the prefill and the first decode of every stretch, all of which take nine."""
    steps = ((0, 9.0, 0, 1), (1, 9.0, 2, 2), (2, 3.0, 2, 2), (3, 3.0, 0, 1), (4, 3.0, 2, 2), (7, 9.0, 2, 2))
    mine = [row(*each) for each in (*steps, (8, 3.0, 2, 1), (9, 3.0, 2, 2))]
    checks = [{"drafted": 2, "accepted": accepted} for accepted in (1, 1, 0, 0)]
    found = speculation_speed(
        SpeculationTables(checks, [], mine), SpeculationTables([], [], [row(n, 1.0, 0, 1) for n in range(6)])
    )
    assert found is not None
    chance = 2 / 6  # two stood of six that were tried
    assert found.cost == 3 and found.predicted == pytest.approx((0.8 * (1 + chance + chance**2) + 0.2) / 3)
    assert found.tokens_per_s == pytest.approx(8 / 15) and found.measured == pytest.approx(8 / 15)
    assert (
        speculation_speed(SpeculationTables(checks, [], mine), None) is None
    )  # one step without a check is too few to know its time
    more = [row(n, 1.0, 0, 1) for n in range(10, 15)]
    own = speculation_speed(SpeculationTables(checks, [], [*mine, *more]), None)
    assert own is not None and own.own and own.plain_tokens_per_s == pytest.approx(6 / 8)
