"""Properties of a measure that follow from its name: its better direction, its unit, whether contention changes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from workbench.display import format_cell
from workbench.errors import WorkbenchError
from workbench.svg import format_seconds

Direction = Literal["min", "max"]
# Shown by a comparison that names no measure, in this order, where runs have them.
DEFAULT_MEASURES = (
    "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "e2el_s_p50", "seconds", "tokens_per_s", "output_tokens_per_s",
    "goodput_share", "slo_attainment", "kv_bytes_peak", "bytes_per_token", "bits_per_byte", "kl_mean", "same_top",
    "copied", "draft_acceptance_rate", "peak_bytes", "right", "output_tokens_per_question",
    "computed_tokens_per_question", "later_ttft_s", "seconds_per_question",
)  # fmt: skip
MAX_MAIN_MEASURES = 7  # columns of a short table
BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
HIGHER_IS_BETTER = re.compile(
    r"per_s(_|$)"
    r"|^(same|greedy_equal|copied|copy_gain|goodput|slo_attainment|first_divergence|sequences|cache_hit|speed_up|cached)"
    r"|^(right|answered)"
    r"|share_of_|acceptance|speedup|predicted_speed_up"
)
LOWER_IS_BETTER = re.compile(
    r"(_|^)(s|ms|seconds)(_|$)|bytes|^kl_|bits_per|waste|^price|num_preemptions|compiles|varying|parted|diverged|pages_used|memory"
    r"|(computed|output|thinking)_tokens_per_question"
)
TIME_DEPENDENT = re.compile(
    r"(_|^)(s|ms|seconds)(_|$)|goodput|slo_attainment|^price|share_of_(roofline|read|gemm|ceiling)|speed"
)

# A name says its unit: the first pattern that is found in it has it.
UNITS = tuple((re.compile(pattern), unit) for pattern, unit in (
    (r"(_|^)ratio(_|$)", ""),
    (r"(_|^)share(_|$)|attainment|acceptance_rate|^(same_top|copied|right|answered)(_|$)", "of 1"),
    (r"tokens_per_s(_|$)", "tokens/s"), (r"bytes_per_s(_|$)", "bytes/s"), (r"flops_per_s(_|$)", "FLOP/s"),
    (r"requests_per_s(_|$)", "requests/s"), (r"bytes_per_token", "bytes/token"), (r"bits_per_byte", "bits/byte"),
    (r"seconds_per_question", "s/question"), (r"tokens_per_question", "tokens/question"),
    (r"(_|^)ms(_|$)", "ms"), (r"(_|^)(s|seconds)(_|$)", "s"), (r"^kl_", "nats"), (r"^copy_gain", "nats/token"),
    (r"(_|^)bytes(_|$)", "bytes"), (r"(_|^)flops(_|$)", "FLOPs"), (r"(_|^)tokens(_|$)", "tokens"),
))  # fmt: skip


def direction(name: str) -> Direction | None:
    """Return the better direction, or None where the name does not tell."""
    return "max" if HIGHER_IS_BETTER.search(name) else "min" if LOWER_IS_BETTER.search(name) else None


def unit(name: str) -> str:
    """Return the unit of a measure; empty where the name does not tell. A share is `of 1`."""
    return next((found for pattern, found in UNITS if pattern.search(name)), "")


def parse_objective(text: str) -> tuple[str, Direction]:
    """Parse `NAME`, `NAME:min` or `NAME:max`.

    WorkbenchError where neither the name nor the suffix gives a direction.
    """
    name, colon, way = text.strip().partition(":")
    found = way if colon else direction(canonical_name(name))
    if found == "min" or found == "max":
        return canonical_name(name), found
    raise WorkbenchError(f"{text!r}: write {name}:min if less of it is better, {name}:max if more")


def depends_on_time(name: str) -> bool:
    """Return whether other processes on the machine may have changed this measure."""
    return TIME_DEPENDENT.search(name) is not None


def canonical_name(name: str) -> str:
    """Return the canonical name of a measure that may be written `ttft_s.p50` or `ttft_s_p50`."""
    return name.strip().replace(".", "_")


def main_measures(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the figures that a short table of `rows` shows: the usual ones, else the first there are."""
    held = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_figure(value)))
    return ([name for name in DEFAULT_MEASURES if name in held] or held)[:MAX_MAIN_MEASURES]


def format_measure(name: str, value: object) -> str:
    """Format a figure with the unit that its name tells: `57.4 ms`, `384 KiB`, `24.8 /s`; – where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    kind, slash, per = unit(name).partition("/")
    if per == "s":
        return f"{value:.4g} /s"
    if kind == "s":
        return format_seconds(value) + slash + per
    if kind == "ms":
        return f"{value:.4g} ms"
    if kind == "bytes":
        scale, prefixed = next(((n, prefixed) for prefixed, n in BYTE_UNITS if value >= n), (1, "B"))
        return f"{value / scale:.4g} {prefixed}{slash}{per}"
    return format_cell(float(value))


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
