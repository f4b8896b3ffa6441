"""Step times fitted to recorded steps by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.fleet.work import TICKS_PER_SECOND, LinearCost, AttentionReach, StepTimeModel

REQUIRED_COLUMNS = ("time", "wall_seconds", "prefill_tokens", "decode_tokens", "context_tokens")
MIN_STEPS = 20  # steps
MAX_GAP_SECONDS = 2e-3  # longer gaps between steps, in seconds, are idle time


def fit_step_times(steps: Sequence[Mapping[str, Any]], where: str = "steps") -> StepTimeModel:
    """Fit step times to the rows of a steps.parquet.

    Finds nonnegative seconds a step, a prefill token, a decoded token and a position read, with the least relative
    errors. The time between a step and the next belongs to the step.

    Args:
        steps: Rows with `time`, `wall_seconds`, `prefill_tokens`, `decode_tokens`, `context_tokens`.
        where: Name of the rows in error messages.

    Raises:
        WorkbenchError: For too few rows, or rows without these columns.
    """
    import numpy

    missing = [name for name in REQUIRED_COLUMNS if not steps or steps[0].get(name) is None]
    if missing or len(steps) < MIN_STEPS:
        lack = f"lacks {', '.join(missing)}" if steps and missing else f"has {len(steps)} steps, {MIN_STEPS} are needed"
        raise WorkbenchError(f"{where}: {lack}; run a real experiment with this version, and name its run folder")
    features = numpy.array([_features(step) for step in steps], dtype=float)
    seconds = numpy.array(_seconds(steps))
    known = (seconds > 0) & (features[:, 1:3].sum(axis=1) > 0)
    scaled, kept = features[known] / seconds[known, None], list(range(features.shape[1]))
    while True:
        found = numpy.linalg.lstsq(scaled[:, kept], numpy.ones(len(scaled)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(kept[int(found.argmin())])
    ticks = dict.fromkeys(range(features.shape[1]), 0)
    ticks.update({column: round(float(value) * TICKS_PER_SECOND) for column, value in zip(kept, found, strict=True)})
    form = LinearCost(ticks[0], ticks[1], ticks[2], positions_read=(ticks[3],))
    return StepTimeModel(f"fitted to {len(scaled)} steps of {where}", (AttentionReach(None, 0),), (form,))


def _features(step: Mapping[str, Any]) -> tuple[int, int, int, int]:
    return 1, step["prefill_tokens"], step["decode_tokens"], step["context_tokens"]


def _seconds(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of each step from the end of the one before, where it followed at once."""
    seconds, before = [], None
    for step in steps:
        pause = step["time"] - step["wall_seconds"] - before if before is not None else MAX_GAP_SECONDS
        seconds.append(step["wall_seconds"] + (pause if 0 <= pause < MAX_GAP_SECONDS else 0.0))
        before = step["time"]
    return seconds
