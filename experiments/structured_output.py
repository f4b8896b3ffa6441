"""Answer under 300 JSON schemas, and time the constraints: `python -m experiments.structured_output [--out
experiments/records]`.

The schemas are drawn from a seed (experiments/random_schemas.py). The demo model answers each greedily and at
temperature 1, within the fewest tokens that any answer needs and up to 120 more, in batches beside free requests; each
answer is held against its schema by `jsonschema`. The same prompts without a grammar say what the constraint adds.

Cost: decode steps of `shape:smollm2-135m` at batch 16, free and constrained in turn, since machines drift. Masks are
computed beside the forward pass. Taking the tokens and searching for the ends of answers follow it, in the way
of the next step: its processor time is measured in each step of both parts. The rules, written before the run: every
answer is valid, and a constrained step takes at most 5% longer than a free one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer
from rich.console import Console

from experiments.demo_tokenizer import train
from experiments.random_schemas import KINDS, draw_schema
from workbench import load
from workbench.constrained.grammar import GrammarVocabulary
from workbench.display import Table
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, is_contended, others_cpu_share
from workbench.measure.quality.held_out import held_out_modules
from workbench.progress import discard
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters
from workbench.response_format import JSONSchema
from workbench.runs.folder import write_dated_record
from workbench.trace.events import Finished, Stepped

PROMPT = "# An answer as JSON:\n"
MAX_COST = 0.05
BATCH, STEPS = 16, 24
REPORT = {
    "type": "object",
    "properties": {
        "title": {"type": "string"}, "notes": {"type": "string"}, "level": {"enum": ["low", "middle", "high"]},
        "tags": {"type": "array", "items": {"type": "string"}}, "count": {"type": "integer", "minimum": 0},
    },
    "required": ["title", "notes", "level", "tags", "count"],
}  # fmt: skip


def is_valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def answer_schemas(
    runner: Runner, count: int, progress: Callable[[str], object]
) -> tuple[dict[str, Counter[str]], dict[str, Any]]:
    """Answer `count` drawn schemas, and check every answer.

    Returns:
        Counts of answers by kind of schema (valid, bad, refused, the causes of their ends, valid when free), and the
        times in ms that constraints take after each forward pass.
    """
    times: list[float] = []
    assert runner.tokenizer is not None
    vocabulary, ids = GrammarVocabulary(runner.tokenizer), tuple(runner.tokenizer.encode(PROMPT))
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for first in range(0, count, BATCH):
        requests: list[Request] = []
        for seed in range(first, min(first + BATCH, count)):
            form = JSONSchema(json_schema=draw_schema(seed)[1])
            spelt = vocabulary.speller.spell(vocabulary.compile(form).shortest)
            most = len(spelt or ()) + (0, 1, 5, 20, 60, 120)[seed // len(KINDS) % 6]
            for temperature in (0.0, 1.0):
                usual: dict[str, Any] = {"max_tokens": most, "temperature": temperature, "seed": seed}
                name = f"{seed} {temperature}"
                requests.append(Request(name, ids, SamplingParameters(response_format=form, **usual)))
                requests.append(Request(f"free {name}", ids, SamplingParameters(**usual)))
        ends: dict[str, Finished] = {}
        for event in runner.stream(requests):
            if isinstance(event, Finished):
                ends[event.request_id] = event
            elif isinstance(event, Stepped):
                times.append(1e3 * runner.core.decoder.sampler.constraint_seconds)
        for name, end in ends.items():
            kind, schema = draw_schema(int(name.split()[-2]))
            if name.startswith("free"):
                found[kind]["valid when free"] += is_valid(end.output_text, schema)
                continue
            verdict = "refused" if end.reason == "refused" else "valid" if is_valid(end.output_text, schema) else "bad"
            found[kind].update((verdict, "answers", end.ended_by))
            found[kind]["tokens"] += len(end.token_ids)
            if verdict != "valid":
                progress(f"{verdict}: {json.dumps(schema)}: {end.output_text!r} {end.error}")
        progress(f"answered {min(first + BATCH, count)} of {count}")
    return dict(found), quantiles(times)


def quantiles(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    place = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {"steps": len(times)} | {name: ordered[round(at * (len(times) - 1))] for name, at in place.items()}


def decode_times(runner: Runner, constrained: bool, number: int) -> tuple[list[Stepped], list[float], list[float]]:
    """Return the decode steps of a full batch, and for each step two times in ms: computing the masks in their thread,
    and applying constraints after the forward pass."""
    form = JSONSchema(json_schema=REPORT) if constrained else None
    assert runner.tokenizer is not None
    ids = tuple(runner.tokenizer.encode(PROMPT))
    requests = [
        Request(
            f"{number} {each}", ids,
            SamplingParameters(response_format=form, max_tokens=STEPS + 40, seed=each, ignore_eos=True),
        )
        for each in range(BATCH)
    ]  # fmt: skip
    steps: list[Stepped] = []
    masks: list[float] = []
    taking: list[float] = []
    sampler = runner.core.decoder.sampler
    for event in runner.stream(requests):
        if isinstance(event, Stepped) and event.phase == "decode" and event.requests == BATCH:
            steps.append(event)
            masks.append(1e3 * sampler.masks.seconds)
            taking.append(1e3 * sampler.constraint_seconds)
            if len(steps) == STEPS:
                break
    return steps, masks, taking


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """Train a tokenizer on held-out modules, and add numbered words until it has `vocab_size` entries."""
    inner = train(held_out_modules().texts.values(), min(vocab_size, 16_384))
    missing = vocab_size - inner.get_vocab_size()
    inner.add_tokens([f"word{number}" for number in range(missing)])
    return Tokenizer(inner)


def measure_cost(model: str, rounds: int, progress: Callable[[str], object]) -> dict[str, Any]:
    """Return the median times in ms of free and constrained decode steps, run in turn, and their ratio in each
    round."""
    bare = load(model, report=discard)
    tokenizer = tokenizer_of(bare.model.spec.vocab_size)
    progress(f"a vocabulary of {tokenizer.vocab_size} tokens for {model}")
    runner = Runner(bare.config, LoadedModel(bare.model, tokenizer, bare.core.backends))
    wall: dict[str, list[float]] = {"free": [], "constrained": []}
    beside: dict[str, list[float]] = {"free": [], "constrained": []}
    masks: list[float] = []
    taking: list[float] = []
    ratios: list[float] = []
    for constrained in (False, True):
        decode_times(runner, constrained, -1)  # compiles
    before = cpu_times()
    for number in range(rounds):
        medians = {}
        for name in ("free", "constrained") if number % 2 == 0 else ("constrained", "free"):
            steps, beside_forward, after_forward = decode_times(runner, name == "constrained", number)
            wall[name] += [1e3 * each.wall_seconds for each in steps]
            beside[name] += [1e3 * (each.wall_seconds - each.forward_seconds) for each in steps]
            medians[name] = statistics.median(each.wall_seconds for each in steps)
            if name == "constrained":
                masks += beside_forward
                taking += after_forward
        ratios.append(medians["constrained"] / medians["free"])
        progress(f"round {number + 1}: {ratios[-1]:.3f}")
    return {
        "model": model, "vocabulary": tokenizer.vocab_size, "batch": BATCH, "rounds": rounds,
        "step_ms": {name: statistics.median(each) for name, each in wall.items()},
        "beside_the_forward_pass_ms": {name: statistics.median(each) for name, each in beside.items()},
        "masks_in_their_thread_ms": quantiles(masks), "constraints_after_the_forward_pass_ms": quantiles(taking),
        "ratios": ratios, "ratio": statistics.median(ratios), "allowed": 1 + MAX_COST,
        "others_cpu_share": (others := others_cpu_share(before)), "is_contended": is_contended(others),
    }  # fmt: skip


def table(found: dict[str, Counter[str]]) -> Table:
    columns = ("answers", "valid", "bad", "refused", "grammar", "eos", "max_tokens", "valid when free", "tokens")
    total = sum(found.values(), Counter())
    rows = [
        [kind, *(str(counts[each]) for each in columns)] for kind, counts in [*sorted(found.items()), ("all", total)]
    ]
    heads = ("kind", *columns[:4], "ended: complete", "end token", "limit", *columns[7:])
    return Table("Answers by kind of schema", rows, heads)


def main(
    schemas: Annotated[int, typer.Option(help="number of schemas")] = 300,
    rounds: Annotated[int, typer.Option(help="rounds of timing; 0 leaves it out")] = 9,
    model: Annotated[str, typer.Option(help="model of the timing")] = "shape:smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="the record on standard output")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Answer drawn schemas, check every answer, and time decode steps with and without a grammar."""
    date = datetime.now(UTC).isoformat(timespec="seconds")

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found, taking = answer_schemas(load("demo", report=discard), schemas, progress)
    cost = measure_cost(model, rounds, progress) if rounds else {}
    total = sum(found.values(), Counter())
    verdict = {
        "schemas": schemas, "answers": total["answers"], "valid": total["valid"],
        "every_answer_is_valid": total["valid"] == total["answers"] > 0,
        "cost_holds": cost["ratio"] <= cost["allowed"] if cost else None,
    }  # fmt: skip
    record = {
        "experiment": "structured_output", "date": date, "environment": environment(), "verdict": verdict,
        "kinds": {kind: dict(counts) for kind, counts in found.items()},
        "constraints_after_the_forward_pass_ms": taking, "cost": cost,
    }  # fmt: skip
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        Console(width=140).print(table(found).text())
        print("constraints after the forward pass, ms:", json.dumps(taking))
        if cost:
            print(json.dumps({name: value for name, value in cost.items() if name != "ratios"}, indent=2))
    if out is not None:
        print(write_dated_record(record, out, "structured_output"), file=sys.stderr)
    raise typer.Exit(0 if verdict["every_answer_is_valid"] and verdict["cost_holds"] is not False else 1)


if __name__ == "__main__":
    typer.run(main)
