"""Controls of a load and of the scheduler that serves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ipywidgets
import traitlets

RATE_STEP = 0.5  # requests a second
WIDE = {"width": "21em"}


def load_controls(
    view: traitlets.HasTraits, max_rate: float, policies: Iterable[str], chunks: Iterable[int], max_seqs: int
) -> Mapping[str, ipywidgets.Widget]:
    """Return a control for each trait of `view` by which a load is set, linked to it."""
    controls: dict[str, Any] = {
        "rate": ipywidgets.FloatSlider(description="load, 1/s", min=0, max=max_rate, step=RATE_STEP, layout=WIDE),
        "long_share": ipywidgets.FloatSlider(description="long", max=1, step=0.05, readout_format=".0%", layout=WIDE),
        "policy": ipywidgets.Dropdown(description="policy", options=list(policies), layout=WIDE),
        "chunk_tokens": ipywidgets.SelectionSlider(description="chunk", options=list(chunks), layout=WIDE),
        "max_num_seqs": ipywidgets.IntSlider(description="batch", min=1, max=max_seqs, layout=WIDE),
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
        traitlets.link((view, name), (control, "value"))
    return controls
