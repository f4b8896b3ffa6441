"""Show a prompt, a model, the settings of one request, and the text as it is generated."""

from __future__ import annotations

import threading
from html import escape
from typing import Any

import ipywidgets
import traitlets

from workbench.widgets import kit
from workbench.widgets.growing import Growing
from workbench.widgets.knobs.groups import alert
from workbench.widgets.playground.copied_text import CopiedText
from workbench.widgets.playground.experiment_text import as_python
from workbench.widgets.playground.kept_runners import KeptRunners
from workbench.widgets.playground.knobs import LEFT, beginning, known, one
from workbench.widgets.playground.picture import figures, words
from workbench.widgets.playground.played import Played
from workbench.widgets.playground.playing import Playing
from workbench.widgets.tokens.text import marked
from workbench.widgets.view import View

NARROW = ipywidgets.Layout(width="7em")


class Playground(View):
    """Play one prompt under any experiment's settings; the tokens come shaded by how probable they were.

    `given` is an Experiment, the path of one in YAML, a model's name, or a runner; with none of them the demo model on
    the lane eager, which has nothing to compile. Settings of sampling apply to the next run at once; others make a
    runner anew, in the background. `run`, `stop`, `reset`, `wait` are the buttons; `experiment` is what is set,
    `played` and `last` what came of what was played last. `settings` are the knobs. To be observed are `prompt`,
    `running`, and `output`, the text of the first sample, which is whole before `running` ends.
    """

    prompt = traitlets.Unicode()
    running = traitlets.Bool(False)
    output = traitlets.Unicode()

    def __init__(self, given: Any = None, prompt: str | None = None):
        from workbench.study.experiment import Experiment
        from workbench.widgets.knobs.knobs import Knobs
        from workbench.widgets.stop_button import hear_stop_button

        hear_stop_button()
        self._runners, self._playing = KeptRunners(), None
        self._present = threading.RLock()  # what is drawn is of one run
        self._begin = beginning(given, prompt, self._runners)
        self.last: Any = None  # the experiment that was played last
        super().__init__(prompt=self._begin.workload.prompts[0])
        self.text = Growing(lambda: kit.html(words(self.played, self._asked_prompt)))
        self._box = ipywidgets.Textarea(description="prompt", rows=4, layout={"width": "auto"}, continuous_update=False)
        self._go = ipywidgets.Button(description="Run", icon="play", button_style="primary", layout=NARROW)
        self._halt = ipywidgets.Button(description="Stop", icon="stop", layout=NARROW, disabled=True)
        self._again = ipywidgets.Button(description="Reset", icon="undo", layout=NARROW)
        self._doing, self._alert = ipywidgets.HTML(), alert("")
        self.copied = CopiedText()
        self.settings = Knobs(Experiment, LEFT, known(), changed=self._check)
        self.settings.buttons.value = "sampling"
        self.settings.write(self._begin.model_dump(mode="json"))
        traitlets.link((self, "prompt"), (self._box, "value"))
        self._go.on_click(lambda _: self.run())
        self._halt.on_click(lambda _: self.stop())
        self._again.on_click(lambda _: self.reset())
        self.observe(lambda _: self._check(), "prompt")
        buttons = ipywidgets.HBox([self._go, self._halt, self._again, self._doing])
        below = (self.text, ipywidgets.HTML("<b>Settings</b>"), self.settings.widget, self.copied)
        self.show(self._box, buttons, self._alert, below=below)

    @property
    def played(self) -> Played:
        return self._playing.played if self._playing is not None else Played(str)

    @property
    def experiment(self) -> Any:
        """Return the present experiment, or None with the errors shown at their fields."""
        values = self._begin.model_dump(mode="json", include={"question", "measure"})
        return self.settings.checked({**values, "workload": one(self.prompt)})

    def run(self) -> None:
        """Play what is set, in the background. Nothing where something is wrong, or one is playing."""
        experiment = None if self.running else self.experiment
        if experiment is None:
            return
        with self._present:
            self.last, self._alert.value = experiment, ""
            self._playing = playing = Playing(experiment, self._runners, self.pulse.mark, self._ended)
            # Before anybody can see that it runs: nothing of the last text is taken for this one's.
            self.text.whole({})
            self.output = ""
            self._halt.disabled, self._go.disabled = False, True
            self.running = True
        playing.start()
        self.pulse.mark()

    def stop(self) -> None:
        """End what is playing within a step or two, or the making of its runner at once; what has come stays."""
        if self._playing is not None:
            self._playing.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is over, or so many seconds: whether it is. The kernel's stop button ends it."""
        return self._playing is None or self._playing.wait(seconds)

    def reset(self) -> None:
        """As it was made: its settings, its prompt, and no text. What plays ends by itself, unseen."""
        self.stop()
        with self._present:
            self._playing, self.last, self.running = None, None, False
            self._halt.disabled = True
            self.prompt = self._begin.workload.prompts[0]
            self.settings.write(self._begin.model_dump(mode="json"))
            self._alert.value = ""
            self.copied.tell("", "")
            self.redraw()
            self.text.whole({})
            self._check()

    def picture(self) -> str:
        return kit.html(figures(self.played), words(self.played, self._asked_prompt))

    def redraw(self) -> None:
        with self._present:
            self._draw()

    def _draw(self) -> None:
        played = self.played
        doing = self._playing.doing if self._playing is not None else ""
        self._doing.value = f'<span role="status">{escape(doing)}</span>'
        self.output = played.text()
        self.shown.content = kit.html(figures(played))
        pieces = dict(played.pieces)
        if {f"s{sample}" for sample in pieces} != self.text.names:
            self.text.whole({f"s{sample}": len(each) for sample, each in pieces.items()})
        for sample, each in pieces.items():
            self.text.grow(f"s{sample}", len(each), lambda at, n=sample, all=each: [
                marked(n, index, piece) for index, piece in enumerate(all[at:], at)
            ])  # fmt: skip

    def close(self) -> None:
        self.stop()
        super().close()

    @property
    def _asked_prompt(self) -> str:
        return self.prompt if self.last is None else self.last.workload.prompts[0]

    def _check(self) -> None:
        self._go.disabled = self.experiment is None or self.running
        if self.last is None and self._playing is None:
            self.text.whole({})

    def _ended(self, playing: Playing) -> None:
        """In the thread that played. One that was reset may end while another plays, whose widget this is now."""
        self.pulse.flush()
        with self._present:
            if playing is not self._playing:
                return
            self.text.whole()
            if playing.error:
                self.settings.complain(_named(playing.error), playing.error)
                self._alert.value = alert(playing.error).value
            self.copied.tell(playing.experiment.to_yaml(), as_python(playing.experiment))
            self._halt.disabled, self._go.disabled = True, False
            self.running = False
        self.keep()


def _named(error: str) -> tuple[str, ...]:
    """The path of a setting, where an error begins with one."""
    return tuple(error.partition(":")[0].partition(" ")[0].split("."))
