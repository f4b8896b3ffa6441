"""Copy the experiment that was run, as YAML or Python."""

from __future__ import annotations

import ipywidgets

from workbench.widgets.playground.copy_button import CopyButton


class ExperimentCopy(ipywidgets.VBox):
    """Two buttons that copy, and the texts themselves for pages that may not."""

    def __init__(self) -> None:
        self.yaml, self.python = CopyButton(label="Copy as YAML"), CopyButton(label="Copy as Python")
        self._which = ipywidgets.ToggleButtons(options=["hide", "YAML", "Python"], style={"button_width": "auto"})
        self.area = ipywidgets.Textarea(disabled=False, rows=14, layout={"width": "auto", "display": "none"})
        self._which.observe(lambda _: self._show(), "value")
        row = ipywidgets.HBox([self.yaml, self.python, ipywidgets.Label("what was played:"), self._which])
        super().__init__([row, self.area])

    def set_texts(self, yaml: str, python: str) -> None:
        self.yaml.text, self.python.text = yaml, python
        self._show()

    def _show(self) -> None:
        self.area.value = self.python.text if self._which.value == "Python" else self.yaml.text
        self.area.layout.display = "none" if self._which.value == "hide" else None
