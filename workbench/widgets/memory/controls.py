"""Controls missing in ipywidgets: an integer on a logarithmic slider, and a choice with free text."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets
import traitlets

OTHER = "…"
LABEL_STYLE = {"description_width": "6.5em"}


class LogSlider(ipywidgets.HBox):
    """An integer from 1 to 2^`most`: the slider goes by quarters of a power of two, the field beside it by ones."""

    value = traitlets.Int(1)

    def __init__(self, description: str, max_power: int, value: int = 1):
        self.slider = ipywidgets.FloatLogSlider(
            base=2, min=0, max=max_power, step=0.25, value=value, readout=False, description=description, style=LABEL_STYLE
        )
        self.field = ipywidgets.BoundedIntText(
            min=1, max=2**max_power, value=value, layout={"width": "8em"}, tooltip=f"{description}, exactly"
        )
        super().__init__([self.slider, self.field])
        self.value = value
        self.slider.observe(self._slid, "value")
        traitlets.link((self, "value"), (self.field, "value"))

    def _slid(self, change: dict) -> None:
        self.value = round(change["new"])

    @traitlets.observe("value")
    def _follow(self, _: object) -> None:
        if round(self.slider.value) != self.value:
            self.slider.unobserve(self._slid, "value")  # the slider has no such place: it goes near, and moves nothing
            self.slider.value = self.value
            self.slider.observe(self._slid, "value")


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
