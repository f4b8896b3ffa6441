"""Measure an agent: right answers, the cost of each round with a warm prefix cache, and TTFT compared with a cold start
of the same request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from statistics import mean, median
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, field_validator

from compiled_kernels.rounds import interleaved
from workbench.agents.agent import Agent, agent
from workbench.agents.limits import Limits
from workbench.agents.result import AgentResult
from workbench.custom import resolve_path
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults, Workload
from workbench.experiment.variants import described, every_variant
from workbench.experiment.verdict import VariantRows
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import Series, lines
from workbench.figures.points import Point, points
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.prompt.turns import AssistantTurn
from workbench.request import CustomPart, Request
from workbench.runs.metrics import TABLES
from workbench.settings import Count, Settings
from workbench.svg import Axis
from workbench.trace.events import Decoded
from workbench.trace.recorder import Recorder
from workbench.units import Measure, duration, share

TOKENS = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "thinking_tokens")  # numbers of a round
# figures of a question; a row has their means over the questions
MEANS = ("rounds", "calls", *TOKENS, "tools_s", "seconds")
ROUNDS = {"ttft_s_by_round": "in the run", "cold_ttft_s_by_round": "from a cold start"}


class AgentQuestion(Settings):
    """A question to an agent, and the texts that a right answer contains: numbers as whole numbers, other texts word
    for word.

    Without `wanted`, any answer is right."""

    question: Annotated[str, Field(min_length=1)]
    wanted: tuple[str, ...] = ()
    kind: str = ""  # kind of question; right answers are also counted by kind
    system: str | None = None  # system prompt; None: the workload's
    tools: tuple[str, ...] | None = None  # tools, as module:function; None: the workload's

    @field_validator("wanted", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class AgentWorkload(Workload):
    """Ask an agent each question, one after another, and let it call its tools until it answers.

    Questions are listed, or returned as `AgentQuestion` values by a function named like any custom part. The prefix
    cache is empty at the start of each question. With `cold_start` each round's prompt runs once more with an empty
    cache, to measure its TTFT."""

    measures: ClassVar = (
        Measure("questions"),
        share("right"),
        share("right_by_kind_*", "right, {}"),
        share("answered"),
        Measure("rounds_per_question", "rounds", "/question"),
        Measure("calls_per_question", "calls", "/question"),
        Measure("prompt_tokens_per_question", "prompt", "tokens/question"),
        Measure("cached_tokens_per_question", "cached", "tokens/question", "max"),
        Measure("computed_tokens_per_question", "computed", "tokens/question", "min"),
        Measure("output_tokens_per_question", "output", "tokens/question", "min"),
        Measure("thinking_tokens_per_question", "thinking", "tokens/question", "min"),
        duration("later_ttft_s", "TTFT of later rounds"),
        duration("later_cold_ttft_s", "from a cold start"),
        duration("ttft_s_by_round_*", "TTFT of round {}"),
        duration("cold_ttft_s_by_round_*", "cold TTFT of round {}"),
        duration("tools_s_per_question", "tools", "s/question"),
        duration("seconds_per_question", "whole question", "s/question"),
    )
    kind: Literal["agent"] = "agent"
    questions: Annotated[tuple[AgentQuestion, ...], Field(min_length=1)] | CustomPart
    system: str | None = None
    tools: tuple[str, ...] = ()  # tools of all questions, as module:function
    tool_choice: Annotated[str, Field(min_length=1)] = "auto"  # auto, none, required, or the name of one tool
    limits: Limits = Limits()
    cold_start: bool = True
    rounds: Count = 1  # measured rounds of all questions, variants in turn, after a warm-up with the first question

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Ask every variant's agent all questions in interleaved rounds, and return one row for each variant.

        Variants that differ only in sampling and workload share a runner."""
        variants = every_variant(experiment)
        asked = {name: questions_of(cast(AgentWorkload, variant.workload)) for name, variant in variants.items()}
        on_progress = StageCounter(on_progress, len(variants) * (self.rounds + 2))
        same = {"sampling": experiment.sampling, "workload": experiment.workload}
        runners = load_runners(variants, on_progress, same)
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ("questions", "agent_rounds", *TABLES)}
        for turn, name in interleaved(runners, self.rounds, on_progress):
            for number, question in enumerate(asked[name] if turn else asked[name][:1]):
                found = ask(runners[name], variants[name], question, number)
                if turn:
                    marks = {"variant": name, "round": turn, "question": number}
                    tables["questions"].append(marks | _question_row(found))
                    tables["agent_rounds"] += [marks | row for row in _round_rows(found)]
                    for table in TABLES:
                        tables[table] += [marks | row for row in getattr(found.recorder, table)()]
        rows = [_row(experiment, name, runner, tables) for name, runner in runners.items()]
        about = {"questions": {name: len(each) for name, each in asked.items()}, "rounds": self.rounds}
        return VariantResults(rows, about, tables)

    def chart(self, rows: VariantRows, title: str) -> Figure:
        """Draw right answers against generated tokens per question, and TTFT by round, warm and cold."""
        right = points(
            [Point(row["variant"], row["output_tokens_per_question"], row["right"]) for row in rows],
            Axis("generated tokens per question, thinking included"),
            Axis("right answers", percent=True),
            width=380,
            height=280,
            x_zero=True,
            y_zero=True,
        )
        rounds = tuple(dict.fromkeys(str(number) for row in rows for key in ROUNDS for number in row[key]))
        series = [
            Series(
                f"{row['variant']}, {kind}",
                tuple(
                    (float(rounds.index(str(number))), 1e3 * seconds)
                    for number, seconds in row[key].items()
                    if seconds is not None
                ),
            )
            for row in rows
            for key, kind in ROUNDS.items()
        ]
        by_round = lines(series, Axis("round", names=rounds), Axis("TTFT p50, ms"), width=380, height=280)
        return beside([right, by_round], title)


@dataclass(frozen=True)
class Asked:
    """The result of one question: the agent's result, its trace, and TTFT by round."""

    question: AgentQuestion
    result: AgentResult
    is_right: bool
    recorder: Recorder
    requests: tuple[Request, ...]  # requests of the rounds
    ttft: tuple[float | None, ...]  # TTFT of each round in seconds
    # TTFT in seconds of the same requests with an empty prefix cache; None: not measured
    cold_ttft: tuple[float | None, ...]


def questions_of(workload: AgentWorkload) -> tuple[AgentQuestion, ...]:
    """Return the questions listed in the workload, or those that its named function returns (WorkbenchError for other
    values)."""
    given = workload.questions
    if not isinstance(given, CustomPart):
        return given
    found = tuple(resolve_path(given.path)(**given.arguments))
    wrong = next((each for each in found if not isinstance(each, AgentQuestion)), None)
    if wrong is not None or not found:
        what = "no question" if wrong is None else f"a {type(wrong).__name__}"
        raise WorkbenchError(f"workload.questions.path {given.path}: returned {what}, must return AgentQuestion values")
    return found


def ask(runner: Runner, experiment: Experiment, question: AgentQuestion, number: int) -> Asked:
    """Ask one question with an empty prefix cache; then, if cold starts are measured, run each round's request again
    with an empty cache."""
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
    """Yield the request of each round: the conversation before the round's answer."""
    talk = result.conversation
    answers = [place for place, turn in enumerate(talk.turns) if isinstance(turn, AssistantTurn)]
    for place in answers[len(answers) - len(result.rounds) :]:
        before = made.with_thinking(talk.model_copy(update={"turns": talk.turns[:place]}))
        sampling = made.sampling_of(before, made.answer_format(before.tools), made.limits.tokens)
        yield from made.runner.make_requests(made.with_thinking(before), sampling)


def cold_ttft(runner: Runner, request: Request) -> float | None:
    """Return the TTFT of a request in seconds with an empty prefix cache. The request is cancelled after its first
    token.
    """
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
    """Return whether `answer` contains `text` as a whole, not within a longer number or word."""
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
