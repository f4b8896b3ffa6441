"""Build the controls of a load and of its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import WorkbenchError
from workbench.widgets.view import button

if TYPE_CHECKING:
    from workbench.engine.config import SchedulerConfig

RATE_STEP = 0.5  # requests a second
CHUNKS = (8, 16, 32, 64, 128, 256, 512)
WIDE = {"width": "21em"}


def control_rows(
    view: Any, run_tip: str, max_rate: float, policies: Iterable[str], limits: SchedulerConfig
) -> list[ipywidgets.Widget]:
    """Return rows of controls linked to the traits and methods of `view`.

    Args:
        view: the `LiveBench`; its `problem` says why a value was refused.
        run_tip: tooltip of the run button.
        max_rate: requests a second at the slider's right end; a higher load extends it.
        policies: names of the offered policies.
        limits: the scheduler settings with which the runner was made.
    """
    made = _linked_controls(view, max_rate, policies, limits)
    rows = (
        [_run_button(view, run_tip), made["shared_prefix"], *view.time_controls()],
        [made[name] for name in ("rate", "long_share", "policy", "chunk_tokens", "max_num_seqs")],
    )
    return [ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows]


def _run_button(view: Any, tip: str) -> ipywidgets.Button:
    made: Any = button(lambda: view.stop() if view.running else view.run(), "", tooltip=tip, layout={"width": "7em"})

    def show(_: Any = None) -> None:
        made.description, made.icon = ("Stop", "stop") if view.running else ("Run", "play")
        made.button_style = "" if view.running else "primary"

    show()
    view.observe(show, "running")
    return made


def _linked_controls(
    view: Any, max_rate: float, policies: Iterable[str], limits: SchedulerConfig
) -> Mapping[str, ipywidgets.Widget]:
    """Return a control for each trait of the load and the scheduler, by the trait's name."""
    chunks = sorted({each for each in CHUNKS if each <= limits.max_num_batched_tokens} | {view.chunk_tokens})
    controls: dict[str, Any] = {
        "rate": ipywidgets.FloatSlider(description="load, 1/s", min=0, max=max_rate, step=RATE_STEP, layout=WIDE),
        "long_share": ipywidgets.FloatSlider(description="long", max=1, step=0.05, readout_format=".0%", layout=WIDE),
        "policy": ipywidgets.Dropdown(description="policy", options=list(policies), layout=WIDE),
        "chunk_tokens": ipywidgets.SelectionSlider(description="chunk", options=chunks, layout=WIDE),
        "max_num_seqs": ipywidgets.IntSlider(description="batch", min=1, max=limits.max_num_seqs, layout=WIDE),
        "shared_prefix": ipywidgets.Checkbox(description="shared prefix", indent=False, layout={"width": "9em"}),
    }
    controls["rate"].readout_format = ".1f"
    tips = {
        "rate": "requests a second; they arrive at random (Poisson)",
        "long_share": "share of requests with long prompts",
        "chunk_tokens": "most prefill tokens in a step",
        "max_num_seqs": "most sequences that run at once",
        "shared_prefix": "all prompts begin with the same system prompt",
    }
    for name, control in controls.items():
        control.tooltip = tips.get(name)
        _link(view, name, control)
    return controls


def _link(view: Any, name: str, control: Any) -> None:
    """Keep a trait and its control equal: add a missing value to the control, and restore it after a refusal."""
    showing = False

    def show(value: Any) -> None:
        nonlocal showing
        showing = True
        try:
            _offer(control, value)
            control.value = value
        finally:
            showing = False

    def enter(change: dict[str, Any]) -> None:
        if showing:  # new options make the control select the first one
            return
        try:
            view.set_trait(name, change["new"])
        except WorkbenchError as error:
            view.problem = str(error)
            show(getattr(view, name))

    show(getattr(view, name))
    view.observe(lambda change: show(change["new"]), name)
    control.observe(enter, "value")


def _offer(control: Any, value: Any) -> None:
    """Add a value to the range or options of a control."""
    if isinstance(control, ipywidgets.FloatSlider):
        control.max = max(control.max, value)
    elif isinstance(control, (ipywidgets.Dropdown, ipywidgets.SelectionSlider)) and value not in control.options:
        options = [*control.options, value]
        control.options = options if isinstance(value, str) else sorted(options)
