"""Show a prompt, a model, the settings of one request, and the text as it is generated."""

from __future__ import annotations

import random
import threading
from html import escape
from typing import Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.widgets.compare.export import ExportButtons
from workbench.widgets.playground.data import BackgroundGeneration, PlayedRequest
from workbench.widgets.playground.history import PlayHistory, draw_history, play_figures
from workbench.widgets.playground.picture import ExperimentCopy, draw_figures, draw_text
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.playground.settings import (
    EXCLUDED_SETTINGS,
    QUESTION,
    as_python,
    initial_experiment,
    setting_suggestions,
    single_prompt_workload,
)
from workbench.widgets.settings_form.form import error_markup
from workbench.widgets.tokens.text import draw_token
from workbench.widgets.view import GrowingPicture, MarkupWidget, PictureWidget

NARROW = {"width": "7em"}  # a layout for each button: what is closed closes its own
# Of a fixed height: nothing below moves when something is said here.
STATUS_PLACE = {"flex": "1 1 0", "min_width": "0", "height": "30px", "overflow": "hidden auto"}
ERROR_PLACE = {"height": "30px", "overflow": "hidden auto", "margin": "0"}
NUM_SEEDS = 1_000_000  # new ones are so short that a reader can copy them


class Playground(PictureWidget):
    """Play one prompt under any experiment's settings; the tokens come shaded by how probable they were.

    `given` is an Experiment, the path of one in YAML, a model's name, or a runner; with none of them the demo model on
    the backend eager, which has nothing to compile. Settings of sampling apply to the next run at once; others make a
    runner anew, in the background. `run`, `stop`, `reset`, `wait` are the buttons; `settings` is the form and
    `experiment` the experiment that is set in it; `last` is the experiment that was played last and `played` its
    output. Observe `prompt`, `running`, and `output`, the text of the first sample, which is whole before `running`
    ends. With `new_seed` each run sets another seed first; it is shown and copied with the settings, and gives the same
    tokens again. An Experiment that is given keeps its own. `restore` sets a play of the `history` again.
    """

    prompt = traitlets.Unicode()
    running = traitlets.Bool(False)
    output = traitlets.Unicode()
    new_seed = traitlets.Bool(True)
    history = traitlets.List().tag(sync=True)  # what was played, the newest first, as JSON

    def __init__(self, given: Any = None, prompt: str | None = None):
        from workbench.experiment.experiment import Experiment
        from workbench.stop_button import install_stop_handler
        from workbench.widgets.settings_form.form import SettingsForm

        install_stop_handler()
        self._runners, self._playing = RunnerCache(), None
        self._drawing = threading.RLock()  # what is drawn is of one run
        self._initial = initial_experiment(given, prompt, self._runners)
        self.last: Any = None  # the experiment that was played last
        super().__init__(prompt=self._initial.workload.prompts[0], new_seed=self._initial.question == QUESTION)
        self.text = GrowingPicture(lambda: svg.html(draw_text(self.played, self._played_prompt)))
        self._box = ipywidgets.Textarea(description="prompt", rows=4, layout={"width": "auto"}, continuous_update=False)
        self._run_button = ipywidgets.Button(description="Run", icon="play", button_style="primary", layout=NARROW)
        self._stop_button = ipywidgets.Button(description="Stop", icon="stop", layout=NARROW, disabled=True)
        self._reset_button = ipywidgets.Button(description="Reset", icon="undo", layout=NARROW)
        self._seed_box = ipywidgets.Checkbox(description="new seed each run", indent=False, layout={"width": "auto"})
        self._seed_box.tooltip = "off: the seed below stays, and the same settings give the same tokens again"
        self._doing, self._alert = ipywidgets.HTML(layout=STATUS_PLACE), ipywidgets.HTML(layout=ERROR_PLACE)
        self.copied = ExperimentCopy()
        self.settings = SettingsForm(Experiment, EXCLUDED_SETTINGS, setting_suggestions(), on_change=self._check)
        self.settings.buttons.value = "sampling"
        self.settings.write(self._initial.model_dump(mode="json"))
        traitlets.link((self, "prompt"), (self._box, "value"))
        traitlets.link((self, "new_seed"), (self._seed_box, "value"))
        self._run_button.on_click(lambda _: self.run())
        self._stop_button.on_click(lambda _: self.stop())
        self._reset_button.on_click(lambda _: self.reset())
        self.observe(lambda _: self._check(), "prompt")
        self._history, self.plays = PlayHistory(), MarkupWidget()
        self.plays.on_pick(lambda key: self.restore(int(key)))
        export = ExportButtons("history", csv=self._history.csv, json=self._history.json)
        self._draw_history()
        self._check()
        buttons = ipywidgets.HBox(
            [self._run_button, self._stop_button, self._reset_button, self._seed_box, self._doing]
        )
        below = (self.text, ipywidgets.HTML("<b>Settings</b>"), self.settings.widget, self.copied,
                 ipywidgets.HTML("<b>History</b>"), self.plays, export)  # fmt: skip
        self.show(self._box, buttons, self._alert, below=below)

    @property
    def played(self) -> PlayedRequest:
        return self._playing.played if self._playing is not None else PlayedRequest(str)

    @property
    def experiment(self) -> Any:
        """Return the present experiment, or None with the errors shown at their fields."""
        values = self._initial.model_dump(mode="json", include={"question", "measure"})
        return self.settings.validated({**values, "workload": single_prompt_workload(self.prompt)})

    def run(self) -> None:
        """Play what is set, in the background. Nothing where something is wrong, or one is playing."""
        if self.running or self.experiment is None:
            return
        if self.new_seed:
            self.settings.write({"sampling": {"seed": random.SystemRandom().randrange(NUM_SEEDS)}})
        experiment = self.experiment
        with self._drawing:
            self.last, self._alert.value = experiment, ""
            self._playing = playing = BackgroundGeneration(experiment, self._runners, self.throttle.mark, self._ended)
            # Before the view shows that it runs: nothing of the last text is taken for this one's.
            self.text.send_all({})
            self.output = ""
            self._stop_button.disabled, self._run_button.disabled = False, True
            self.running = True
        playing.start()
        self.throttle.mark()

    def stop(self) -> None:
        """End what is playing within a step or two, or the making of its runner at once; what has come stays."""
        if self._playing is not None:
            self._playing.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, or so many seconds; return whether it has. The kernel's stop button ends it."""
        return self._playing is None or self._playing.wait(seconds)

    def reset(self) -> None:
        """Show the initial settings, the initial prompt, and no text. What plays ends by itself, unseen."""
        self.stop()
        with self._drawing:
            self._playing, self.last, self.running = None, None, False
            self._stop_button.disabled = True
            self.prompt = self._initial.workload.prompts[0]
            self.settings.write(self._initial.model_dump(mode="json"))
            self._alert.value = ""
            self.redraw()
            self.text.send_all({})
            self._check()

    def restore(self, number: int) -> None:
        """Set the prompt, the seed and the settings of a play again; the seed is kept from then on."""
        entry = self._history.find(number)
        self.prompt, self.new_seed = entry.prompt, False
        self.settings.write(entry.settings[0])

    def picture(self) -> str:
        plays = self._history.entries
        return svg.html(
            draw_figures(self.played, self._played_seed), draw_text(self.played, self._played_prompt),
            draw_history(plays, self._initial_values) if plays else "",
        )  # fmt: skip

    def redraw(self) -> None:
        with self._drawing:
            self._draw()

    def _draw(self) -> None:
        played = self.played
        doing = self._playing.status if self._playing is not None else ""
        self._doing.value = f'<span role="status">{escape(doing)}</span>'
        self.output = played.text()
        self.shown.content = svg.html(draw_figures(played, self._played_seed))
        pieces = dict(played.tokens_by_sample)
        if {f"s{sample}" for sample in pieces} != self.text.region_names:
            self.text.send_all({f"s{sample}": len(each) for sample, each in pieces.items()})
        for sample, each in pieces.items():
            self.text.append(f"s{sample}", len(each), lambda at, n=sample, all=each: [
                draw_token(n, index, piece) for index, piece in enumerate(all[at:], at)
            ])  # fmt: skip

    def close(self) -> None:
        """End what plays, and let go of the models."""
        self.stop()
        super().close()
        if hasattr(self, "settings"):  # one that was refused at birth has none
            self.settings.close()
        self._runners.close()
        self._playing = None

    @property
    def _initial_values(self) -> dict[str, Any]:
        return self._initial.model_dump(mode="json", exclude={"workload"})

    def _draw_history(self) -> None:
        self.history = self._history.as_values()
        self.plays.content = svg.html(draw_history(self._history.entries, self._initial_values))

    @property
    def _played_prompt(self) -> str:
        return self.prompt if self.last is None else self.last.workload.prompts[0]

    @property
    def _played_seed(self) -> int | None:
        return None if self.last is None else self.last.sampling.seed

    def _check(self) -> None:
        shown = self.experiment
        self._run_button.disabled = shown is None or self.running
        self.copied.set_texts(*("", "") if shown is None else (shown.to_yaml(), as_python(shown)))
        if self.last is None and self._playing is None:
            self.text.send_all({})

    def _ended(self, playing: BackgroundGeneration) -> None:
        """In the thread that played. One that was reset may end while another plays, whose widget this is now."""
        self.throttle.flush()
        with self._drawing:
            if playing is not self._playing:
                return
            self.text.send_all()
            if playing.error:
                self.settings.show_error(_setting_path(playing.error), playing.error)
                self._alert.value = error_markup(playing.error)
            self._history.add(
                prompt=self._played_prompt, seed=self.last.sampling.seed, figures=(play_figures(playing.played),),
                settings=(self.last.model_dump(mode="json", exclude={"workload"}),),
                remark="failed" if playing.error else "stopped" if playing.stopped else "",
            )  # fmt: skip
            self._draw_history()
            self._stop_button.disabled, self._run_button.disabled = True, False
            self.running = False
        self.keep()


def _setting_path(error: str) -> tuple[str, ...]:
    """Return the path of a setting, where an error begins with one."""
    return tuple(error.partition(":")[0].partition(" ")[0].split("."))
