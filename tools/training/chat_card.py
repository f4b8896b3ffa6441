"""Write demo-chat's model card from its measured quality and its training curve, without figures typed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

import workbench
from experiments import chat_draw, chat_phrases
from experiments.chat_conversations import KINDS, SHARES
from tools.training import chat_quality, demo_corpus, demo_quality
from tools.training.demo_card import CURVE_ROWS
from workbench.display import Table
from workbench.runs.folder import write_dated_record

BUDGETS = (0, 16, 64, 256)
RECORDS = Path(__file__).resolve().parents[2] / "experiments" / "records"
MODULES = 24  # bits a byte are of one held-out module in so many


def write(out: Path, work: Path, recipe: Any, count: int, processes: int = 1) -> str:
    """Measure the model in `out`, write a dated record there with `README.md` and `card.json`, and return the verdict.

    Args:
        out: the model's folder.
        work: the folder of the training, with its loss curve.
        recipe: the training's dataclass.
        count: questions of each kind to ask.
        processes: settings measured at once.
    """
    record = chat_quality.measure(out, count, list(KINDS), list(BUDGETS), True, "eager", 3, processes)
    card = {name: value for name, value in record.items() if name != "rows"}
    card["record"] = write_dated_record(record, RECORDS, "chat_quality").name
    runner = workbench.load(str(out), backend="eager")
    card["bits_per_byte"] = demo_quality.bits_per_byte(runner, demo_corpus.held_out_files()[::MODULES])
    target = workbench.load("demo", backend="eager")
    card["target_bits_per_byte"] = demo_quality.bits_per_byte(target, demo_corpus.held_out_files()[::MODULES])
    card["parameters"] = runner.model.spec.num_parameters
    points = [json.loads(line) for line in (work / "curve.jsonl").read_text().splitlines()]
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / "README.md").write_text(_text(card, record["rows"], points, recipe, out))
    return f"goals {'met' if card['met'] else 'missed'}: {json.dumps(card['summary'])}"


def _text(
    card: dict[str, Any], rows: list[dict[str, Any]], points: list[dict[str, Any]], recipe: Any, out: Path
) -> str:
    goals = card["goals"]
    shares = Table(
        "", [(name, *(f"{values[goal]:.1%}" for goal in goals)) for name, values in card["summary"].items()],
        ("", *(f"{goal} (goal {value:.0%})" for goal, value in goals.items())),
    )  # fmt: skip
    stride = -(-len(points) // CURVE_ROWS)
    kept = [*points[::stride], *([] if (len(points) - 1) % stride == 0 else points[-1:])]
    names = ("tokens", "seconds", "tokens_per_second", "training_loss", "held_out_loss", "turns_right")
    curve = Table("", [tuple(str(point[name]) for name in names) for point in kept], names)
    settings = Table("", [(name, str(value)) for name, value in dataclasses.asdict(recipe).items()], ("setting", ""))
    asked = Table("", [(kind, str(share)) for kind, share in SHARES.items()], ("questions", "weight"))
    sides = {side: len(names) for side, names in chat_draw.functions().items()}
    size = (out / "model.safetensors").stat().st_size / 1e6
    return f"""# demo-chat

The demo target ({card["parameters"]:,} parameters, {size:.1f} MB) continued on conversations that a script writes:
system prompts, three tools (a calculator, units, the standard library's documentation), calls in parallel and one after
the other, thoughts before an answer, answers without tools, refusals. It is an instrument for studying inference: it
answers the questions of its script, and nothing else with any claim to sense.

This page is written by `python -m tools.training.train_chat`; its figures are for the files beside it.

## Held-out questions

Other phrases, numbers and functions than in training: about one phrase in {chat_phrases.HELD_OUT_ONE_IN} of each
group, made of words that training has, one number in {chat_draw.HELD_OUT_NUMBER} (from 10 on), and one documented
name in {chat_draw.HELD_OUT_FUNCTION} ({sides["training"]} in training, {sides["held_out"]} held out), each by its
SHA-256. Greedy through the engine in float32, tools really run. Over all questions that tools answer the goals were
{"met" if card["met"] else "missed"}; the record is `experiments/records/{card["record"]}`:

{shares.markdown()}
By kind. A violation is a break of the reply's format; `thinking` is the budget in tokens, 0 without a thought:

{chat_quality.table(rows).markdown()}
Breaks of the format, over all settings; constrained replies keep the agent's grammar:

{chat_quality.violations(rows).markdown()}
On one held-out module of code in {MODULES}: {card["bits_per_byte"]:.4f} bits a byte (the target's:
{card["target_bits_per_byte"]:.4f}).

## Format

`chat_template.jinja` is append-only: an old turn renders as when it was new. `tokenizer.json` has the demo's entries
and cuts digits one by one, and words without the mark before them, so that copying is copying of the same ids.
`workbench/agents/demo_tools.py` has the tools; what they return is the text the model reads.

## Recipe

{settings.markdown()}
Kinds of questions by weight (follow-ups come between; small sums without a calculator are worked out by columns):

{asked.markdown()}
Muon for the matrices inside the blocks, AdamW for embedding and norms. The loss is over what the assistant writes and a
window of code in each step. Conversations are packed whole, none attending to another. Rates rise, stay and fall with
the share of the time used. Weights are not the same in every run: the number of steps depends on the machine. Torch
{torch.__version__}. Licence and data of the code are those of the demo's card.

## Curve

Losses in nats a token; `turns_right` is the share of held-out replies foreseen token by token.

{curve.markdown()}"""
