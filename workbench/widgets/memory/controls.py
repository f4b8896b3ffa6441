"""Controls of the memory calculator: its settings, initial values from a runner, and two controls that ipywidgets
lacks.

The two are an integer on a logarithmic slider, and a choice with free text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


OTHER = "…"
LABEL_STYLE = {"description_width": "6.5em"}
THIS_MACHINE = "this machine"
MAX_CONTEXT_POWER, MAX_BATCH_POWER = 24, 14  # powers of two


STOPS_PER_DOUBLING = 4


def nearest_stop(value: float) -> float:
    """Return the stop of a logarithmic slider that is nearest to `value`."""
    return 2 ** (round(STOPS_PER_DOUBLING * math.log2(value)) / STOPS_PER_DOUBLING)


class LogSlider(ipywidgets.HBox):
    """An integer from 1 to 2^`max_power`: the slider has stops at quarters of a power of two, the field is exact.

    The slider goes to the stop that is nearest to a typed value, and leaves the value as it is: a browser sends back
    where it put its handle.
    """

    value = traitlets.Int(1)

    def __init__(self, description: str, max_power: int, value: int = 1):
        self.slider = ipywidgets.FloatLogSlider(
            base=2,
            min=0,
            max=max_power,
            step=1 / STOPS_PER_DOUBLING,
            value=nearest_stop(value),
            readout=False,
            description=description,
            style=LABEL_STYLE,
        )
        self.field = ipywidgets.BoundedIntText(
            min=1, max=2**max_power, value=value, layout={"width": "8em"}, tooltip=f"{description}, exactly"
        )
        super().__init__([self.slider, self.field])
        self.value = value
        self.slider.observe(self._slid, "value")
        traitlets.link((self, "value"), (self.field, "value"))

    def _slid(self, change: dict) -> None:
        if nearest_stop(change["new"]) != nearest_stop(self.value):
            self.value = round(change["new"])

    @traitlets.observe("value")
    def _follow(self, _: object) -> None:
        self.slider.value = nearest_stop(self.value)


class ChoiceOrText(ipywidgets.HBox):
    """`value` is one of `known`, (label, value) pairs, or what is written in the field that `other` opens."""

    value = traitlets.Unicode()

    def __init__(self, description: str, options: Sequence[tuple[str, str]], other: str, value: str):
        self.options = {each for _, each in options}
        self.choice = ipywidgets.Dropdown(
            options=[*options, (other, OTHER)], description=description, value=options[0][1], style=LABEL_STYLE
        )
        self.field = ipywidgets.Text(
            placeholder=other, continuous_update=False, tooltip=other, layout={"width": "20em"}
        )
        super().__init__([self.choice, self.field])
        self.choice.observe(self._chose, "value")
        self.field.observe(self._wrote, "value")
        self.value = value
        self._follow(None)

    def _chose(self, change: dict) -> None:
        if change["new"] != OTHER:
            self.value = change["new"]
        self.field.layout.display = "" if change["new"] == OTHER else "none"

    def _wrote(self, change: dict) -> None:
        if change["new"].strip():
            self.value = change["new"].strip()

    @traitlets.observe("value")
    def _follow(self, _: object) -> None:
        own = self.value not in self.options
        self.field.layout.display = "" if own else "none"
        self.choice.value = OTHER if own else self.value
        if own:
            self.field.value = self.value


def build_controls(state: Any, given: Sequence[str]) -> list[ipywidgets.Widget]:
    """Rows of controls, linked to the traits of `state`; `given` are names of models beside those that are known."""
    from workbench.engine.config import DTYPES
    from workbench.engine.loaded_model import BUNDLED_MODELS
    from workbench.kv_cache.format import FORMATS
    from workbench.model.quantized import WEIGHT_DTYPES as WEIGHTS
    from workbench.model.shapes import SHAPES
    from workbench.simulate.roofline import HARDWARE

    models = [(name, name) for name in (*given, *BUNDLED_MODELS, *(f"shape:{name}" for name in SHAPES))]
    machines = [(f"{name}, {each.memory / 1e9:.0f} GB", name) for name, each in HARDWARE.items()] + [
        (THIS_MACHINE, THIS_MACHINE)
    ]
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
    """Return the bytes of a memory: a machine's, this machine's, or a size."""
    import psutil

    from workbench.memory.report import parse_bytes
    from workbench.simulate.roofline import HARDWARE

    if name == THIS_MACHINE:
        return psutil.virtual_memory().total
    return int(HARDWARE[name].memory) if name in HARDWARE else parse_bytes(name)


def describe_fit(found: dict[str, Any]) -> str:
    from workbench.memory.report import describe_longest, format_bytes

    if "sequences" not in found:
        return "This machine does not tell how much memory it has."
    size, sequences = format_bytes(found["memory_bytes"]), f"{found['sequences']:,} of {found['context']:,} tokens"
    words = f"{sequences}, or {describe_longest(found)}"
    return f"Sequences that fit into {size} beside weights and activations: {words}."


def settings_of_runner(runner: Runner) -> dict[str, Any]:
    """Return the calculator's settings that describe `runner`."""
    quantized = next((shape.format for shape in runner.store.specs if shape.format.quantized), None)
    return {
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "weights": runner.model.format.blocks.codes,
        "cache": "dense" if quantized is None else quantized.format,
        "page_size": runner.store.page_size,
        "step_tokens": runner.scheduler.limits.max_num_batched_tokens,
        "memory": THIS_MACHINE,
    }
