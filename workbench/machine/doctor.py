"""Diagnose this machine: which backends, extras and models work here, and why others do not."""

from __future__ import annotations

import importlib.util
import math

from rich.console import Console
from rich.text import Text

from compiled_kernels import backend_problems
from compiled_kernels.backends import UNSUPPORTED_CPU
from compiled_kernels.level import current_level, machine_level
from workbench.display import Table
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.executors.autotune import remembered_autotune_results
from workbench.executors.capabilities import capability_table, limits_of
from workbench.executors.layout import remembered_layouts
from workbench.executors.reference import CLEARLY_FASTER_RATIO
from workbench.executors.requirements import FEATURES, Requirements
from workbench.executors.select import select_backends
from workbench.machine.environment import environment
from workbench.units import format_seconds

# Extras: the module that each extra needs, and its use.
EXTRAS = {
    "triton": ("triton", "GPU kernels, their interpreter and their PTX"),
    "peers": ("llama_cpp", "other tools for comparisons"),
    "hub": ("huggingface_hub", "models of the Hugging Face hub"),
    "serve": ("uvicorn", "a server and its gateway"),
    "lab": ("jupytext", "widgets and charts of the notebooks"),
    "dev": ("pytest", "the test suite"),
}
TRIAL_COLUMNS = (
    "model", "weights", "cache", "unit", "threads", "cpu", "chosen", "seconds", "refused", "untried", "date", "valid",
)  # fmt: skip
LAID_OUT = ("model", "weights", "cache", "threads", "cpu", "chosen", "reason", "date", "valid")

TRAINED_BY = {
    "demo": "tools.training.train_demo",
    "demo-draft": "tools.training.train_demo",
    "demo-chat": "tools.training.train_chat",
}


def diagnose() -> dict:
    """Return the state of this machine as JSON values, with null for no problem: backends, their capabilities, the
    backends that `auto` would try with the results of its trials so far, extras, models, and the environment."""
    auto = select_backends("auto", Requirements())
    return {
        "level": {
            "here": current_level(),
            "machine": machine_level(),
            "problem": None if current_level() else UNSUPPORTED_CPU,
        },
        "backends": {str(name): problem for name, problem in backend_problems().items()},
        "capabilities": {feature: limits_of(feature) for feature in FEATURES},
        "auto_backend": {
            "tries": list(dict.fromkeys((auto.decode, auto.blocks))),
            "reason": auto.reason,
            "layouts": [{name: entry[name] for name in LAID_OUT} for entry in remembered_layouts()],
            "trials": [{name: entry[name] for name in TRIAL_COLUMNS} for entry in remembered_autotune_results()],
        },
        "extras": {
            extra: None
            if importlib.util.find_spec(module.partition(".")[0])
            else f"not installed ({what}): pip install 'inference-workbench[{extra}]'"
            for extra, (module, what) in EXTRAS.items()
        },
        "models": {
            name: None if (folder / "model.safetensors").is_file() else f"missing: run python -m {TRAINED_BY[name]}"
            for name, folder in BUNDLED_MODELS.items()
        },
        "environment": environment(),
    }


def show(found: dict, console: Console) -> None:
    rows = [
        (kind[:-1], name, problem or Text("works", style="green"))
        for kind in ("backends", "extras", "models")
        for name, problem in found[kind].items()
    ]
    console.print(Table("", rows, ("what", "name", "state")))
    console.print(capability_table())
    level = found["level"]
    if level["problem"]:
        console.print(Text(f"backend mlir: {level['problem']}"))
    else:
        held = "" if level["here"] == level["machine"] else f", lowered from {level['machine']} by WORKBENCH_LEVEL"
        console.print(Text(f"kernels are compiled for level {level['here']} of the instruction set{held}"))
    environment = found["environment"]
    first, *others = found["auto_backend"]["tries"]
    if others:
        choice = (
            f"tries {first} on each model's decode step, and uses it if it is right and not clearly slower than "
            f"the modules as written; else {', then '.join(others)}"
        )
    else:
        choice = f"is {first} here ({found['auto_backend']['reason']})"
    console.print(Text(f"backend auto {choice}"))
    if trials := found["auto_backend"]["trials"]:
        console.print(_chosen(trials))
    elif others:
        console.print(Text("nothing was tried yet: the first run of a model tries it"))
    if layouts := found["auto_backend"]["layouts"]:
        console.print(_laid_out(layouts))
    console.print(
        Text(
            f"Python {environment['python']}, torch {environment['packages']['torch']}, "
            f"{environment['cpu']['model']}, {environment['threads']['torch']} threads"
        )
    )


def _chosen(trials: list[dict]) -> Table:
    """Build a table of the backends that `auto` chose, with decode step times and the reasons against others."""
    rows = []
    for each in trials:
        times = ", ".join(f"{backend} {format_seconds(seconds)}" for backend, seconds in each["seconds"].items())
        others = [f"{backend}: {why}" for backend, why in {**each["refused"], **each["untried"]}.items()]
        eager = each["seconds"].get("eager", math.inf)
        for backend, seconds in each["seconds"].items():
            if backend != each["chosen"]:
                slower = eager < CLEARLY_FASTER_RATIO * seconds
                others.append(f"{backend}: {'clearly slower than eager' if slower else 'not clearly quicker'}")
        rows.append((
            each["model"], each["weights"], each["cache"], str(each["threads"]), each["chosen"], times,
            "; ".join(others), _when(each),
        ))  # fmt: skip
    return Table(
        "", rows, ("model", "weights", "cache", "threads", "chosen", "a decode step", "not taken", "tried (UTC)")
    )


def _laid_out(layouts: list[dict]) -> Table:
    """Build a table of the weight layouts that the backend mlir chose, with reasons."""
    rows = [
        (
            each["model"],
            each["weights"],
            each["cache"],
            str(each["threads"]),
            each["chosen"],
            each["reason"],
            _when(each),
        )
        for each in layouts
    ]
    return Table("", rows, ("model", "weights", "cache", "threads", "layout of weights", "why", "tried (UTC)"))


def _when(tried: dict) -> str:
    return tried["date"] if tried["valid"] else f"{tried['date']}; with other code or versions: tried again"
