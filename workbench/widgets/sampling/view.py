"""Show the next token's distribution at any position of a text, and the effect of each filter."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets
from pydantic import ValidationError

from workbench import svg
from workbench.errors import WorkbenchError, describe_error
from workbench.request import SamplingParameters
from workbench.units import format_percent
from workbench.widgets.recorded import Recorded
from workbench.widgets.sampling.data import BackgroundCompletion, PositionFigures, TextLogits, position_figures
from workbench.widgets.sampling.picture import ContextToken, draw_context, draw_distribution
from workbench.widgets.tokens.text import speller
from workbench.widgets.view import PictureWidget, button

SLIDERS = {  # minimum, maximum and step of each slider; given values may lie beyond
    "temperature": (0.0, 2.0, 0.05),
    "top_k": (0, 100, 1),
    "top_p": (0.01, 1.0, 0.01),
    "min_p": (0.0, 1.0, 0.01),
    "repetition_penalty": (0.5, 2.0, 0.05),
    "presence_penalty": (-2.0, 2.0, 0.1),
    "frequency_penalty": (-2.0, 2.0, 0.1),
}
CONTEXT_TOKENS = 48  # visible tokens of the text before and after the position
MAX_SEED = 2**63


class SamplingExplorer(PictureWidget):
    """A view of the next token's distribution: `SamplingExplorer(runner, "def f(")` generates a text and shows every
    position; `SamplingExplorer(logits)` shows an array [vocab] or [token vocab], with the token ids of the text as
    `prompt` and `output`, and `texts` or a `tokenizer` for the tokens' names.

    With a runner, a given `output` (a text or ids) replaces the generation. `sampling` are any parameters of a request;
    the ones with sliders are traits (`explorer.top_p = 0.9`), and `explorer.parameters` holds the present values. The
    draws are the ones of requests with the seeds `seed`, `seed + 1`, ... at this position.
    """

    engine_fields = ("_generation",)
    position = traitlets.Int(0)
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

    def __init__(
        self, source: Any, prompt: str | Sequence[int] | None = None, *, output: str | Sequence[int] | None = None,
        texts: Sequence[str] | None = None, tokenizer: Any = None, position: int | None = None, draws: int = 1000,
        bars: int = 25, **sampling: Any,
    ):  # fmt: skip
        super().__init__(draws=draws, bars=bars)
        self._given = _parameters({"max_tokens": 24, **sampling})
        for name in (*SLIDERS, "seed"):
            self.set_trait(name, getattr(self._given, name))
        runner = source if hasattr(source, "stream") else None
        self._token_text = speller(tokenizer if runner is None else runner.tokenizer, texts)
        self._text: TextLogits | None = None
        self._problem, self._wanted = "", position
        self._generation = None if runner is None else BackgroundCompletion(runner, prompt, output)
        self._controls()
        if runner is None:
            if isinstance(prompt, str) or isinstance(output, str):
                raise WorkbenchError("prompt, output: give token ids with logits; texts need a runner")
            self._set_text(TextLogits.from_array(source, prompt or (), output or ()))
        self.redraw()
        self.generate()
        self.watch(*SLIDERS, "seed", "draws", "bars", "position", "token")

    @property
    def parameters(self) -> SamplingParameters:
        """Return the sampling parameters: the sliders' values, and the parameters given without a slider."""
        mine = {name: getattr(self, name) for name in (*SLIDERS, "seed")}
        return _parameters(self._given.model_dump(exclude_unset=True) | mine)

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token ids of the text so far."""
        known = self._generation if self._text is None else self._text
        return () if known is None else tuple(known.ids)

    def figures(self) -> PositionFigures:
        """Return the figures of the present picture. Raises WorkbenchError while the text is missing."""
        if self._text is None:
            raise WorkbenchError(self._problem or "the text is still being generated: explorer.wait()")
        return position_figures(
            self._text, self.position, self.parameters, self.draws, self.bars, self.token, self._token_text
        )

    def generate(self) -> None:
        """Continue the prompt again with the present parameters, in the background."""
        if self._generation is not None and not self._generation.working:
            self._problem, self._text = "", None
            self._busy(True)
            self._generation.begin(self.parameters, self.throttle.mark, self._ended)

    def stop(self) -> None:
        """Stop the generation; the text so far is shown."""
        if self._generation is not None:
            self._generation.stop()

    def close(self) -> None:
        self.stop()
        super().close()

    def wait(self, seconds: float | None = None) -> SamplingExplorer:
        """Wait until the text is complete, at most `seconds`; return the view."""
        if self._generation is not None:
            self._generation.wait(seconds)
        return self

    def picture(self) -> str:
        text = self._text
        known = self._generation if text is None else text
        ids = self.ids
        prompt = 0 if known is None else len(known.prompt_ids)
        at = len(ids) if text is None else self.position
        begin, end = max(0, at - CONTEXT_TOKENS), min(len(ids), at + CONTEXT_TOKENS)
        words = [ContextToken(place, self._token_text(ids[place]), place >= prompt) for place in range(begin, end)]
        parts = [draw_context(words, at, begin, len(ids) - end)] if ids else []
        if text is None and not self._problem:
            return svg.html(*parts, "<p>working …</p>")
        try:
            seen = self.figures()
            title = f"distribution of the token at position {at}"
            parts.append(f"<p>{escape(_describe(seen, at))}</p>")
            parts.append(draw_distribution(seen.sieves, seen.candidates, self.draws, seen.first, title, self.width))
        except Exception as error:
            parts.append(f'<p role="alert">{escape(describe_error(error))}</p>')
        return svg.html(*parts)

    def _ended(self, text: TextLogits | None, problem: str) -> None:
        self._problem = problem
        try:
            if text is not None:
                self._set_text(text)
        except WorkbenchError as error:
            self._problem = str(error)
        self._busy(False)
        self.throttle.flush()
        self.keep()

    def _set_text(self, text: TextLogits) -> None:
        wanted = max(text.first_position, len(text.prompt_ids)) if self._wanted is None else self._wanted
        if not text.first_position <= wanted <= text.last_position:
            raise WorkbenchError(f"position {wanted}: this text has {text.first_position} to {text.last_position}")
        self._text, self._wanted = text, None
        self.steps.extend(text.first_position, text.last_position)
        self.position = wanted

    def _controls(self) -> None:
        style = {"description_width": "9.5em"}
        sliders = []
        for name, (least, most, step) in SLIDERS.items():
            value = getattr(self, name)
            kind = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
            slider = kind(
                value=value, min=min(least, value), max=max(most, value), step=step, description=name.replace("_", " "),
                style=style, layout={"width": "24em"},
            )  # fmt: skip
            sliders.append(self.linked(name, slider))
        self.steps = Recorded(self, "position")
        again = button(self._draw_again, "Draw again", tooltip="as many draws with other seeds")
        self._run = button(self.generate, "Generate", tooltip="continue the prompt with these settings")
        self._halt = button(self.stop, "Stop", disabled=True, tooltip="end the generation")
        self.shown.on_pick(self._picked)
        buttons = [again] if self._generation is None else [again, self._run, self._halt]
        grid = ipywidgets.GridBox(
            sliders, layout={"grid_template_columns": "repeat(auto-fill, 25em)", "max_width": "52em"}
        )
        self.children = (self.steps, grid, ipywidgets.HBox(buttons), self.shown)

    def _draw_again(self) -> None:
        self.seed = (self.seed + max(1, self.draws)) % MAX_SEED

    def _busy(self, working: bool) -> None:
        self._run.disabled, self._halt.disabled = working, not working
        self.steps.layout.display = "none" if working else None  # the text is not there yet

    def _picked(self, key: str) -> None:
        if key[:1] == "t":
            self.position = int(key[1:])
        elif key[:1] == "c":
            self.token = int(key[1:])

    @traitlets.validate(*SLIDERS, "seed")
    def _valid(self, proposal: Any) -> Any:
        _parameters({proposal["trait"].name: proposal["value"]})
        return proposal["value"]

    @traitlets.validate("position")
    def _validate_position(self, proposal: Any) -> int:
        text = getattr(self, "_text", None)
        if text is not None and not text.first_position <= proposal["value"] <= text.last_position:
            raise WorkbenchError(
                f"position {proposal['value']}: this text has {text.first_position} to {text.last_position}"
            )
        return proposal["value"]


def _describe(figures: PositionFigures, position: int) -> str:
    last = figures.sieves[-1].bits if figures.sieves else figures.first[1]
    caption = f"Position {position}: {figures.first[1]:.2f} bits before the filters, {last:.2f} after."
    if figures.chosen is None:
        return caption
    before, after = format_percent(figures.chosen.before), format_percent(figures.chosen.after)
    return f"{caption} In the text stands “{figures.chosen.name}”: the model gives it {before}, the filters {after}."


def _parameters(given: dict[str, Any]) -> SamplingParameters:
    try:
        found = SamplingParameters(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        raise WorkbenchError(f"{name}: {fault['msg']}" if name else fault["msg"]) from None
    if found.num_sequences > 1:
        raise WorkbenchError("n, best_of, beams: the explorer looks at one sample; leave them out")
    return found
