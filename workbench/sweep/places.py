"""Where points run: what a place promises, and how it starts a worker.

A place knows folders and processes, nothing of experiments. A worker is `python -m workbench.sweep.carry_out
FOLDER/point.json`, which leaves its run folder and `outcome.json` in the point's folder; what a worker writes to its
output belongs into the point's `log.txt`. Two workers on one point do no harm: the second waits and finds it done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from workbench.sweep.point import POINT
from workbench.sweep.settings import LocalPart, PlaceSetting, RayPart, SlurmPart

ROOT = Path(__file__).resolve().parents[2]  # a checkout that is not installed can be imported from here


class Place(Protocol):
    """Something that has workers."""

    def run(self, points: Sequence[Path], ended: Callable[[Path], None]) -> None:
        """Have a worker carry out each of `points` (folders of points), beginning in this order.

        `ended` is told each folder whose worker has ended, from the thread that called; its outcome is then there, or
        is not, where the worker died. Whether it runs again is not for the place to say. Points that it never tells
        of may still be under way elsewhere when this returns. Where an exception leaves (Ctrl-C), workers on this
        machine have ended.
        """
        ...


def worker_command(point: Path) -> list[str]:
    """What carries out the point whose folder this is, in a fresh process."""
    return [sys.executable, "-m", "workbench.sweep.carry_out", str(point / POINT)]


def worker_environment() -> dict[str, str]:
    """This process's, with the workbench to be found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def place_from(setting: PlaceSetting) -> Place:
    """The place that a setting describes; what it needs is imported here."""
    match setting:
        case LocalPart():
            from workbench.sweep.local import LocalPlace

            return LocalPlace(setting)
        case RayPart():
            from workbench.sweep.ray import RayPlace

            return RayPlace(setting)
        case SlurmPart():
            from workbench.sweep.slurm import SlurmPlace

            return SlurmPlace(setting)
