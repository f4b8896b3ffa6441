"""Turn the visible slices of a run's tracks into bars in pixels, merge neighbours below one pixel, and format the
tooltips of bars and marks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from workbench.svg import Scale
from workbench.trace.slices import Moment, Slice, Track
from workbench.trace.tracks import Tracks
from workbench.units import format_seconds

AGENT_FIGURES = (
    "tool", "arguments", "result", "error", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens",
)  # fmt: skip
MERGE_PIXELS = 4.0  # decisions at a smaller distance share one mark


class TimelineBar(NamedTuple):
    """A bar that begins at pixel `x` and is `wide` pixels wide. It stands for one slice, or for several `slices` that
    are narrower than a pixel."""

    x: float
    wide: float
    slices: Sequence[Slice]


def merge_slices(slices: Iterable[Slice], across: Scale) -> Iterator[TimelineBar]:
    """Yield bars for the visible slices of one kind, which are in order of time and do not overlap."""
    low, high = across.low, across.high
    x = end = 0.0
    group: list[Slice] = []
    for each in slices:
        if each.end < low or each.begin > high:
            continue
        left, right = across(max(each.begin, low)), across(min(each.end, high))
        if group and right - x <= 1 and left - end <= 1:
            group.append(each)
            end = max(end, right)
            continue
        if group:
            yield TimelineBar(x, end - x, group)
        x, end, group = left, right, [each]
    if group:
        yield TimelineBar(x, end - x, group)


def merge_steps(tracks: Tracks, across: Scale) -> list[TimelineBar]:
    """Return the visible steps as bars; steps that begin within one pixel share a bar."""
    begins = np.array(tracks.step_times)  # a copy, because an array with an open buffer cannot grow
    first, last = visible_range(begins, across)
    oldest = int(np.searchsorted(begins, across.low - 2 * tracks.longest_step))  # twice, as differences are rounded
    under_way = [each for each in tracks.steps[oldest:first] if each.end >= across.low]
    seen = [*under_way, *tracks.steps[first:last]]
    if not seen:
        return []
    scale = (across.end - across.begin) / (across.high - across.low)
    pixels = np.floor((begins[first - len(under_way) : last].clip(across.low) - across.low) * scale)
    edges = [0, *(np.flatnonzero(np.diff(pixels)) + 1).tolist(), len(seen)]
    out = []
    for low, high in zip(edges, edges[1:], strict=False):
        group = seen[low:high]
        x = across(max(group[0].begin, across.low))
        end = across(min(max(each.end for each in group), across.high))
        out.append(TimelineBar(x, end - x, group))
    return out


def merge_moments(moments: Iterable[Moment], across: Scale) -> Iterator[tuple[float, list[Moment]]]:
    """Yield (pixel, moments) of the visible moments; those within `MERGE_PIXELS` of each other form one group."""
    x, group = 0.0, []
    for each in moments:
        if not across.low <= each.time <= across.high:
            continue
        at = across(each.time)
        if group and at - x < MERGE_PIXELS:
            group.append(each)
            continue
        if group:
            yield x, group
        x, group = at, [each]
    if group:
        yield x, group


def visible_range(times: array[float] | np.ndarray, across: Scale) -> tuple[int, int]:
    """Return the first index and the index after the last of the ascending `times` that are visible."""
    known = np.array(times)
    return int(np.searchsorted(known, across.low)), int(np.searchsorted(known, across.high, "right"))


def step_tip(bar: TimelineBar) -> str:
    prefill, decode = (sum(step.args[name] for step in bar.slices) for name in ("prefill_tokens", "decode_tokens"))
    first, last = bar.slices[0], bar.slices[-1]
    took = format_seconds(max(each.end for each in bar.slices) - first.begin)
    if len(bar.slices) > 1:
        text = f"{len(bar.slices)} steps, {first.args['step']} to {last.args['step']}: {took}"
        return f"{text}\n{prefill} prefill + {decode} decode tokens"
    args = first.args
    requests = "1 request" if args["requests"] == 1 else f"{args['requests']} requests"
    return (
        f"step {args['step']}: {first.name}, {took}\n{requests}: {prefill} prefill + {decode} decode "
        f"tokens\n{args['pages_used']} pages used, {args['pages_idle']} idle"
    )


def bar_tip(name: str, bar: TimelineBar, track: Track) -> str:
    each, last = bar.slices[0], bar.slices[-1]
    took = format_seconds(last.end - each.begin)
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
        text += "".join(f"\n{key.replace('_', ' ')}: {each.args[key]}" for key in AGENT_FIGURES if key in each.args)
    return "\n".join([text, *map(describe_decision, reasons[-4:])])


def request_tip(name: str, phases: Sequence[Slice]) -> str:
    if not phases:
        return name
    args, took = phases[0].args, format_seconds(phases[0].end - phases[0].begin)
    text = f"{name}: {took}, {args.get('finish_reason') or 'under way'}"
    counts = (f"{args[key]} {key.replace('_', ' ')}" for key in (
        "prompt_tokens", "output_tokens", "cached_tokens", "computed_tokens", "shared_pages", "num_preemptions")
        if args.get(key))  # fmt: skip
    return "\n".join([text, *counts, *([args["error"]] if args.get("error") else [])])


def describe_decision(moment: Moment) -> str:
    """Describe a decision of a scheduler or a fleet: its step or replica, and its reason."""
    step, replica, reason = (moment.args.get(name) for name in ("step", "replica", "reason"))
    words = str(reason) if str(reason).startswith(moment.name) else f"{moment.name}: {reason}"
    return f"replica {replica}: {words}" if step is None and replica is not None else f"step {step}: {words}"


def bar_text(bar: TimelineBar) -> str:
    """Return the label that is drawn within a bar."""
    each = bar.slices[0]
    if len(bar.slices) > 1:
        return f"{len(bar.slices)}×"
    if each.name == "call":
        return each.args["tool"]
    return str(each.args["tokens"]) if each.name == "chunk" else each.name
