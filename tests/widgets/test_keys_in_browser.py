"""The keys that are pressed in a widget are the widget's, whatever JupyterLab binds to them."""

from __future__ import annotations

import json

from tests.helpers.widgets import notebook
from tests.patience import until
from tools.notebooks.page import LabSession, NotebookPage

CONTROLS = """import ipywidgets
from workbench import svg
from workbench.widgets.view import PictureWidget

class Controls(PictureWidget):
    def __init__(self):
        super().__init__()
        self.options = ipywidgets.Dropdown(options=["all", "down", "x-ray", "zed"])
        self.choices = ipywidgets.ToggleButtons(options=["left", "right"])
        self.list = ipywidgets.Select(options=["one", "two", "three"])
        self.slider = ipywidgets.IntSlider(value=5)
        self.box = ipywidgets.Checkbox(description="a box")
        self.button = ipywidgets.Button(description="a button")
        self.show(self.options, self.choices, self.list, self.slider, self.box, self.button)

    def picture(self):
        cells = [svg.rect(20 * n, 2, 16, 16, key=f"c{n}", tip=f"cell {n}") for n in range(3)]
        return svg.document(100, 20, *cells, title="three cells")

view = Controls()
view
"""
NOTEBOOK = f"# %%\n{CONTROLS}# %%\nafter = 1\n# %%\nlast = 2\n"
KINDS = {
    "dropdown": "select:not([size])", "toggle": ".widget-toggle-buttons button", "list": "select[size]",
    "slider": ".noUi-handle", "checkbox": "input[type=checkbox]", "button": "button:text('a button')",
    "picture's cell": "rect[data-key]",
}  # fmt: skip
# Of every shortcut that is one key after another, with Shift at most, and works in a notebook: its keys.
BOUND = """() => [...new Set(jupyterapp.commands.keyBindings
    .filter(each => each.keys.every(key => !/Ctrl|Cmd|Accel|Alt|Shift Enter/.test(key)))
    .filter(each => /jp-Notebook|body/.test(each.selector))
    .map(each => each.keys.join("|")))]"""
STATE = """() => ({cells: bench.panel.content.widgets.map(each => each.model.type + each.model.sharedModel.getSource()),
    active: bench.panel.content.activeCellIndex})"""
PLAYWRIGHT = {"Space": " ", "Up": "ArrowUp", "Down": "ArrowDown", "Left": "ArrowLeft", "Right": "ArrowRight"}


def pressed_keys(page: NotebookPage) -> list[list[str]]:
    """Return the sequences of keys that JupyterLab binds in a notebook, as Playwright names them."""

    def name(key: str) -> str:
        plain = key.removeprefix("Shift ")
        named = plain.lower() if len(plain) == 1 else PLAYWRIGHT.get(plain, plain)
        return named if plain == key else f"Shift+{named}"

    bound = [list(map(name, each.split("|"))) for each in page.tab.evaluate(BOUND)]
    return [keys for keys in bound if not any("Escape" in key for key in keys)]


def test_no_control_loses_a_key_to_the_notebook(lab: LabSession) -> None:
    page = lab.open(lab.write("keys.py", NOTEBOOK))
    page.run_all()
    sequences = pressed_keys(page)
    assert ["d", "d"] in sequences and ["ArrowDown"] in sequences and ["b"] in sequences, "they are what Lab binds"
    assert ["Shift+ArrowDown"] in sequences and ["Shift+m"] in sequences
    shown = page.widget("wb-controls")
    page.tab.evaluate("bench.panel.content.activeCellIndex = 0")
    before = page.tab.evaluate(STATE)
    for kind, selector in KINDS.items():
        control = shown.locator(selector).first
        for keys in sequences:
            for key in keys:
                control.focus()
                page.tab.keyboard.press(key)
            assert json.dumps(page.tab.evaluate(STATE)) == json.dumps(before), f"{keys} in the {kind}"
    shown.locator(KINDS["slider"]).first.focus()
    page.settle()
    value = int(page.evaluate("view.slider.value"))
    page.tab.keyboard.press("ArrowRight")
    page.settle()
    assert int(page.evaluate("view.slider.value")) == value + 1


def test_chords_stay_the_notebooks(lab: LabSession) -> None:
    page = lab.open(lab.write("chords.py", NOTEBOOK))
    page.run_all()
    page.tab.evaluate("bench.panel.content.activeCellIndex = 0")
    page.widget("wb-controls").locator(KINDS["slider"]).first.focus()
    page.tab.keyboard.press("Shift+Enter")
    page.settle()
    assert page.tab.evaluate("bench.panel.content.activeCellIndex") == 1
    assert page.tab.evaluate("bench.document().cells[0].execution_count") > 1
    file = lab.server.root / "chords.ipynb"
    page = lab.open(lab.write(file.name, notebook((CONTROLS, "after = 1"))))
    page.run_all()
    assert "view = Controls" in file.read_text() and 'outputs": [{' not in file.read_text()
    page.widget("wb-controls").locator(KINDS["button"]).first.focus()
    page.tab.keyboard.press("Control+s")
    until(lambda: not page.tab.evaluate("bench.panel.context.model.dirty"))
    assert "three cells" in file.read_text()
