"""Show a prompt, a model, the settings of one request and its streaming text, or two such columns and their
comparison."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.playground.columns import SettingsColumns, columns_box
from workbench.widgets.playground.comparison_picture import draw_comparison
from workbench.widgets.playground.data import SIDES, BackgroundPlay, PlayedRequest
from workbench.widgets.playground.difference import TextDifference, compare_texts
from workbench.widgets.playground.experiment_panel import ExperimentPanel
from workbench.widgets.playground.history import PlayHistory, draw_history, play_figures
from workbench.widgets.playground.picture import MARK, ExperimentCopy, draw_figures, draw_text, draw_texts
from workbench.widgets.playground.presets import ANY_PAIR, ENGINE_PRESETS, GREEDY, PairPreset, all_presets, find_pair
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.playground.settings import QUESTION, as_python, initial_experiment, single_prompt_workload
from workbench.widgets.settings_form.form import error_markup
from workbench.widgets.tokens.text import GENERATED_STYLE, draw_probability_legend, draw_token
from workbench.widgets.view import GrowingPicture, MarkupWidget, PictureWidget, button

NO_PRESET, MORE = "choose a pair", "more, from the zoo"
NARROW = {"width": "7em"}  # a dict, so that each button gets its own layout and can close it
WRAPPED = {"flex_flow": "row wrap"}
# Fixed heights, so that nothing below moves when a message appears.
STATUS_PLACE = {"flex": "1 1 16em", "min_width": "0", "height": "30px", "overflow": "hidden auto"}
ERROR_PLACE = {"height": "30px", "overflow": "hidden auto", "margin": "0"}
NUM_SEEDS = 1_000_000  # new seeds are short enough to copy by hand


class Playground(PictureWidget):
    """A view that plays one prompt under any experiment's settings; the tokens are shaded by probability.

    With `beside` there are two columns, played one after the other with one seed and compared by token ids (both models
    need one vocabulary): `difference` is their first token that differs. Both columns begin greedy; `beside` is the
    name of a pair of settings (`preset`), or the changes of the right one, as {"cache.format": "int4"}. Experiments of
    the pair are written to new files in `folder`.

    `given` is an Experiment, the path of its YAML file, a model's name, or a runner; default: the demo model on the
    backend eager, which needs no compilation. Sampling settings apply to the next run at once; other settings load a
    new runner in the background. `run`, `stop`, `reset`, `restore` (a play of the `history`, by its number) and
    `run_experiment` are the buttons' methods; `settings` has the form of each column, `experiments` its experiment and
    `columns` its output; `experiment`, `played` and `last`, the last played experiment, are the first column's. Observe
    `prompt`, `running`, and `output`, the first sample's text, which is complete before `running` becomes false. With
    `new_seed` each run draws a new `seed` first, which is shown and copied with the settings and reproduces the tokens;
    a given Experiment keeps its own seed.
    """

    prompt = traitlets.Unicode()
    preset = traitlets.Unicode()
    running = traitlets.Bool(False)
    output = traitlets.Unicode()
    seed = traitlets.Int(0, min=0)
    new_seed = traitlets.Bool(True)
    history = traitlets.List().tag(sync=True)  # plays as JSON, the newest first

    def __init__(
        self, given: Any = None, prompt: str | None = None, *, beside: str | Mapping[str, Any] | None = None,
        folder: Path | str = "playground",
    ):  # fmt: skip
        from workbench.stop_button import install_stop_handler

        install_stop_handler()
        self._runners, self._playing = RunnerCache(), None
        self._drawing = threading.RLock()  # so that a picture shows one run only
        self._first, self._marked = 1, None
        self._given = initial_experiment(given, prompt, self._runners)
        pair, self._initial = None, (self._given,)
        if beside is not None:
            pair, self._given = find_pair(beside), self._given.single(GREEDY, "Playground")
            self._initial = pair.experiments(self._given)
        self._named = pair if isinstance(beside, str) else None  # the preset of the initial settings
        prompt, seed = self._given.workload.prompts[0], self._given.sampling.seed
        super().__init__(prompt=prompt, seed=seed, new_seed=self._draws_seeds)
        self.texts = [GrowingPicture(lambda n=n: svg.html(self._draw_text(n))) for n in range(len(self._initial))]
        self._history, self.plays = PlayHistory(), MarkupWidget()
        self._applied: PairPreset | None = None  # the preset chosen last; None while its settings are written
        self._is_following = False  # while the preset's name is set from the settings, not the other way round
        self.panel = None if pair is None else ExperimentPanel(lambda: self.experiments, Path(folder), self.keep)
        self.copied = ExperimentCopy() if pair is None else None
        controls = self._controls()
        self.settings = SettingsColumns(self._initial, self._check)
        self.plays.on_pick(lambda key: self.restore(int(key)))
        if pair is not None:
            self.settings.show_changes()
            self._ask(self._named)
            self._applied = self._named
        self.observe(lambda _: self._check(), ["prompt", "seed"])
        self.observe(lambda change: self._apply(change["new"]), "preset")
        self._draw_history()
        self._check()
        legend = MarkupWidget(content=svg.html(svg.tag("style", GENERATED_STYLE), draw_probability_legend()))
        export = ExportButtons("history", csv=self._history.csv, json=self._history.json)
        history = _titled("History", self.plays, export)
        settings = _titled("Settings", self.settings.widget)
        if self.copied is not None:
            self.show(*controls, below=(self.texts[0], legend, *settings, self.copied, *history))
        elif self.panel is not None:  # the settings are last, because a group is long and does not scroll
            below = (*history, *_titled("Experiment", self.panel), *settings)
            self.show(*controls, columns_box(self.texts), legend, below=below)

    @property
    def columns(self) -> tuple[PlayedRequest, ...]:
        """Return the output of each column."""
        return self._playing.played if self._playing is not None else (PlayedRequest(str),) * len(self._initial)

    @property
    def played(self) -> PlayedRequest:
        return self.columns[0]

    @property
    def difference(self) -> TextDifference:
        return compare_texts(*self.columns) if len(self.columns) > 1 else TextDifference()

    @property
    def experiments(self) -> Any:
        """Return the present experiment of each column, or None with the errors shown at their fields."""
        values = self._given.model_dump(mode="json", include={"question", "measure"})
        return self.settings.experiments({**values, "workload": single_prompt_workload(self.prompt)}, self.seed)

    @property
    def experiment(self) -> Any:
        return (self.experiments or (None,))[0]

    @property
    def last(self) -> Any:
        return None if self._playing is None else self._playing.generations[0].experiment

    def run(self) -> None:
        """Play the present settings in the background; do nothing while a play runs, or if a setting is invalid."""
        if self.running or self.experiments is None:
            return
        if self.new_seed:
            self.seed = random.SystemRandom().randrange(NUM_SEEDS)
        experiments = self.experiments
        with self._drawing:
            self._alert.value, self._marked = "", None
            self._first = (self._first + 1) % len(self._initial)  # columns take turns: the order may affect times
            self._playing = playing = BackgroundPlay(
                experiments, self._runners, self.throttle.mark, self._ended, self._first
            )
            # Clear the text before `running` is set, so that the last text cannot be taken for the new one.
            self._send_texts({})
            self.output = ""
            self.running = True
            self._check()
        playing.start()
        self.throttle.mark()

    def stop(self) -> None:
        """Stop the play within a step or two, or the loading of its runner at once; the text so far stays."""
        if self._playing is not None:
            self._playing.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the play has ended, at most `seconds`; return whether it has. The stop button stops the play."""
        return self._playing is None or self._playing.wait(seconds)

    def reset(self) -> None:
        """Stop the play, and show the initial settings and their question, the initial prompt and seed, and no text."""
        self.stop()
        with self._drawing:
            self._playing, self.running = None, False
            self.prompt, self.seed = self._given.workload.prompts[0], self._given.sampling.seed
            self.new_seed, self._applied = self._draws_seeds, None
            self.settings.write(*self._initial_values)
            if self.panel is not None:
                self._ask(self._named)
            self._alert.value, self._applied = "", self._named
            self.redraw()
            self._send_texts({})
            self._check()

    def restore(self, number: int) -> None:
        """Restore prompt, seed and settings of a play of the history by its number; `new_seed` is switched off."""
        entry = self._history.find(number)
        self.prompt, self.seed, self.new_seed = entry.prompt, entry.seed, False
        self.settings.write(*entry.settings)

    def run_experiment(self) -> Any:
        """Write the experiment of both columns and run it in a process; return the run, which has `wait()`.

        Raises:
            WorkbenchError: there is one column.
        """
        if self.panel is None:
            raise WorkbenchError('Playground: an experiment compares two columns; give beside="INT8 KV cache", say')
        return self.panel.run()

    def picture(self) -> str:
        parts = [self._draw_figures(), draw_texts(self.columns, self._played_prompt, self.difference.position)]
        if self.panel is not None:
            parts = [*reversed(parts), self._draw_plays(), self.panel.picture()]
        elif self._history.entries:
            parts.append(self._draw_plays())
        return svg.html(*parts)

    def redraw(self) -> None:
        with self._drawing:
            self._draw()

    def close(self) -> None:
        """Stop the play and the experiment, and free the models."""
        self.stop()
        if (panel := getattr(self, "panel", None)) is not None:
            panel.stop()
        super().close()
        if hasattr(self, "settings"):  # absent where `__init__` raised early
            self.settings.close()
        self._runners.close()
        self._playing = None

    @property
    def _draws_seeds(self) -> bool:
        """Return whether each run draws a new seed at first: a given experiment keeps its own."""
        return self._given.question == QUESTION

    @property
    def _initial_values(self) -> list[dict[str, Any]]:
        return [each.model_dump(mode="json", exclude={"workload"}) for each in self._initial]

    @property
    def _played_prompt(self) -> str:
        return self.prompt if self.last is None else self.last.workload.prompts[0]

    def _draw_figures(self) -> str:
        playing = self._playing
        if self.panel is None:
            return draw_figures(self.played, None if playing is None else self.last.sampling.seed)
        first, others = (0, None) if playing is None else (playing.first, playing.others_share)
        return draw_comparison(self.columns, self.difference, first, others, playing is not None and not self.running)

    def _draw_text(self, column: int) -> str:
        side = "" if self.panel is None else SIDES[column]
        return draw_text(self.columns[column], self._played_prompt, side, self.difference.position)

    def _draw_plays(self) -> str:
        return draw_history(self._history.entries, self._initial_values[0])

    def _draw_history(self) -> None:
        self.history, self.plays.content = self._history.as_values(), svg.html(self._draw_plays())

    def _draw(self) -> None:
        status = self._playing.status if self._playing is not None else ""
        self._status.value = f'<span role="status">{escape(status)}</span>'
        self.output = self.played.text()
        self.shown.content = svg.html(self._draw_figures())
        position = self.difference.position
        is_marked_anew, self._marked = position != self._marked, position
        for text, played in zip(self.texts, self.columns, strict=True):
            samples = dict(played.tokens_by_sample)
            if is_marked_anew or {f"s{sample}" for sample in samples} != text.region_names:
                text.send_all({f"s{sample}": len(tokens) for sample, tokens in samples.items()})
            for sample, tokens in samples.items():
                marked = position if sample == 0 else None
                text.append(f"s{sample}", len(tokens), lambda at, n=sample, all=tokens, m=marked: [
                    draw_token(n, index, token, MARK if index == m else "") for index, token in enumerate(all[at:], at)
                ])  # fmt: skip

    def _send_texts(self, counts: Mapping[str, int] | None = None) -> None:
        for text in self.texts:
            text.send_all(counts)

    def _ended(self, playing: BackgroundPlay) -> None:
        """Show the end of a play, in its thread; ignore one that was reset, which may end while another one plays."""
        self.throttle.flush()
        with self._drawing:
            if playing is not self._playing:
                return
            errors = []
            for n, error in enumerate(playing.errors):
                if error:
                    self.settings.show_error(n, error)
                    errors.append(error if self.panel is None else f"{SIDES[n]}: {error}")
            self._alert.value = error_markup("; ".join(errors) or playing.error)
            experiments = [each.experiment for each in playing.generations]
            difference = self.difference
            self._history.add(
                prompt=self._played_prompt, seed=experiments[0].sampling.seed,
                settings=tuple(each.model_dump(mode="json", exclude={"workload"}) for each in experiments),
                figures=tuple(map(play_figures, playing.played)), difference=difference.position,
                compared=difference.compared if self.panel is not None else None,
                remark="failed" if self._alert.value else "stopped" if playing.cancelled else "",
            )  # fmt: skip
            self._draw_history()
            self.running = False
            self._send_texts()
            self.shown.content = svg.html(self._draw_figures())
            self._buttons()
        self.keep()

    def _apply(self, name: str) -> None:
        """Set both columns to a preset, or show why it cannot run here."""
        if self._is_following or name in ("", NO_PRESET):
            return
        if self.panel is None:
            raise WorkbenchError(f"preset: {name!r} is a pair; give beside={name!r} to Playground")
        if name == MORE:
            self._choice.options = [NO_PRESET, *all_presets()]
            self.preset = NO_PRESET
            return
        preset = find_pair(name)
        if problem := preset.problem(self._given):
            self._alert.value = error_markup(f"{name} cannot run here: {problem}")
            return
        self._alert.value, self._applied = "", None
        self.settings.write(*(side.model_dump(mode="json") for side in preset.experiments(self._given)))
        self.settings.show_changes()
        self._ask(preset)
        self._applied = preset

    def _ask(self, preset: PairPreset | None, keep_edits: bool = False) -> None:
        """Show the question of a preset that both columns have, or the general question."""
        assert self.panel is not None
        name, *texts = ("pair", *ANY_PAIR) if preset is None else (preset.name, preset.question, preset.rule)
        self.panel.ask(name, *texts, keep_edits=keep_edits)
        chosen, self._is_following = NO_PRESET if preset is None else name, True
        if chosen not in self._choice.options:
            self._choice.options = [NO_PRESET, *all_presets()]
        self._choice.value = self.preset = chosen
        self._is_following = False

    def _follow_settings(self, left: Any, right: Any) -> None:
        """Show the preset's question while the settings match the preset, else the general question."""
        preset = self._applied
        if preset is not None and self.panel is not None:
            is_its_pair = preset.describes(self._given, left, right)
            if is_its_pair != (self.panel.name == preset.name):
                self._ask(preset if is_its_pair else None, keep_edits=True)

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        box = ipywidgets.Textarea(description="prompt", rows=4, layout={"width": "auto"}, continuous_update=False)
        seed = ipywidgets.BoundedIntText(description="seed", min=0, max=2**63 - 1, layout={"width": "13em"})
        new_seed = ipywidgets.Checkbox(description="new seed each run", indent=False, layout={"width": "auto"})
        new_seed.tooltip = "off: the seed stays, and the same settings give the same tokens again"
        self._run_button = button(self.run, "Run", icon="play", button_style="primary", layout=NARROW)
        self._stop_button = button(self.stop, "Stop", icon="stop", layout=NARROW)
        reset = button(self.reset, "Reset", icon="undo", layout=NARROW)
        self._status, self._alert = ipywidgets.HTML(layout=STATUS_PLACE), ipywidgets.HTML(layout=ERROR_PLACE)
        self.linked("prompt", box)
        buttons = [self._run_button, self._stop_button, reset]
        seeds = [self.linked("seed", seed), self.linked("new_seed", new_seed), self._status]
        if self.panel is None:
            return box, ipywidgets.HBox([*buttons, *seeds], layout=WRAPPED), self._alert
        names = [preset.name for preset in ENGINE_PRESETS]
        self._choice = ipywidgets.Dropdown(
            options=[NO_PRESET, *names, MORE], description="pair", layout={"width": "26em"},
            tooltip="named pairs of settings; both columns are set",
        )  # fmt: skip
        self._choice.observe(lambda change: setattr(self, "preset", change["new"]), "value")
        self._changes = ipywidgets.HTML(layout=STATUS_PLACE)
        first = ipywidgets.HBox([self._choice, *seeds], layout=WRAPPED)
        return first, box, ipywidgets.HBox([*buttons, self._changes], layout=WRAPPED), self._alert

    def _check(self) -> None:
        if not hasattr(self, "settings"):  # the forms are being built
            return
        shown = self.experiments
        self._is_valid = shown is not None
        self._buttons()
        if self.copied is not None:
            self.copied.set_texts(*("", "") if shown is None else (shown[0].to_yaml(), as_python(shown[0])))
        else:
            if shown is not None:
                self._follow_settings(*shown)
            self._changes.value = self.settings.describe_changes()
        if self._playing is None:
            self._send_texts({})

    def _buttons(self) -> None:
        self._run_button.disabled = self.running or not self._is_valid
        self._stop_button.disabled = not self.running


def _titled(title: str, *parts: Any) -> tuple[Any, ...]:
    return ipywidgets.HTML(f"<b>{title}</b>"), *parts
