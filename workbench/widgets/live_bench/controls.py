"""Controls of a load and of the scheduler that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.engine.config import SchedulerConfig

RATE_STEP = 0.5  # requests a second
CHUNKS = (8, 16, 32, 64, 128, 256, 512)
WIDE, SLIM = {"width": "21em"}, {"width": "auto", "min_width": "4.5em"}


def control_rows(
    view: Any, run_tip: str, max_rate: float, policies: Iterable[str], limits: SchedulerConfig
) -> list[ipywidgets.Widget]:
    """Return rows of controls that are linked to the traits of `view` and call its methods.

    Args:
        view: the `LiveBench`; its `problem` says why a value was refused.
        run_tip: what the run button does.
        max_rate: requests a second at the right end, until the load is higher.
        policies: the names that are offered.
        limits: those for which the runner was made.
    """
    made = _linked_controls(view, max_rate, policies, limits)
    buttons = _act_buttons({
        "+": ("zoom in", lambda: view.zoom(0.5)), "−": ("zoom out", lambda: view.zoom(2.0)),
        "all": ("all that is kept", view.show_all),
        "newest": ("follow the newest, with the cursor, too", view.show_newest),
        "clear": ("no selection", lambda: view.set_trait("selected", ())),
    })  # fmt: skip
    rows = (
        [_run_button(view, run_tip), made["shared_prefix"], made["follow"], *buttons],
        [made[name] for name in ("rate", "long_share", "policy", "chunk_tokens", "max_num_seqs")],
    )
    return [ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows]


def _run_button(view: Any, tip: str) -> ipywidgets.Button:
    button = ipywidgets.Button(tooltip=tip, layout={"width": "7em"})
    button.on_click(lambda _: view.stop() if view.running else view.run())

    def show(_: Any = None) -> None:
        button.description, button.icon = ("Stop", "stop") if view.running else ("Run", "play")
        button.button_style = "" if view.running else "primary"

    show()
    view.observe(show, "running")
    return button


def _linked_controls(
    view: Any, max_rate: float, policies: Iterable[str], limits: SchedulerConfig
) -> Mapping[str, ipywidgets.Widget]:
    """Return a control for each trait by which a load is set."""
    chunks = sorted({each for each in CHUNKS if each <= limits.max_num_batched_tokens} | {view.chunk_tokens})
    controls: dict[str, Any] = {
        "rate": ipywidgets.FloatSlider(description="load, 1/s", min=0, max=max_rate, step=RATE_STEP, layout=WIDE),
        "long_share": ipywidgets.FloatSlider(description="long", max=1, step=0.05, readout_format=".0%", layout=WIDE),
        "policy": ipywidgets.Dropdown(description="policy", options=list(policies), layout=WIDE),
        "chunk_tokens": ipywidgets.SelectionSlider(description="chunk", options=chunks, layout=WIDE),
        "max_num_seqs": ipywidgets.IntSlider(description="batch", min=1, max=limits.max_num_seqs, layout=WIDE),
        "shared_prefix": ipywidgets.Checkbox(description="shared prefix", indent=False, layout={"width": "9em"}),
        "follow": ipywidgets.Checkbox(description="follow", indent=False, layout={"width": "5.5em"}),
    }
    controls["rate"].readout_format = ".1f"
    tips = {
        "rate": "requests a second; they arrive at random (Poisson)",
        "long_share": "share of requests with long prompts",
        "chunk_tokens": "prefill tokens of a step at most",
        "max_num_seqs": "sequences that run at once, at most",
        "shared_prefix": "all prompts begin with the same system prompt",
        "follow": "keep the newest in sight",
    }
    for name, control in controls.items():
        control.tooltip = tips.get(name)
        _link(view, name, control)
    return controls


def _act_buttons(acts: Mapping[str, tuple[str, Callable[[], object]]]) -> list[ipywidgets.Button]:
    """Return a button for each (tip, act), by what stands on it."""
    buttons = []
    for sign, (tip, act) in acts.items():
        buttons.append(ipywidgets.Button(description=sign, tooltip=tip, layout=SLIM))
        buttons[-1].on_click(lambda _, act=act: act())
    return buttons


def _link(view: Any, name: str, control: Any) -> None:
    """Keep a trait and its control equal, also where the control did not offer the trait's value, or it is refused."""
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
        if showing:  # other options select the first of them
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
    """Add a value to those that a control can show."""
    if isinstance(control, ipywidgets.FloatSlider):
        control.max = max(control.max, value)
    elif isinstance(control, (ipywidgets.Dropdown, ipywidgets.SelectionSlider)) and value not in control.options:
        options = [*control.options, value]
        control.options = options if isinstance(value, str) else sorted(options)
