"""What works on this machine, and why the rest does not."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compiled_kernels import lane_problems
from workbench.engine.lanes import resolve_lanes
from workbench.engine.load import SHIPPED
from workbench.engine.trial import remembered_trials
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
TOLD = (
    "model", "weights", "cache", "unit", "threads", "cpu", "chosen", "seconds", "refused", "untried", "date", "valid",
)  # fmt: skip


def findings() -> dict:
    """Lanes, what `auto` chose and would try, extras, models and the environment, JSON-ready; null stands where nothing
    is wrong."""
    auto = resolve_lanes("auto")
    return {
        "processor": processor_problem(),
        "lanes": {str(name): problem for name, problem in lane_problems().items()},
        "auto_lane": {
            "tries": list(dict.fromkeys((auto.decode, auto.blocks))),
            "reason": auto.reason,
            "trials": [{name: entry[name] for name in TOLD} for entry in remembered_trials()],
        },
        "extras": {
            extra: None
            if importlib.util.find_spec(module.partition(".")[0])
            else f"not installed ({what}): pip install 'inference-workbench[{extra}]'"
            for extra, (module, what) in EXTRAS.items()
        },
        "models": {
            name: None if (folder / "model.safetensors").is_file() else "missing: run python -m experiments.train_demo"
            for name, folder in SHIPPED.items()
        },
        "environment": environment(),
    }


def processor_problem(machine: str | None = None, features: str | None = None) -> str | None:
    """Say what does not work on this processor; None where everything does. `machine` and `features` stand for those of
    this machine (`platform.machine()`, the flags that the system lists).

    The place for `compiled_kernels.level.level_here()`: no level is what this says in words."""
    machine = (machine or platform.machine()).lower()
    if machine not in ("x86_64", "amd64"):
        return f"{machine}: kernels are compiled for x86-64; lanes eager and inductor work here, and auto takes one"
    features = _features() if features is None else features
    if features and "avx2" not in features.split():
        return "x86-64 without AVX2: kernels want it; lanes eager and inductor work here, and auto takes one"
    return None


def _features() -> str:
    """The processor's flags; empty where this system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def show(found: dict, console: Console) -> None:
    table = Table("what", "name", "state")
    for kind in ("lanes", "extras", "models"):
        for name, problem in found[kind].items():
            table.add_row(kind[:-1], name, Text(problem) if problem else Text("works", style="green"))
    console.print(table)
    if found["processor"]:
        console.print(Text(found["processor"]))
    surroundings = found["environment"]
    first, *others = found["auto_lane"]["tries"]
    if others:
        told = (
            f"tries {first} on each model's decode step, and takes it where it is right and not clearly slower than "
            f"the modules as written; else {', then '.join(others)}"
        )
    else:
        told = f"is {first} here ({found['auto_lane']['reason']})"
    console.print(Text(f"lane auto {told}"))
    if trials := found["auto_lane"]["trials"]:
        console.print(_chosen(trials))
    elif others:
        console.print(Text("nothing was tried yet: the first run of a model does"))
    console.print(
        Text(
            f"Python {surroundings['python']}, torch {surroundings['packages']['torch']}, "
            f"{surroundings['cpu']['model']}, {surroundings['threads']['torch']} threads"
        )
    )


def _chosen(trials: list[dict]) -> Table:
    """What `auto` chose for which model, with the times of a decode step and why other lanes were not taken."""
    table = Table("model", "weights", "cache", "threads", "chosen", "a decode step", "not taken", "tried (UTC)")
    for each in trials:
        times = ", ".join(f"{lane} {1000 * seconds:.2f} ms" for lane, seconds in each["seconds"].items())
        others = [f"{lane}: {why}" for lane, why in {**each["refused"], **each["untried"]}.items()]
        slower = [lane for lane in each["seconds"] if lane != each["chosen"]]
        others += [f"{', '.join(slower)}: not clearly quicker"] if slower and each["chosen"] != "eager" else []
        others += [f"{', '.join(slower)}: clearly slower than eager"] if slower and each["chosen"] == "eager" else []
        when = each["date"] if each["valid"] else f"{each['date']}; with other code or versions: tried again"
        cells = (each["model"], each["weights"], each["cache"], str(each["threads"]), each["chosen"], times)
        table.add_row(*map(Text, (*cells, "; ".join(others), when)))
    return table
