"""Judge demo-chat on held-out conversations: `python -m tools.training.chat_quality [FOLDER] [--out DIR]`.

Greedy through the engine, tools really run, rounds until an answer. A question counts as right in

    tool       each round calls the tools it should, and none where none is needed
    arguments  these calls ask for the same (the same value of an expression from the same numbers, the same units)
    answer     the final text holds the result, as a whole number or word for word

Follow-up questions are asked after the model's own first answer. Every break of the format is counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import workbench
from experiments.chat_conversations import KINDS, NO_CALLS, ChatSample, draw
from experiments.chat_exchanges import TOOLS, Call, Exchange
from experiments.chat_format import CHAT
from tools.training.chat_rounds import Reply, ask, start
from workbench.agents.demo_tools import UNITS
from workbench.display import Table
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.measure.agent import holds
from workbench.runs.folder import write_dated_record

BATCH = 32  # conversations at a time
GOALS = {"tool": 0.95, "arguments": 0.95, "answer": 0.90}  # of the questions that tools answer


@dataclass
class Score:
    """Counts over the questions of one kind in one setting: right tools, arguments and answers, tokens, and breaks of
    the format."""

    kind: str
    budget: int
    constrained: bool
    asked: int = 0
    tool: int = 0
    arguments: int = 0
    answer: int = 0
    tokens: int = 0
    thought_tokens: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    misses: list[dict[str, Any]] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        """Return the counts as JSON values. (`asdict` would convert the keys of a Counter wrongly.)"""
        return {**vars(self), "violations": dict(self.violations)}

    def add(self, exchange: Exchange, reply: Reply) -> None:
        """Count one question, and keep the reply if anything in it is wrong."""
        tool = [Counter(call.name for call in calls) for calls in reply.rounds] == [
            Counter(call.name for call in calls) for calls in exchange.rounds
        ]
        arguments = tool and all(
            sorted(map(meaning, said)) == sorted(map(meaning, wanted))
            for said, wanted in zip(reply.rounds, exchange.rounds, strict=True)
        )
        answer = all(holds(reply.answer, text) for text in exchange.wanted)
        if exchange.kind in ("talk", "refused", "no_tool"):
            answer = reply.answer == exchange.answer
        self.asked += 1
        self.tool += tool
        self.arguments += arguments
        self.answer += answer
        self.tokens += reply.tokens
        self.thought_tokens += reply.thought_tokens
        self.violations += reply.violations
        if not (tool and arguments and answer):
            calls = [[(call.name, call.arguments) for call in calls] for calls in reply.rounds]
            self.misses.append(
                {"question": exchange.question, "calls": calls, "answer": reply.answer, "wanted": exchange.answer,
                 "thoughts": reply.thoughts}
            )  # fmt: skip


def meaning(call: Call) -> str:
    """Return a text that is equal for calls that ask for the same, and so have the same result for the same reason."""
    if call.name == "calculate":
        numbers = sorted(re.findall(r"\d+(?:\.\d+)?", call.arguments["expression"]))
        return f"calculate {call.result} {numbers}"
    if call.name == "convert":
        units = [UNITS.get(call.arguments[name], ("", call.arguments[name]))[1] for name in ("unit", "to")]
        return f"convert {float(call.arguments['value'])} {units}"
    return f"lookup {call.arguments['name']}"


def evaluate(runner: Runner, kind: str, count: int, budget: int, constrained: bool) -> Score:
    """Ask `count` held-out questions of a kind, with at most `budget` tokens per thought (0: no thoughts), and return
    the score."""
    score = Score(kind, budget, constrained)
    for first in range(0, count, BATCH):
        samples = [draw("held_out", seed, kind, budget > 0) for seed in range(first, min(count, first + BATCH))]
        chats = [
            start(runner, each.system, [TOOLS[name] for name in each.tools], budget, constrained) for each in samples
        ]
        for number in range(max(len(sample.exchanges) for sample in samples)):
            pairs = [pair for pair in zip(samples, chats, strict=True) if number < len(pair[0].exchanges)]
            exchanges = [sample.exchanges[number] for sample, _ in pairs]
            ask(runner, [chat for _, chat in pairs], [each.question for each in exchanges])
            for (sample, chat), exchange in zip(pairs, exchanges, strict=True):
                if _is_judged(sample, number):
                    score.add(exchange, chat.reply)
    return score


def _is_judged(sample: ChatSample, number: int) -> bool:
    """Return whether a question is of the kind asked for: of a follow-up only what follows, else the first."""
    return number == 1 if sample.exchanges[-1].kind == "follow_up" else number == 0


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of a record as a table, in percent of the questions asked."""

    def percent(row: dict[str, Any], name: str) -> str:
        return f"{100 * row[name] / max(1, row['asked']):.0f}"

    cells = [
        (row["kind"], str(row["budget"]), "yes" if row["constrained"] else "no", str(row["asked"]),
         percent(row, "tool"), percent(row, "arguments") if row["kind"] not in NO_CALLS else "", percent(row, "answer"),
         str(sum(row["violations"].values())), f"{row['tokens'] / max(1, row['asked']):.0f}",
         f"{row['thought_tokens'] / max(1, row['asked']):.0f}")
        for row in rows
    ]  # fmt: skip
    columns = (
        "questions", "thinking", "constrained", "asked", "tool %", "arguments %", "answer %", "violations", "tokens",
        "thought",
    )  # fmt: skip
    return Table("demo-chat, held-out questions", cells, columns)


def summary(scores: list[Score]) -> dict[str, dict[str, float]]:
    """Return the fractions of right tools, arguments and answers over all questions that need tools, by setting."""
    found: dict[str, dict[str, float]] = {}
    for setting in sorted({(score.budget, score.constrained) for score in scores}):
        with_tools = [s for s in scores if (s.budget, s.constrained) == setting and s.kind not in NO_CALLS]
        if asked := sum(score.asked for score in with_tools):
            shares = {name: sum(getattr(score, name) for score in with_tools) / asked for name in GOALS}
            found[f"thinking {setting[0]}{', constrained' if setting[1] else ''}"] = shares
    return found


def violations(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the breaks of the format by kind, counted without and with the grammar."""
    found = {grammar: Counter[str]() for grammar in (False, True)}
    for row in rows:
        found[row["constrained"]] += Counter(row["violations"])
    asked = {grammar: sum(row["asked"] for row in rows if row["constrained"] == grammar) for grammar in found}
    kinds = sorted(found[False] | found[True])
    cells = [(kind, *(str(found[grammar][kind]) for grammar in found)) for kind in kinds]
    cells.append(("in so many questions", *(str(asked[grammar]) for grammar in found)))
    return Table("", cells, ("break of the format", "free", "constrained"))


def measure_setting(
    folder: Path, count: int, kinds: Sequence[str], budget: int, constrained: bool, backend: str, misses: int
) -> list[Score]:
    """Ask `count` held-out questions of each kind in one setting, and return the scores; each keeps up to `misses`
    wrong replies."""
    runner = workbench.load(
        str(folder), backend=backend, dtype="float32", prefix="radix", page_size=16, max_num_seqs=BATCH
    )
    began, scores = time.monotonic(), []
    for kind in kinds:
        scores.append(evaluate(runner, kind, count, budget, constrained))
        scores[-1].misses = scores[-1].misses[:misses]
        setting = f"thinking {budget}{', constrained' if constrained else ''}"
        print(f"{kind}, {setting}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return scores


def measure(
    folder: Path,
    count: int,
    kinds: list[str],
    budgets: list[int],
    constrained: bool,
    backend: str,
    misses: int,
    processes: int = 1,
) -> dict[str, Any]:
    """Ask `count` held-out questions of each kind in each setting, with `processes` processes, and return the
    record."""
    settings = [(budget, grammar) for grammar in ((False, True) if constrained else (False,)) for budget in budgets]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        work = [
            pool.submit(measure_setting, folder, count, kinds, budget, grammar, backend, misses)
            for budget, grammar in settings
        ]
        scores = [score for each in work for score in each.result()]
    shares = summary(scores)
    met = bool(shares) and all(values[name] >= goal for values in shares.values() for name, goal in GOALS.items())
    return {
        "experiment": "chat_quality", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(), "backend": backend, "goals": GOALS, "met": met, "summary": shares,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "rows": [score.as_row() for score in scores],
    }  # fmt: skip


def main(
    folder: Annotated[Path, typer.Argument(help="the model's folder")] = CHAT,
    count: Annotated[int, typer.Option(help="questions of each kind")] = 50,
    kinds: Annotated[str, typer.Option(help="some kinds, separated by commas")] = ",".join(KINDS),
    budgets: Annotated[str, typer.Option(help="budgets of thoughts, in tokens")] = "0,16,64,256",
    constrained: Annotated[bool, typer.Option(help="measure again with the grammar of replies")] = False,
    processes: Annotated[int, typer.Option(help="settings measured at once")] = 1,
    backend: Annotated[str, typer.Option(help="eager, inductor or mlir")] = "eager",
    misses: Annotated[int, typer.Option(help="misses of each row to print and to keep")] = 3,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Ask held-out questions, print the table, and report whether the goals are met."""
    budget_list = [int(budget) for budget in budgets.split(",")]
    record = measure(folder, count, kinds.split(","), budget_list, constrained, backend, misses, processes)
    Console(width=140).print(table(record["rows"]).text())
    Console(width=140).print(violations(record["rows"]).text())
    for row in record["rows"]:
        for miss in row["misses"]:
            print(f"{row['kind']}, thinking {row['budget']}: {json.dumps(miss)}")
    for setting, values in record["summary"].items():
        print(setting, {name: f"{value:.1%}" for name, value in values.items()})
    print(f"goals {GOALS}: {'met' if record['met'] else 'missed'}")
    if out is not None:
        print(write_dated_record(record, out, "chat_quality"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
