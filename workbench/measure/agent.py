"""An agent measured: right answers, what each round costs on the warm prefix, and TTFT against a cold start of the same
request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, cast

from compiled_kernels.rounds import interleaved
from workbench.agents.agent import Agent, agent
from workbench.agents.result import AgentResult
from workbench.custom import resolve_path
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import AgentQuestion, AgentWorkload
from workbench.experiment.variants import VariantResults, described, every_variant
from workbench.measure.chart import import_altair, place_labels
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.prompt.turns import AssistantTurn
from workbench.request import CustomPart, Request
from workbench.runs.metrics import TABLES
from workbench.trace.events import Decoded
from workbench.trace.recorder import Recorder

TOKENS = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "thinking_tokens")  # of a round
MEANS = ("rounds", "calls", *TOKENS, "tools_s", "seconds")  # of a question
WIDTH, HEIGHT = 380, 280
WARM, COLD = "#0b6e4f", "#a8a8a8"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Asked:
    """A question that was asked: what the agent's run left, its trace, and TTFT by round."""

    question: AgentQuestion
    result: AgentResult
    is_right: bool
    recorder: Recorder
    requests: tuple[Request, ...]  # of the rounds
    ttft: tuple[float | None, ...]  # seconds from a request's arrival
    cold_ttft: tuple[float | None, ...]  # of the same requests from an empty prefix cache; None: not measured


def measure_agent(experiment: Experiment, on_progress: Callable[[str], None] = lambda line: None) -> VariantResults:
    """Ask every variant's agent all questions in interleaved rounds, and return one row a variant.

    Variants that differ only in sampling and workload share a runner."""
    work, variants = cast(AgentWorkload, experiment.workload), every_variant(experiment)
    asked = {name: questions_of(cast(AgentWorkload, variant.workload)) for name, variant in variants.items()}
    on_progress = StageCounter(on_progress, len(variants) * (work.rounds + 2))
    same = {"sampling": experiment.sampling, "workload": experiment.workload}
    runners = load_runners(variants, on_progress, same)
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ("questions", "agent_rounds", *TABLES)}
    for turn, name in interleaved(runners, work.rounds, on_progress):
        for number, question in enumerate(asked[name] if turn else asked[name][:1]):
            found = ask(runners[name], variants[name], question, number)
            if turn:
                marks = {"variant": name, "round": turn, "question": number}
                tables["questions"].append(marks | _question_row(found))
                tables["agent_rounds"] += [marks | row for row in _round_rows(found)]
                for table in TABLES:
                    tables[table] += [marks | row for row in getattr(found.recorder, table)()]
    rows = [_row(experiment, name, runner, tables) for name, runner in runners.items()]
    about = {"questions": {name: len(each) for name, each in asked.items()}, "rounds": work.rounds}
    return VariantResults(rows, about, tables)


def questions_of(workload: AgentWorkload) -> tuple[AgentQuestion, ...]:
    """Return the questions that are given, or that the named function makes (WorkbenchError for other values)."""
    given = workload.questions
    if not isinstance(given, CustomPart):
        return given
    found = tuple(resolve_path(given.path)(**given.arguments))
    wrong = next((each for each in found if not isinstance(each, AgentQuestion)), None)
    if wrong is not None or not found:
        what = "no question" if wrong is None else f"a {type(wrong).__name__}"
        raise WorkbenchError(f"workload.questions.path {given.path}: gives {what}, must give AgentQuestion values")
    return found


def ask(runner: Runner, experiment: Experiment, question: AgentQuestion, number: int) -> Asked:
    """Ask one question from an empty prefix cache, then begin each round's request once more from an empty one."""
    work, recorder = cast(AgentWorkload, experiment.workload), Recorder()
    tools = [resolve_path(path) for path in (work.tools if question.tools is None else question.tools)]
    sampling = experiment.sampling.model_copy(update={"seed": (experiment.sampling.seed + number) % 2**63})
    system = work.system if question.system is None else question.system
    made = agent(
        runner, tools, system, tool_choice=work.tool_choice, limits=work.limits, **sampling.model_dump(mode="python")
    )
    runner.reset_prefix_cache()
    runner.set_listener(recorder.record)
    try:
        result = made.run(question.question)
    finally:
        runner.set_listener(None)
    requests = tuple(requests_of(made, result))
    assert [len(request.prompt_ids) for request in requests] == [each.usage.prompt_tokens for each in result.rounds]
    cold = [cold_ttft(runner, request) if work.cold_start else None for request in requests]
    runner.reset_prefix_cache()
    right = result.stop_reason == "end_turn" and all(holds(result.answer, text) for text in question.wanted)
    return Asked(question, result, right, recorder, requests, tuple(_ttfts(recorder)), tuple(cold))


def requests_of(made: Agent, result: AgentResult) -> Iterator[Request]:
    """Yield the request of each round of a run: the conversation up to its answer."""
    talk = result.conversation
    answers = [place for place, turn in enumerate(talk.turns) if isinstance(turn, AssistantTurn)]
    for place in answers[len(answers) - len(result.rounds) :]:
        before = made.with_thinking(talk.model_copy(update={"turns": talk.turns[:place]}))
        sampling = made.sampling_of(before, made.answer_format(before.tools), made.limits.tokens)
        yield from made.runner.make_requests(made.with_thinking(before), sampling)


def cold_ttft(runner: Runner, request: Request) -> float | None:
    """Return the seconds to the first token of a request from an empty prefix cache; then it is cancelled."""
    runner.reset_prefix_cache()
    recorder = Recorder()
    with closing(runner.stream([request])) as events:  # type: ignore[type-var] (a generator)
        for event in events:
            recorder.record(event)
            if isinstance(event, Decoded):
                break
    return next(_ttfts(recorder))


def _ttfts(recorder: Recorder) -> Iterator[float | None]:
    for row in recorder.requests():
        yield None if row["first_token"] is None else row["first_token"] - row["arrival"]


def holds(answer: str, text: str) -> bool:
    """Return whether `text` is in `answer`, not as a part of a longer number or word."""
    edges = (r"(?<![\w.-])" if text[:1].isdigit() else r"", r"(?![\w]|\.\d)" if text[-1:].isalnum() else "")
    return re.search(edges[0] + re.escape(text) + edges[1], answer) is not None


def _question_row(asked: Asked) -> dict[str, Any]:
    result, used = asked.result, asked.result.usage
    calls = [call for each in result.rounds for call in each.calls]
    return {
        "kind": asked.question.kind, "text": asked.question.question, "wanted": list(asked.question.wanted),
        "answer": result.answer,
        "right": asked.is_right, "stop_reason": result.stop_reason, "error": result.error,
        "rounds": len(result.rounds), "calls": len(calls), "failed_calls": sum(bool(call.error) for call in calls),
        **{name: getattr(used, name) for name in TOKENS}, "seconds": used.seconds,
        "tools_s": sum(call.seconds for call in calls),
    }  # fmt: skip


def _round_rows(asked: Asked) -> Iterator[dict[str, Any]]:
    turns = [turn for turn in asked.result.conversation.turns if isinstance(turn, AssistantTurn)]
    for number, each in enumerate(asked.result.rounds):
        yield {
            "agent_round": number + 1,
            **{name: getattr(each.usage, name) for name in TOKENS}, "ttft_s": asked.ttft[number],
            "cold_ttft_s": asked.cold_ttft[number], "seconds": each.usage.seconds,
            "tools_s": sum(call.seconds for call in each.calls),
            "calls": json.dumps([[call.name, call.arguments, call.result] for call in each.calls]),
            "finish_reason": each.finish_reason, "token_ids": list(turns[number].generated_ids),
        }  # fmt: skip


def _row(
    experiment: Experiment, name: str, runner: Runner, tables: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    questions = [row for row in tables["questions"] if row["variant"] == name]
    rounds = [row for row in tables["agent_rounds"] if row["variant"] == name]
    numbers, kinds = sorted({row["agent_round"] for row in rounds}), dict.fromkeys(row["kind"] for row in questions)
    by_round = {
        key: {str(number): _median(row[key] for row in rounds if row["agent_round"] == number) for number in numbers}
        for key in ("ttft_s", "cold_ttft_s")
    }
    later = [row for row in rounds if row["agent_round"] > 1]
    return {
        **described(experiment, name, runner.core.backends),
        "questions": len(questions), "right": mean(row["right"] for row in questions),
        "right_by_kind": {
            kind: mean(row["right"] for row in questions if row["kind"] == kind) for kind in kinds if kind
        },
        "answered": mean(row["stop_reason"] == "end_turn" for row in questions),
        **{f"{key}_per_question": mean(row[key] for row in questions) for key in MEANS},
        "ttft_first_s": by_round["ttft_s"]["1"], "later_ttft_s": _median(row["ttft_s"] for row in later),
        "later_cold_ttft_s": _median(row["cold_ttft_s"] for row in later),
        "ttft_s_by_round": by_round["ttft_s"], "cold_ttft_s_by_round": by_round["cold_ttft_s"],
    }  # fmt: skip


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def chart(rows: Rows, title: str) -> Any:
    """Draw Altair charts: right answers against generated tokens a question by variant, and TTFT by round beside a cold
    start's."""
    altair = import_altair()
    return altair.hconcat(_accuracy(altair, rows), _by_round(altair, rows)).properties(title=title)


def _accuracy(altair: Any, rows: Rows) -> Any:
    points = [
        {"variant": row["variant"], "tokens": row["output_tokens_per_question"], "right": row["right"]} for row in rows
    ]
    most = 1.3 * max(point["tokens"] for point in points)
    x = altair.X(
        "tokens:Q", title="generated tokens a question, thoughts included",
        scale=altair.Scale(domain=[0, most], nice=False),
    )  # fmt: skip
    y = altair.Y("right:Q", title="right answers", scale=altair.Scale(domain=[0, 1.04]), axis=altair.Axis(format="%"))
    dots = altair.Chart(altair.Data(values=points)).mark_point(filled=True, size=60, opacity=1, color=WARM)
    pixels = [(WIDTH * p["tokens"] / most, HEIGHT * (1 - p["right"] / 1.04)) for p in points]
    texts = [
        altair.Chart(altair.Data(values=[point]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for point, label in zip(points, place_labels(pixels, [p["variant"] for p in points], WIDTH), strict=True)
    ]
    return altair.layer(dots.encode(x=x, y=y), *texts).properties(width=WIDTH, height=HEIGHT)


def _by_round(altair: Any, rows: Rows) -> Any:
    kinds = {"ttft_s_by_round": "in the run", "cold_ttft_s_by_round": "from a cold start"}
    values = [
        {"variant": row["variant"], "agent_round": number, "ttft": 1e3 * seconds, "kind": kind}
        for row in rows
        for key, kind in kinds.items()
        for number, seconds in row[key].items()
        if seconds is not None
    ]
    color = altair.Color("kind:N", title=None, scale=altair.Scale(domain=[*kinds.values()], range=[WARM, COLD]))
    x = altair.X("agent_round:N", title="round", axis=altair.Axis(labelAngle=0))
    y = altair.Y("ttft:Q", title="TTFT p50, ms")
    base = altair.Chart(altair.Data(values=values)).encode(x=x, y=y, color=color, detail="variant:N")
    last = {value["variant"]: value for value in values if value["kind"] == kinds["ttft_s_by_round"]}
    names = altair.Chart(altair.Data(values=[*last.values()])).mark_text(align="left", dx=7, fontSize=11)
    lines = base.mark_line() + base.mark_point(filled=True, size=40) + names.encode(x=x, y=y, text="variant:N")
    return lines.properties(width=WIDTH, height=HEIGHT)
