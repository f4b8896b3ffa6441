"""Follow a prompt through a running model stage by stage, down to one number; switch heads and layers off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.widgets.recorded import Recorded
from workbench.widgets.single_request import single_request
from workbench.widgets.token_path.ablation_picture import draw_switches, draw_texts
from workbench.widgets.token_path.data import TokenPathData
from workbench.widgets.token_path.heads_picture import draw_head_grid, draw_large_head, grid_width
from workbench.widgets.token_path.lens_picture import draw_lens, draw_lens_top, positions_shown
from workbench.widgets.token_path.picture import draw_page, draw_path, draw_tokens
from workbench.widgets.tokens.text import speller
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner
    from workbench.inspect.forward_pass import ForwardPass
    from workbench.request import Request

MIN_LARGE_WIDTH = 360  # pixels needed right of the small maps for the large one
SECTIONS = (("path", "path"), ("logit lens", "lens"), ("heads", "heads"), ("switch off", "ablation"))
HINTS = {
    "path": "Pick a token, a cell of the strip, or a cell of the matrix; the number below it is derived.",
    "lens": "What the head would say after each layer. Pick a cell: its five likeliest tokens.",
    "heads": "The attention of every head: rows are queries, columns keys. Pick one: it is shown large.",
    "ablation": "Switch a head or a layer off, and the prompt is continued without it.",
}


class TokenPath(PictureWidget):
    """A view of a token's path: `TokenPath(runner, "def add(a, b):")` follows the prompt through the model of `runner`:
    every stage of every layer, then the filters and the draw of `sampling` (default: temperature 0.7, top k 40), or of
    a given Request.

    `section` selects the path, the logit lens, all heads, or the text with heads and layers switched off (`heads_off`
    as (layer, head), `layers_off`), continued by `max_tokens` tokens. The blocks of the running model are called one by
    one, outside the engine's steps; keys and values are in full precision.
    """

    engine_fields = ("_found", "_tokenizer")
    section = traitlets.Enum([name for _, name in SECTIONS], default_value="path")
    step = traitlets.Int(0)
    position = traitlets.Int(0)
    column = traitlets.Int(-1, help="column of the chosen number; -1 is the number of largest magnitude")
    layer = traitlets.Int(0)
    head = traitlets.Int(0)
    lens_layer = traitlets.Int(0)
    heads_off = traitlets.Tuple()
    layers_off = traitlets.Tuple()
    _found: ForwardPass | None = None  # None before `__init__` sets it, and after `close`

    def __init__(
        self, runner: Runner, prompt: str | Sequence[int] | Request = "", *, section: str = "path",
        max_tokens: int = 24, **sampling: Any,
    ):  # fmt: skip
        from workbench.engine.runner_thread import RunnerThread
        from workbench.inspect.ablation import refuse_parameters
        from workbench.inspect.forward_pass import record_forward_pass
        from workbench.widgets.token_path.ablated_texts import AblatedTexts

        super().__init__(section=section)
        self._of_position: dict[int, TokenPathData] = {}
        live = RunnerThread.attach(runner)
        defaults = {"max_tokens": max_tokens, "temperature": 0.7, "top_k": 40}
        self._request = single_request("TokenPath", runner, prompt, sampling, defaults)
        refuse_parameters(self._request.sampling)
        self._found = live.call(lambda runner: record_forward_pass(runner.model, self._request.prompt_ids))
        self._tokenizer, self._spell = runner.tokenizer, speller(runner.tokenizer)
        self.position = len(self._request.prompt_ids) - 1
        self.lens_layer = self.layer = len(runner.model.blocks) - 1
        self._texts = AblatedTexts(live, self._request, self._pieces)
        self.steps = Recorded(self, last=len(self.data.steps) - 1, interval=900)
        sections = ipywidgets.ToggleButtons(options=SECTIONS, value=section, style={"button_width": "auto"})
        self._hint = ipywidgets.HTML()
        self.watch("step", "section", "position", "column", "layer", "head", "lens_layer")
        self.watch("heads_off", "layers_off")
        self.observe(lambda _: self.set_trait("column", -1), ["step"])
        self.observe(lambda _: self._ask(), ["heads_off", "layers_off", "section"])
        self.shown.on_pick(self._picked)
        self._ask()
        self.show(self.linked("section", sections), self.steps, self._hint)

    @property
    def data(self) -> TokenPathData:
        """Return the path at the present position."""
        if self.position not in self._of_position:
            made = TokenPathData(self.forward_pass, self._request.sampling, self._spell, self.position)
            self._of_position[self.position] = made
        return self._of_position[self.position]

    @property
    def forward_pass(self) -> ForwardPass:
        """Return the recorded pass with its tensors by stage. Raises WorkbenchError once the widget is closed."""
        if self._found is None:
            raise WorkbenchError("TokenPath: it was closed; make a new one")
        return self._found

    def continuations(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the token ids of the engine's text, and of the ablated model's text (None while it is computed)."""
        return self._texts.token_ids()

    def wait(self, seconds: float | None = None) -> TokenPath:
        """Wait until the texts are computed, at most `seconds`, and save the picture; return the view."""
        self._texts.wait(seconds)
        self.throttle.flush()
        self.keep()
        return self

    def close(self) -> None:
        """Close the widget, end its computation, and drop its references to model and tensors."""
        if hasattr(self, "_texts"):  # absent where `__init__` raised early
            self._texts.close()
        super().close()
        self._of_position.clear()

    def redraw(self) -> None:
        self.steps.layout.display = None if self.section == "path" else "none"
        self._hint.value = f'<span style="font-size:12px">{HINTS[self.section]}</span>'
        step = self.data.steps[self.step]
        where = step.title if step.layer is None else f"layer {step.layer}, {step.title}"
        self.steps.title = f"{self.step + 1} of {len(self.data.steps)}: {where}"
        super().redraw()

    def picture(self) -> str:
        """Draw the chosen section."""
        draw = {"path": self._path, "lens": self._lens, "heads": self._heads, "ablation": self._ablation}[self.section]
        return draw(float(self.width))

    def _path(self, width: float) -> str:
        step = self.data.steps[self.step]
        count = 1 if step.layer is None else self.data.num_heads[step.layer]
        return draw_path(self.data, self.step, self.column, min(self.head, count - 1), width)

    def _lens(self, width: float) -> str:
        data, chosen = self.data, (self.lens_layer, self.position)
        cells = data.lens(positions_shown(len(data.tokens), self.position, width))
        grid, height = draw_lens(cells, data.tokens, chosen, data.num_layers, width)
        top, more = draw_lens_top(data.lens_top(*chosen), chosen, height + 6, width)
        title = "logit lens: the likeliest next token after each layer, at each position"
        return draw_page(draw_tokens(data.tokens, self.position),
                         svg.document(width, height + more + 8, grid, top, title=title))  # fmt: skip

    def _heads(self, width: float) -> str:
        data = self.data
        weights = [data.weights(layer) for layer in range(data.num_layers)]
        maps, off = weights[self.layer], frozenset(self.heads_off)
        head = 0 if maps is None else min(self.head, len(maps) - 1)
        grid, height = draw_head_grid(weights, (self.layer, head), off, width)
        large, more, x, y = "", 0.0, 0.0, height + 10
        if maps is not None:
            used = grid_width(weights, width)
            beside = width - used >= MIN_LARGE_WIDTH
            x, y = (used, 0.0) if beside else (0.0, y)
            name = f"Layer {self.layer}, head {head}"
            large, more = draw_large_head(maps[head], data.tokens, name, y, width - x)
        body = grid + svg.group(large, transform=f"translate({x:g},0)")
        return draw_page(svg.document(width, max(height, y + more) + 14, body, title="attention of all heads"))

    def _ablation(self, width: float) -> str:
        heads, layers = frozenset(self.heads_off), frozenset(self.layers_off)
        switches, height = draw_switches(self.data.num_heads, heads, layers, width)
        prompt = "".join(self._pieces(self._request.prompt_ids))
        return draw_page(svg.document(width, height, switches, title="switches of layers and heads"),
                         draw_texts(prompt, self._texts.continuations, bool(heads or layers)))  # fmt: skip

    def _ask(self) -> None:
        from workbench.inspect.ablation import Ablation

        if self.section == "ablation":
            self._texts.ask(Ablation(frozenset(self.heads_off), frozenset(self.layers_off)), self.throttle.mark)

    def _pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text that each token adds."""
        if self._tokenizer is None:
            return tuple(f"#{token} " for token in ids)
        texts = ["", *(self._tokenizer.decode(ids[: n + 1]) for n in range(len(ids)))]
        return tuple(after[len(before) :] for before, after in zip(texts, texts[1:], strict=False))

    def _picked(self, key: str) -> None:
        if key[0] == "s":
            self.step = [step.key for step in self.data.steps].index(key)
        else:
            numbers = [int(each) for each in key[1:].split(".")]
            with self.hold_trait_notifications():
                self._pick(key[0], numbers[0], numbers[-1])

    def _pick(self, kind: str, first: int, second: int) -> None:
        """Set the traits that belong to a picked mark, given by its kind and one or two numbers."""
        if kind == "t":
            self.position, self.column = first, -1
        elif kind == "b":
            self.position, self.column = first, second
        elif kind == "n":
            self.column = first
        elif kind == "h":
            self.head = first
        elif kind == "l":
            self.lens_layer, self.position = first, second
        elif kind == "m":
            self.layer, self.head = first, second
        elif kind == "y":
            self.layers_off = tuple(sorted({first} ^ set(self.layers_off)))
        elif kind == "o":
            self.heads_off = tuple(sorted({(first, second)} ^ set(self.heads_off)))

    @traitlets.validate("position", "layer", "step", "lens_layer", "head")
    def _in_range(self, proposal: Any) -> int:
        name, value = proposal["trait"].name, proposal["value"]
        if self._found is None:
            return value
        layers = len(self._found.model.blocks)
        heads = max(kind.attention.num_heads for kind in self._found.model.spec.layers)
        limits = {"position": len(self._found.token_ids), "layer": layers, "lens_layer": layers + 1, "head": heads}
        limit = limits[name] if name in limits else len(self.data.steps)
        if not 0 <= value < limit:
            raise WorkbenchError(f"TokenPath: {name} {value}: there are 0 to {limit - 1}")
        return value

    @traitlets.validate("heads_off", "layers_off")
    def _off_in_model(self, proposal: Any) -> Any:
        from workbench.inspect.ablation import Ablation

        name, value = proposal["trait"].name, proposal["value"]
        if self._found is not None:
            Ablation(**{name.removesuffix("_off"): frozenset(value)}).check(self._found.model)
        return value
