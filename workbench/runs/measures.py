"""Look up measures by name: measures of requests and steps, and measures that workloads declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache

from workbench.display import format_cell
from workbench.errors import WorkbenchError
from workbench.experiment.workloads import LOADED_MEASURES, built_in_measures
from workbench.runs import metrics
from workbench.units import UNKNOWN, Direction, Measure, format_quantity

# Default measures of a comparison, in this order, as far as the runs have them.
DEFAULT_MEASURES = (
    "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "e2el_s_p50", "seconds", "tokens_per_s", "output_tokens_per_s",
    "goodput_share", "slo_attainment", "kv_bytes_peak", "bytes_per_token", "bits_per_byte", "kl_mean", "same_top",
    "copied", "draft_acceptance_rate", "peak_bytes", "right", "output_tokens_per_question",
    "computed_tokens_per_question", "later_ttft_s", "seconds_per_question",
)  # fmt: skip
MAX_MAIN_MEASURES = 7  # maximum columns of a short table
# Prefixes of a measure's name: for a prediction, or for the steps of a phase.
GROUPS = ("predicted", "prediction", "measured", "roofline", *(f"{of}_{phase}" for of in ("phases", "roofline")
          for phase in metrics.PHASES))  # fmt: skip
RATIO = "measured_over_predicted_"


def measure_of(name: str) -> Measure:
    """Return the declaration of the measure called `name` (heading, unit, direction); if there is none, a measure
    without unit and direction."""
    return find_measure(name) or Measure(canonical_name(name))


def find_measure(name: str) -> Measure | None:
    """Return the declaration of the measure called `name`, by a workload or built in; None if there is none."""
    name = canonical_name(name)
    exact, patterns = _declared(len(LOADED_MEASURES))
    if name in exact:
        return exact[name]
    if name.startswith(RATIO) and (found := find_measure(name.removeprefix(RATIO))):
        return Measure(name, f"{found.heading}, measured / predicted", timed=found.timed)
    for group in GROUPS:
        if name.startswith(f"{group}_") and (found := find_measure(name.removeprefix(f"{group}_"))):
            timed = found.timed and not group.startswith("predict")
            return replace(found, name=name, label=f"{group.replace('_', ' ')} {found.heading}", timed=timed)
    for each in patterns:
        front, _, back = each.name.partition("*")
        if name.startswith(front) and name.endswith(back) and len(name) > len(front + back):
            varying = name[len(front) : len(name) - len(back)]
            return replace(each, name=name, label=each.label.format(varying.replace("_", " ")))
    return None


def own_measures() -> Sequence[str]:
    """Return the names of the measures that loaded user-defined workloads declare."""
    return list(dict.fromkeys(each.name for each in LOADED_MEASURES if each not in built_in_measures()))


def own_measures_of(measures: Sequence[Measure]) -> list[dict[str, object]]:
    """Return the user-defined ones among `measures`, in the form in which a run's summary stores them."""
    return [asdict(each) for each in measures if each not in built_in_measures()]


def learn_measures(summary: Mapping[str, object]) -> None:
    """Register the user-defined measures in a run's summary, unless their names are known. Ignore invalid entries."""
    given = summary.get("measures")
    for values in given if isinstance(given, list) else ():
        try:
            found = Measure(**values)
            fits = all(isinstance(each, str) for each in (found.name, found.label, found.unit))
            fits = fits and found.label.count("{") == found.label.count("{}")
        except (TypeError, ValueError):
            continue
        if fits and find_measure(found.name) is None:
            LOADED_MEASURES.append(found)


@lru_cache(1)
def _declared(loaded: int) -> tuple[Mapping[str, Measure], Sequence[Measure]]:
    """Return the declared measures by name, and the measures with a `*` in their name, longest name first."""
    every = [*metrics.MEASURES, *built_in_measures(), *LOADED_MEASURES[:loaded]]
    patterns = [each for each in every if "*" in each.name]
    return {each.name: each for each in every}, sorted(patterns, key=lambda each: -len(each.name))


def direction(name: str) -> Direction | None:
    """Return whether lower or higher values of a measure are better; None if it has no direction."""
    return measure_of(name).better


def unit(name: str) -> str:
    """Return the unit of a measure; empty for a pure number, `of 1` for a fraction."""
    return measure_of(name).unit


def parse_objective(text: str) -> tuple[str, Direction]:
    """Parse `NAME`, `NAME:min` or `NAME:max` into the measure's name and its direction.

    Raises WorkbenchError if neither the measure nor the suffix gives a direction.
    """
    name, colon, way = text.strip().partition(":")
    found = way if colon else direction(name)
    if found == "min" or found == "max":
        return canonical_name(name), found
    raise WorkbenchError(f"{text!r}: write {name}:min if less of it is better, {name}:max if more")


def depends_on_time(name: str) -> bool:
    """Return whether other processes on the machine may have changed this measure."""
    return measure_of(name).timed


def canonical_name(name: str) -> str:
    """Return the canonical name of a measure, which may be written `ttft_s.p50` or `ttft_s_p50`."""
    return name.strip().replace(".", "_")


def main_measures(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the figures to show in a short table of `rows`: the default measures, or else the first
    figures."""
    held = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_figure(value)))
    return ([name for name in DEFAULT_MEASURES if name in held] or held)[:MAX_MAIN_MEASURES]


def format_measure(name: str, value: object) -> str:
    """Format the value of a measure in its unit: `57.4 ms`, `384 KiB`, `24.8 tokens/s`; – if there is no value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return format_cell(value) or UNKNOWN
    return format_quantity(value, unit(name))


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
