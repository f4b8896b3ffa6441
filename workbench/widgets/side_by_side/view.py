"""Show one prompt under two settings, their texts and times side by side, what was played, and an experiment."""

from __future__ import annotations

import random
import threading
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.playground.data import PlayedRequest
from workbench.widgets.playground.history import PlayHistory, draw_history, play_figures
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.playground.settings import initial_experiment, single_prompt_workload
from workbench.widgets.playground.view import NARROW, NUM_SEEDS, STATUS_PLACE
from workbench.widgets.settings_form.form import error_markup
from workbench.widgets.side_by_side.data import SIDES, BackgroundPair, TextDifference
from workbench.widgets.side_by_side.experiment_panel import ANY_PAIR, ExperimentPanel
from workbench.widgets.side_by_side.picture import MARK, draw_both_texts, draw_comparison, draw_side_text
from workbench.widgets.side_by_side.presets import ENGINE_PRESETS, GREEDY, PairPreset, all_presets
from workbench.widgets.side_by_side.settings import PairForms
from workbench.widgets.tokens.text import GENERATED_STYLE, draw_probability_legend, draw_token
from workbench.widgets.view import GrowingPicture, MarkupWidget, PictureWidget

NO_PRESET, MORE = "choose a pair", "more, from the zoo"
LINE_PLACE = {"height": "28px", "overflow": "hidden auto", "margin": "0 0 2px"}
HALF = {"flex": "1 1 0", "min_width": "0"}


class SideBySide(PictureWidget):
    """Play one prompt with one seed under two settings, left and right, one after the other, on the running engine.

    `given` and `prompt` are as in `Playground`; both sides begin with the same greedy settings. `preset` is a pair of
    settings by name. `play`, `stop`, `wait`, `restore` (a play of the `history`, by its number) and `run_experiment`
    are the buttons; `left` and `right` are the experiments that are set. `pair` is what was played last, and
    `pair.difference` its first token that differs. With `new_seed` each play sets another seed first. Experiments are
    written to `folder`, and never over one that is there. Tokens are compared by id: both models need one vocabulary.
    """

    prompt = traitlets.Unicode()
    preset = traitlets.Unicode()
    running = traitlets.Bool(False)
    seed = traitlets.Int(0, min=0)
    new_seed = traitlets.Bool(True)
    history = traitlets.List().tag(sync=True)  # what was played, the newest first, as JSON

    def __init__(self, given: Any = None, prompt: str | None = None, folder: Path | str = "side_by_side"):
        from workbench.stop_button import install_stop_handler

        install_stop_handler()
        self._runners = RunnerCache()
        self._drawing = threading.RLock()
        self.pair: BackgroundPair | None = None
        self._played_prompt, self._begins = "", 1
        self._initial = initial_experiment(given, prompt, self._runners).single(GREEDY, "SideBySide")
        self._marked: int | None = None
        self._history = PlayHistory()
        self._presets: dict[str, PairPreset] = {each.name: each for each in ENGINE_PRESETS}
        self._applied: PairPreset | None = None  # the preset that was chosen last
        self._is_following = False  # the choice follows the settings, and does not set them
        super().__init__(prompt=self._initial.workload.prompts[0], seed=self._initial.sampling.seed)
        self.forms = PairForms(self._initial, self._check)
        self.texts = [GrowingPicture(lambda n=n: svg.html(self._side_text(n))) for n in range(2)]
        self.experiment = ExperimentPanel(lambda: self._both, Path(folder), self.keep)
        self.plays = MarkupWidget()
        self._export = ExportButtons("history", csv=self._history.csv, json=self._history.json)
        self.observe(lambda _: self._check(), "prompt")
        self.observe(lambda change: self._apply(change["new"]), "preset")
        self.plays.on_pick(lambda key: self.restore(int(key)))
        controls = self._controls()
        self._draw_history()
        self._check()
        self.show(*controls, below=(
            ipywidgets.HTML("<b>History</b>"), self.plays, self._export,
            ipywidgets.HTML("<b>Experiment</b>"), self.experiment,
            ipywidgets.HTML("<b>Settings</b>"), self.forms.widget,  # last: a group is long, and none of it scrolls
        ))  # fmt: skip

    @property
    def sides(self) -> tuple[PlayedRequest, PlayedRequest]:
        return self.pair.sides if self.pair is not None else (PlayedRequest(str), PlayedRequest(str))

    @property
    def left(self) -> Any:
        """The experiment that is set on the left, or None with the errors shown at their fields."""
        return self.forms.experiment(0, self._common)

    @property
    def right(self) -> Any:
        return self.forms.experiment(1, self._common)

    @property
    def presets(self) -> dict[str, str]:
        """Return by preset why it cannot run here; an empty string for one that can."""
        return {name: preset.problem(self._initial) for name, preset in self._presets.items()}

    def play(self) -> None:
        """Play both sides in the background. Nothing where something is wrong, or one is playing."""
        if self.running:
            return
        if self.new_seed:
            self.seed = random.SystemRandom().randrange(NUM_SEEDS)
        both = self._both
        if both is None:
            return
        with self._drawing:
            self._alert.value, self._played_prompt, self._marked = "", self.prompt, None
            self._begins = 1 - self._begins  # the first place is an advantage, or none: each side has it in turn
            self.pair = pair = BackgroundPair(both, self._runners, self.throttle.mark, self._ended, self._begins)
            for text in self.texts:
                text.send_all({})
            self.running = True
            self._buttons()
        pair.start()
        self.throttle.mark()

    def stop(self) -> None:
        """End what is playing within a step or two; what has come stays."""
        if self.pair is not None:
            self.pair.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until both sides have ended, or so many seconds; return whether they have."""
        return self.pair is None or self.pair.wait(seconds)

    def restore(self, number: int) -> None:
        """Set the prompt, the seed and the settings of a play again; the seed is kept from then on."""
        entry = self._history.find(number)
        self.prompt, self.seed, self.new_seed = entry.prompt, entry.seed, False
        self.forms.write(*entry.settings)

    def run_experiment(self) -> Any:
        """Write the experiment of the present pair and run it in a process; `wait()` of the result waits for it."""
        return self.experiment.run()

    def picture(self) -> str:
        return svg.html(
            draw_both_texts(self.sides, self._shown_prompt, self._difference), self._draw_comparison(),
            draw_history(self._history.entries, self.forms.initial), self.experiment.picture(),
        )  # fmt: skip

    def redraw(self) -> None:
        with self._drawing:
            self._draw()

    def close(self) -> None:
        """End what plays and the experiment, and free the models."""
        self.stop()
        if hasattr(self, "experiment"):
            self.experiment.stop()
        super().close()
        if hasattr(self, "forms"):  # one that was refused at birth has none
            self.forms.close()
        self._runners.close()
        self.pair = None

    @property
    def _difference(self) -> TextDifference:
        return self.pair.difference if self.pair is not None else TextDifference()

    @property
    def _shown_prompt(self) -> str:
        return self._played_prompt or self.prompt

    @property
    def _common(self) -> dict[str, Any]:
        values = self._initial.model_dump(mode="json", include={"question", "measure"})
        return {**values, "workload": single_prompt_workload(self.prompt), "seed": self.seed}

    @property
    def _both(self) -> tuple[Any, Any] | None:
        left, right = self.left, self.right
        return None if left is None or right is None else (left, right)

    def _side_text(self, side: int) -> str:
        return draw_side_text(SIDES[side], self.sides[side], self._shown_prompt, self._difference)

    def _draw_comparison(self) -> str:
        pair = self.pair
        first, others, done = (0, None, False) if pair is None else (pair.first, pair.others, not self.running)
        return draw_comparison(self.sides, self._difference, first, others, done)

    def _draw(self) -> None:
        status = self.pair.status if self.pair is not None else ""
        self._status.value = f'<span role="status">{escape(status)}</span>'
        self.shown.content = svg.html(self._draw_comparison())
        position = self._difference.position
        marks = position != self._marked
        self._marked = position
        for text, played in zip(self.texts, self.sides, strict=True):
            tokens = dict(played.tokens_by_sample)
            if marks or {f"s{sample}" for sample in tokens} != text.region_names:
                text.send_all({f"s{sample}": len(each) for sample, each in tokens.items()})
            for sample, each in tokens.items():
                mark = position if sample == 0 else None
                text.append(f"s{sample}", len(each), lambda at, n=sample, all=each, m=mark: [
                    draw_token(n, index, token, MARK if index == m else "") for index, token in enumerate(all[at:], at)
                ])  # fmt: skip

    def _ended(self, pair: BackgroundPair) -> None:
        """In the thread that played the side that ended last."""
        with self._drawing:
            if pair is not self.pair:
                return
            self.running = False
            if pair.error:
                self._alert.value = error_markup(pair.error)
            difference = pair.difference
            left, right = (side.model_dump(mode="json", exclude={"workload"}) for side in pair.experiments)
            self._history.add(
                prompt=self._played_prompt, seed=pair.experiments[0].sampling.seed, settings=(left, right),
                figures=tuple(play_figures(side) for side in pair.sides),
                difference=difference.position, compared=difference.compared,
                remark="failed" if pair.error else "stopped" if pair.stopped else "",
            )  # fmt: skip
            for text in self.texts:
                text.send_all()
            self._draw_history()
            self._buttons()
        self.throttle.flush()
        self.keep()

    def _draw_history(self) -> None:
        self.history = self._history.as_values()
        self.plays.content = svg.html(draw_history(self._history.entries, self.forms.initial))

    def _apply(self, name: str) -> None:
        """Set both sides to a preset, or show why it cannot run here."""
        if name == MORE:
            self._presets = all_presets()
            self._choice.options = [NO_PRESET, *self._presets]
            self._choice.value = self.preset = NO_PRESET
            return
        if name in ("", NO_PRESET) or self._is_following:
            return
        if name not in self._presets:
            self._presets = all_presets()
            self._choice.options = [NO_PRESET, *self._presets]
        if name not in self._presets:
            raise WorkbenchError(f"no preset {name!r}; there are {', '.join(self._presets)}")
        preset = self._presets[name]
        if problem := preset.problem(self._initial):
            self._alert.value = error_markup(f"{name} cannot run here: {problem}")
            return
        self._alert.value, self._applied = "", None
        if name in self._choice.options:
            self._choice.value = name
        self.forms.write(*(side.model_dump(mode="json") for side in preset.experiments(self._initial)))
        self.forms.show_changes()
        self.experiment.ask(name, preset.question, preset.rule)
        self._applied = preset

    def _follow_settings(self, left: Any, right: Any) -> None:
        """Ask the question of the preset only while the settings are its pair, and that of any pair otherwise."""
        preset = self._applied
        if preset is None:
            return
        asks_it, is_its_pair = self.experiment.name == preset.name, preset.describes(self._initial, left, right)
        if asks_it == is_its_pair:
            return
        texts = (preset.name, preset.question, preset.rule) if is_its_pair else ("pair", *ANY_PAIR)
        self.experiment.ask(*texts, keep_edits=True)
        self._is_following = True
        self._choice.value = self.preset = preset.name if is_its_pair else NO_PRESET
        self._is_following = False

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        box = ipywidgets.Textarea(description="prompt", rows=3, layout={"width": "auto"}, continuous_update=False)
        self._choice = ipywidgets.Dropdown(
            options=[NO_PRESET, *self._presets, MORE], description="pair", layout={"width": "26em"}
        )
        self._choice.tooltip = "named pairs of settings; both sides are set"
        seed = ipywidgets.BoundedIntText(description="seed", min=0, max=2**31 - 1, layout={"width": "13em"})
        new_seed = ipywidgets.Checkbox(description="new seed each play", indent=False, layout={"width": "auto"})
        new_seed.tooltip = "off: the seed stays, and the same settings give the same tokens again"
        self._play_button = ipywidgets.Button(description="Play", icon="play", button_style="primary", layout=NARROW)
        self._stop_button = ipywidgets.Button(description="Stop", icon="stop", layout=NARROW, disabled=True)
        self._status, self._alert = ipywidgets.HTML(layout=STATUS_PLACE), ipywidgets.HTML(layout=dict(LINE_PLACE))
        self._changes = ipywidgets.HTML(layout=dict(LINE_PLACE))
        for control, name in ((box, "prompt"), (seed, "seed"), (new_seed, "new_seed")):
            traitlets.link((self, name), (control, "value"))
        self._choice.observe(lambda change: setattr(self, "preset", change["new"]), "value")
        self._play_button.on_click(lambda _: self.play())
        self._stop_button.on_click(lambda _: self.stop())
        sides = [
            ipywidgets.VBox([ipywidgets.HTML(f"<b>{name}</b>"), text], layout=dict(HALF))
            for name, text in zip(SIDES, self.texts, strict=True)
        ]
        legend = MarkupWidget(content=svg.html(svg.tag("style", GENERATED_STYLE), draw_probability_legend()))
        row = ipywidgets.HBox([self._choice, seed, new_seed], layout={"flex_flow": "row wrap"})
        buttons = ipywidgets.HBox([self._play_button, self._stop_button, self._status])
        return row, box, buttons, self._alert, self._changes, ipywidgets.HBox(sides), legend

    def _check(self) -> None:
        if hasattr(self, "_play_button"):
            both = self._both
            self._valid = both is not None
            if both is not None:
                self._follow_settings(*both)
            self._buttons()
            self._changes.value = self.forms.describe_changes()
            if self.pair is None:
                for text in self.texts:  # the prompt
                    text.send_all({})

    def _buttons(self) -> None:
        self._play_button.disabled = self.running or not self._valid
        self._stop_button.disabled = not self.running
