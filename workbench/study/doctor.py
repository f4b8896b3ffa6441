"""What works on this machine, and why the rest does not."""

from __future__ import annotations

import importlib.util

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compiled_kernels import lane_problems
from workbench.engine.lanes import resolve_lanes
from workbench.engine.load import SHIPPED
from workbench.study.environment import environment

# What each extra brings, and what a person gets by installing it.
EXTRAS = {
    "triton": ("triton", "GPU kernels, their interpreter and their PTX"),
    "iree": ("iree.compiler", "whole steps through IREE"),
    "plots": ("altair", "plots of comparisons"),
    "peers": ("llama_cpp", "other tools to compare with"),
    "lab": ("jupyterlab", "notebooks and widgets"),
    "dev": ("pytest", "the test suite"),
}


def findings() -> dict:
    """Lanes, extras, models and the environment, JSON-ready; null stands where nothing is wrong."""
    auto = resolve_lanes("auto")
    return {
        "lanes": {str(name): problem for name, problem in lane_problems().items()},
        "auto_lane": {"tries": list(dict.fromkeys((auto.decode, auto.blocks))), "reason": auto.reason},
        "extras": {
            extra: None
            if importlib.util.find_spec(module)
            else f"not installed ({what}): pip install 'inference-workbench[{extra}]'"
            for extra, (module, what) in EXTRAS.items()
        },
        "models": {
            name: None if (folder / "model.safetensors").is_file() else "missing: run python -m experiments.train_demo"
            for name, folder in SHIPPED.items()
        },
        "environment": environment(),
    }


def show(found: dict, console: Console) -> None:
    table = Table("what", "name", "state")
    for kind in ("lanes", "extras", "models"):
        for name, problem in found[kind].items():
            table.add_row(kind[:-1], name, Text(problem) if problem else Text("works", style="green"))
    console.print(table)
    surroundings = found["environment"]
    first, *others = found["auto_lane"]["tries"]
    if others:
        told = f"tries {first} and {', '.join(others)} on each model's decode step and takes the quickest that is right"
    else:
        told = f"is {first} here ({found['auto_lane']['reason']})"
    console.print(Text(f"lane auto {told}"))
    console.print(
        Text(
            f"Python {surroundings['python']}, torch {surroundings['packages']['torch']}, "
            f"{surroundings['cpu']['model']}, {surroundings['threads']['torch']} threads"
        )
    )
