"""Format the tooltips of a timeline's bars and marks."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.trace.tracks import Moment, Slice, Track
from workbench.widgets.timeline.bars import TimelineBar


def step_tip(bar: TimelineBar) -> str:
    prefill, decode = (sum(step.args[name] for step in bar.slices) for name in ("prefill_tokens", "decode_tokens"))
    first, last = bar.slices[0], bar.slices[-1]
    took = f"{(last.end - first.begin) * 1e3:.2f} ms"
    if len(bar.slices) > 1:
        text = f"{len(bar.slices)} steps, {first.args['step']} to {last.args['step']}: {took}"
        return f"{text}\n{prefill} prefill + {decode} decode tokens"
    args = first.args
    return (
        f"step {args['step']}: {first.name}, {took}\n{args['requests']} requests: {prefill} prefill + {decode} decode "
        f"tokens\n{args['pages_used']} pages used, {args['pages_idle']} idle"
    )


def bar_tip(name: str, bar: TimelineBar, track: Track) -> str:
    each, last = bar.slices[0], bar.slices[-1]
    took = f"{(last.end - each.begin) * 1e3:.2f} ms"
    if len(bar.slices) > 1:
        tokens = sum(s.args.get("tokens", 0) for s in bar.slices)
        many = f"{len(bar.slices)} × {each.name}"
        return f"{name}: {many}" + (f" of {tokens} tokens" if tokens else "") + f", {took}"
    if each.name == "chunk":
        text = f"{name}: prefill chunk of {each.args['tokens']} tokens, up to token {each.args['computed']}, in step "
        text += f"{each.args['step']}, {took}"
        reasons = [m for m in track.moments if m.args.get("step") == each.args["step"]]
    elif each.name == "preempted":
        text, reasons = f"{name}: preempted in step {each.args['step']}, {took}\n{each.args['reason']}", []
    else:
        text = f"{name}: {each.name}, {took}"
        reasons = [m for m in track.moments if each.begin <= m.time <= each.end and each.name == "queue"]
        if each.name == "decode":
            text += f", {len(track.token_times)} tokens"
    return "\n".join([text, *map(describe_decision, reasons[-4:])])


def request_tip(name: str, phases: Sequence[Slice]) -> str:
    if not phases:
        return name
    args, took = phases[0].args, (phases[0].end - phases[0].begin) * 1e3
    text = f"{name}: {took:.2f} ms, {args.get('finish_reason') or 'under way'}"
    counts = (f"{args[key]} {key.replace('_', ' ')}" for key in (
        "prompt_tokens", "output_tokens", "cached_tokens", "computed_tokens", "shared_pages", "num_preemptions")
        if args.get(key))  # fmt: skip
    return "\n".join([text, *counts, *([args["error"]] if args.get("error") else [])])


def describe_decision(moment: Moment) -> str:
    """Describe a scheduling decision: its time and reason."""
    reason = moment.args.get("reason", "")
    return f"step {moment.args.get('step')}: {reason if reason.startswith(moment.name) else f'{moment.name}: {reason}'}"


def bar_text(bar: TimelineBar) -> str:
    """Return the text within a bar."""
    each = bar.slices[0]
    if len(bar.slices) > 1:
        return f"{len(bar.slices)}×"
    return str(each.args["tokens"]) if each.name == "chunk" else each.name
