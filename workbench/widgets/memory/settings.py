"""Settings of a memory calculator: their controls, values of a runner, and sizes of known memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench.widgets.memory.controls import LABEL_STYLE, ChoiceOrText, LogSlider

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

THIS_MACHINE = "this machine"
MAX_CONTEXT_POWER, MAX_BATCH_POWER = 24, 14  # powers of two


def build_controls(state: Any, given: Sequence[str]) -> list[ipywidgets.Widget]:
    """Rows of controls, linked to the traits of `state`; `given` are names of models beside those that are known."""
    from workbench.cache.format import FORMATS
    from workbench.engine.load import DTYPES, BUNDLED_MODELS
    from workbench.fleet.hardware import HARDWARE
    from workbench.model.quantized import WEIGHT_DTYPES as WEIGHTS
    from workbench.model.shapes import SHAPES

    models = [(name, name) for name in (*given, *BUNDLED_MODELS, *(f"shape:{name}" for name in SHAPES))]
    machines = [(f"{name}, {each.memory / 1e9:.0f} GB", name) for name, each in HARDWARE.items()] + [(THIS_MACHINE, THIS_MACHINE)]
    made: dict[str, Any] = {
        "model": ChoiceOrText("model", models, "a config.json or a folder with one", state.model),
        "memory": ChoiceOrText("memory", machines, "a size, such as 24GiB", state.memory),
        "context": LogSlider("context", MAX_CONTEXT_POWER, state.context),
        "batch": LogSlider("batch", MAX_BATCH_POWER, state.batch),
        **{
            name: ipywidgets.Dropdown(options=options, description=name, value=getattr(state, name), style=LABEL_STYLE)
            for name, options in (("dtype", list(DTYPES)), ("weights", WEIGHTS), ("cache", FORMATS))
        },
        "step_tokens": _count("step tokens", state.step_tokens, "tokens that a step computes at most"),
        "page_size": _count("page size", state.page_size, "the cache is counted in whole pages of so many tokens"),
    }
    for name, control in made.items():
        traitlets.link((state, name), (control, "value"))
    rows = (("model", "memory"), ("context", "batch"), ("weights", "cache", "dtype"), ("step_tokens", "page_size"))
    return [ipywidgets.HBox([made[name] for name in row], layout={"flex_flow": "row wrap"}) for row in rows]


def _count(name: str, value: int, tip: str) -> ipywidgets.BoundedIntText:
    return ipywidgets.BoundedIntText(description=name, value=value, min=1, max=2**20, tooltip=tip, style=LABEL_STYLE)


def available_bytes(name: str) -> int | None:
    """Bytes of a memory: a machine's, this machine's (None where it does not tell), or a size."""
    from workbench.fleet.hardware import HARDWARE
    from workbench.study.byte_sizes import parse_bytes
    from workbench.study.machine import memory_bytes

    if name == THIS_MACHINE:
        return memory_bytes()
    return int(HARDWARE[name].memory) if name in HARDWARE else parse_bytes(name)


def describe_fit(found: dict[str, Any]) -> str:
    from workbench.study.byte_sizes import format_bytes

    if "sequences" not in found:
        return "This machine does not tell how much memory it has."
    longest = found["longest_context"]
    length = "any length" if longest is None else f"up to {longest:,} tokens each"
    size, sequences = format_bytes(found["memory_bytes"]), f"{found['sequences']:,} of {found['context']:,} tokens"
    words = f"{sequences}, or {found['batch']:,} of {length}"
    return f"Sequences that fit into {size} beside weights and activations: {words}."


def settings_of_runner(runner: Runner) -> dict[str, Any]:
    """Return the calculator's settings that describe `runner`."""
    packed = next((shape.format for shape in runner.store.specs if shape.format.quantized), None)
    return {
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "weights": runner.model.format.blocks,
        "cache": "dense" if packed is None else packed.format,
        "page_size": runner.store.page_size,
        "step_tokens": runner.scheduler.limits.max_num_batched_tokens,
        "memory": THIS_MACHINE,
    }
