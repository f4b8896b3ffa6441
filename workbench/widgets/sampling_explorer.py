"""The next token's distribution at any position of a text, and what each filter makes of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets
from pydantic import ValidationError

from workbench.errors import WorkbenchError, in_words
from workbench.request import Request, SamplingParameters
from workbench.widgets import kit
from workbench.widgets.sampling_picture import Word, distribution, strip
from workbench.widgets.sampling_seen import MOST_BYTES, Seen, Text, see
from workbench.widgets.token_text import speller
from workbench.widgets.view import View

KNOBS = {  # least, most, step of each slider; what is given may lie beyond
    "temperature": (0.0, 2.0, 0.05),
    "top_k": (0, 100, 1),
    "top_p": (0.01, 1.0, 0.01),
    "min_p": (0.0, 1.0, 0.01),
    "repetition_penalty": (0.5, 2.0, 0.05),
    "presence_penalty": (-2.0, 2.0, 0.1),
    "frequency_penalty": (-2.0, 2.0, 0.1),
}
AROUND = 48  # tokens of the text that are shown before and after the position


class SamplingExplorer(View):
    """`SamplingExplorer(runner, "def f(")` generates and shows every position; `SamplingExplorer(logits)` shows an
    array [vocab] or [token vocab], with the ids of the text as `prompt` and `output`, and `texts` or a `tokenizer` to
    name tokens by.

    With a runner `output` (a text or ids) is taken as it is, in place of a generation. `sampling` are any parameters of
    a request; those with sliders are traits: `explorer.top_p = 0.9`. `explorer.parameters` are the present ones. Draws
    are those that requests with seeds `seed`, `seed + 1`, ... make at this position.
    """

    position = traitlets.Int(1)
    temperature = traitlets.Float(1.0)
    top_k = traitlets.Int(0)
    top_p = traitlets.Float(1.0)
    min_p = traitlets.Float(0.0)
    repetition_penalty = traitlets.Float(1.0)
    presence_penalty = traitlets.Float(0.0)
    frequency_penalty = traitlets.Float(0.0)
    seed = traitlets.Int(0)
    draws = traitlets.Int(1000, min=0, max=100_000)
    bars = traitlets.Int(25, min=1, max=200)
    token = traitlets.Int(-1, help="the id of a token that is shown however unlikely it is")
    problem = traitlets.Unicode(help="why there is nothing to see")

    def __init__(
        self, source: Any, prompt: str | Sequence[int] | None = None, *, output: str | Sequence[int] | None = None,
        texts: Sequence[str] | None = None, tokenizer: Any = None, position: int | None = None, draws: int = 1000,
        bars: int = 25, **sampling: Any,
    ):  # fmt: skip
        self._given = _parameters({"max_tokens": 24, **sampling})
        mine = {name: getattr(self._given, name) for name in (*KNOBS, "seed")}
        super().__init__(draws=draws, bars=bars, **mine)
        self._runner = source if hasattr(source, "stream") else None
        self._text: Text | None = None
        self._ids: list[int] = []
        self._asked: Any = None
        self._work: threading.Thread | None = None
        self._wanted = position
        self._spell = speller(self._runner.tokenizer if self._runner is not None else tokenizer, texts)
        self._controls(self._runner is not None)
        if self._runner is None:
            if isinstance(prompt, str) or isinstance(output, str):
                raise WorkbenchError("prompt, output: beside logits give token ids; texts are for a runner")
            self._have(Text.of(source, prompt or (), output or ()))
        else:
            if prompt is None:
                raise WorkbenchError("prompt: a runner needs one, as text or token ids")
            self._request, self._forced = self._read(prompt), self._encoded(output)
            self.generate()
        self.redraw()
        self.watch(*KNOBS, "seed", "draws", "bars", "position", "token", "problem")

    @property
    def parameters(self) -> SamplingParameters:
        """What the sliders say, and what was given besides."""
        return _parameters(
            self._given.model_dump(exclude_unset=True) | {name: getattr(self, name) for name in (*KNOBS, "seed")}
        )

    def seen(self) -> Seen:
        """Figures of the present picture. WorkbenchError where there is none."""
        if self._text is None:
            raise WorkbenchError(self.problem or "the text is not there yet: explorer.wait()")
        spell = self._spell
        return see(self._text, self.position, self.parameters, self.draws, self.bars, self.token, spell)

    def generate(self) -> None:
        """Continue the prompt anew with the present parameters, in the background."""
        from workbench.widgets.live import Live

        if self._runner is None or self.working:
            return
        live = Live.of(self._runner)
        self.problem, self._text, self._ids = "", None, list(self._request.prompt_ids)
        if self._forced is None:
            request = Request(self._request.request_id, self._request.prompt_ids, self.parameters)
            self._asked = live.ask(request)
        self._work = threading.Thread(target=self._follow, args=(live,), name="sampling explorer", daemon=True)
        self._busy(True)
        self._work.start()

    def stop(self) -> None:
        """End the generation; what there is of it can be looked at."""
        if self._asked is not None:
            self._asked.stop()

    @property
    def working(self) -> bool:
        return self._work is not None and self._work.is_alive()

    def wait(self, seconds: float | None = None) -> SamplingExplorer:
        """Until the text is there, or so many seconds."""
        if self._work is not None:
            try:
                self._work.join(seconds)
            except KeyboardInterrupt:
                self.stop()
                raise
            self.redraw()
        return self

    def picture(self) -> str:
        text = self._text
        ids = text.ids if text is not None else tuple(self._ids)
        at = self.position if text is not None else len(ids)
        begin, end = max(0, at - AROUND), min(len(ids), at + AROUND)
        words = [Word(place, self._spell(ids[place]), place >= self._prompt_length) for place in range(begin, end)]
        parts = [strip(words, at, begin, len(ids) - end)] if ids else []
        try:
            if self.problem or text is not None:
                seen = self.seen()
                parts.append(f"<p>{escape(self._told(seen))}</p>")
                title = f"the distribution of the token at position {self.position}"
                parts.append(distribution(seen.sieves, seen.candidates, self.draws, seen.first, title))
            else:
                parts.append("<p>working …</p>")
        except Exception as error:
            parts.append(f'<p role="alert">{escape(in_words(error))}</p>')
        return kit.html(*parts)

    @property
    def _prompt_length(self) -> int:
        return len(self._text.prompt_ids if self._text is not None else self._request.prompt_ids)

    def _told(self, seen: Seen) -> str:
        last = seen.sieves[-1].bits if seen.sieves else seen.first[1]
        told = f"Position {self.position}: {seen.first[1]:.2f} bits before the filters, {last:.2f} after."
        if seen.chosen is not None:
            told += f" In the text stands {seen.chosen.name}: the model gives it {seen.chosen.before:.2%}, "
            told += f"after the filters it has {seen.chosen.after:.2%}."
        return told

    def _follow(self, live: Any) -> None:
        """In a thread of its own: what is generated, then its logits."""
        try:
            for event in self._asked if self._forced is None else ():
                if event.kind == "decoded":
                    self._ids.append(event.token_id)
                    self.pulse.mark()
                elif event.kind == "finished" and event.error:
                    raise WorkbenchError(event.error)
            prompt = len(self._request.prompt_ids)
            ids = [*self._ids, *(self._forced or ())]
            model = live.runner.model
            if (size := 4 * len(ids) * model.spec.vocab) > MOST_BYTES:
                raise WorkbenchError(f"prompt: the logits of its {len(ids):,} tokens would take {size / 2**30:.1f} GiB")
            logits = live.call(lambda runner: runner.model.logits(ids))
            self._have(Text.of(logits, ids[:prompt], ids[prompt:]))
        except Exception as error:
            self.problem = in_words(error)
        self._busy(False)
        self.redraw()
        self.keep()

    def _have(self, text: Text) -> None:
        self._text = text
        wanted = self._wanted if self._wanted is not None else len(text.prompt_ids) or text.first
        if self._wanted is not None and not text.first <= wanted <= text.last:
            raise WorkbenchError(f"position {wanted}: there are {text.first} to {text.last}")
        self._place.min, self._place.max = min(text.first, self._place.max), text.last
        self._place.min = text.first
        self.position = wanted
        self._wanted = None

    def _read(self, prompt: str | Sequence[int]) -> Request:
        if isinstance(prompt, str):
            return self._runner.read(prompt, {})[0]
        return Request("sampling-explorer", tuple(map(int, prompt)))

    def _encoded(self, output: str | Sequence[int] | None) -> list[int] | None:
        if not isinstance(output, str):
            return None if output is None else list(map(int, output))
        return self._runner.tokenizer.encode(output)

    def _controls(self, runs: bool) -> None:
        style, wide = {"description_width": "9.5em"}, {"width": "24em"}
        sliders = []
        for name, (least, most, step) in KNOBS.items():
            value = getattr(self, name)
            kind = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
            slider = kind(
                value=value, min=min(least, value), max=max(most, value), step=step, description=name.replace("_", " "),
                style=style, layout=wide,
            )  # fmt: skip
            traitlets.link((slider, "value"), (self, name))
            sliders.append(slider)
        self._place = ipywidgets.IntSlider(
            value=self.position, min=1, max=1, description="position", style=style, layout={"width": "48em"}
        )
        traitlets.link((self._place, "value"), (self, "position"))
        again = ipywidgets.Button(description="Draw again", tooltip="the same draws with other seeds")
        again.on_click(lambda _: self.set_trait("seed", (self.seed + max(1, self.draws)) % 2**63))
        self._run = ipywidgets.Button(description="Generate", tooltip="continue the prompt with these settings")
        self._run.on_click(lambda _: self.generate())
        self._halt = ipywidgets.Button(description="Stop", disabled=True)
        self._halt.on_click(lambda _: self.stop())
        self.shown.observe(self._picked, "picked")
        buttons = [again, self._run, self._halt] if runs else [again]
        grid = ipywidgets.GridBox(sliders, layout={"grid_template_columns": "repeat(2, 25em)"})
        self.children = (self._place, grid, ipywidgets.HBox(buttons), self.shown)

    def _busy(self, working: bool) -> None:
        self._run.disabled, self._halt.disabled = working, not working
        self._place.disabled = working

    def _picked(self, change: Any) -> None:
        kind, number = change["new"][:1], change["new"][1:]
        if kind == "t":
            self.position = int(number)
        elif kind == "c":
            self.token = int(number)

    @traitlets.validate(*KNOBS, "seed")
    def _valid(self, proposal: Any) -> Any:
        _parameters({proposal["trait"].name: proposal["value"]})
        return proposal["value"]


def _parameters(given: dict[str, Any]) -> SamplingParameters:
    try:
        found = SamplingParameters(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        raise WorkbenchError(f"{name}: {fault['msg']}" if name else fault["msg"]) from None
    if found.samples > 1:
        raise WorkbenchError("n, best_of, beams: the explorer looks at one sample; leave them out")
    return found
