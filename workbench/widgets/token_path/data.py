"""Arrange the path of a token as steps: the stages of a recorded forward pass, then the filters, then the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench.request import SamplingParameters

RESIDUAL = ("embedding", "after_attention", "output")  # stages of the residual stream


class PathStep(NamedTuple):
    """One step of the path: a stage of the forward pass, a filter, or the draw.

    `size` is the norm of the followed token's row; for stages by head the largest value, for a filter the number of
    tokens left, for the draw the probability."""

    name: str
    layer: int | None
    title: str
    size: float
    filter_number: int = 0

    @property
    def key(self) -> str:
        return f"s{self.layer if self.layer is not None else ''}.{self.name}"


class Candidate(NamedTuple):
    """One token of the distribution: its probability before a filter and after it."""

    token: int
    text: str
    before: float
    after: float


class LensCell(NamedTuple):
    """One cell of the logit lens: the most probable token after `layer` layers, at a position of the text."""

    layer: int
    position: int
    text: str
    probability: float


class DrawnToken(NamedTuple):
    """The draw of the next token: segments (text, begin, end) of the likely tokens on the line from 0 to 1, and the
    random `number` that picks one."""

    token: int
    text: str
    number: float
    probability: float
    segments: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class TokenPathData:
    """The data of a token's path: the recorded forward pass `found`, followed at `position`. `spell` returns the text
    of a token id."""

    found: Any = field(repr=False)
    sampling: SamplingParameters
    spell: Callable[[int], str] = field(repr=False)
    position: int

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        return tuple(map(self.spell, self.found.token_ids))

    @cached_property
    def num_layers(self) -> int:
        return len(self.found.model.blocks)

    @cached_property
    def trace(self) -> Any:
        """Return the effect of each filter on this position's logits."""
        from workbench.sampling.filter_trace import trace_filters
        from workbench.sampling.filters import History

        history = History(self.found.token_ids[: self.position + 1])
        return trace_filters(self.found.values("logits")[self.position].cpu(), history, self.sampling)

    @cached_property
    def steps(self) -> tuple[PathStep, ...]:
        """Return every step, in the order of computation."""
        made = [self._step_of(stage) for stage in self.found.stages]
        for number, each in enumerate(self.trace.steps, 1):
            title = f"filter {number}, {each.name}: {each.num_left:,} tokens left"
            made.append(PathStep(f"filter {number}", None, title, float(each.num_left), number))
        made.append(PathStep("draw", None, "draw: one number between 0 and 1 picks the token", self.draw.probability))
        return tuple(made)

    def _step_of(self, stage: Any) -> PathStep:
        from workbench.inspect.forward_pass import BY_HEAD

        row = stage.values[..., self.position, :].float()
        size = float(row.nan_to_num().amax() if stage.name in BY_HEAD else row.norm())
        return PathStep(stage.name, stage.layer, stage.meaning, size)

    @cached_property
    def num_heads(self) -> tuple[int, ...]:
        """Return the number of query heads of each layer."""
        return tuple(kind.attention.num_heads for kind in self.found.model.spec.layers)

    def is_by_head(self, step: PathStep) -> bool:
        from workbench.inspect.forward_pass import BY_HEAD

        return step.name in BY_HEAD

    def matrix(self, step: PathStep, head: int) -> np.ndarray | None:
        """Return the values of a stage [token, column] in float32; None for filters and the draw."""
        stage = self.found.find(step.name, step.layer)
        if stage is None:
            return None
        values = stage.values[head] if self.is_by_head(step) else stage.values
        return values.float().cpu().numpy()

    def column_names(self, step: PathStep) -> tuple[str, ...]:
        """Return the names of a stage's columns if they stand for tokens of the text or the vocabulary, else ()."""
        if step.name == "logits":
            return self._vocabulary
        return self.tokens if self.is_by_head(step) else ()

    @cached_property
    def _vocabulary(self) -> tuple[str, ...]:
        return tuple(map(self.spell, range(self.found.model.spec.vocab_size)))

    def derivation(self, step: PathStep, column: int, head: int) -> Any:
        """Return the `Derivation` of one value: the followed token's, in `column`."""
        from workbench.inspect.derive import derive

        return derive(self.found, self.found.find(step.name, step.layer), self.position, column, head)

    @cached_property
    def draw(self) -> DrawnToken:
        """Return the draw at this position, with the uniform number that the request's seed gives."""
        from workbench.sampling.samplers import uniform

        number, after = uniform(self.sampling.seed, 0), self.trace.probabilities
        (token,) = self.trace.draw([number])
        ends = after.cumsum(-1)
        likely = [n for n in after.topk(min(24, len(after))).indices.tolist() if after[n] >= 0.004]
        segments = ((self.spell(n), float(ends[n] - after[n]), float(ends[n])) for n in sorted(likely))
        return DrawnToken(token, self.spell(token), number, float(after[token]), tuple(segments))

    def candidates(self, filter_number: int, count: int = 12) -> tuple[Candidate, ...]:
        """Return the `count` most probable tokens before a filter, with their probability before and after it; filters
        count from 1."""
        steps = self.trace.steps
        before = steps[filter_number - 2].probabilities if filter_number > 1 else self.trace.model.double().softmax(-1)
        after = steps[filter_number - 1].probabilities
        best = before.topk(min(count, len(before))).indices.tolist()
        return tuple(Candidate(n, self.spell(n), float(before[n]), float(after[n])) for n in best)

    def lens(self, positions: range) -> tuple[LensCell, ...]:
        """Return the logit lens of some positions, from the embedding to the last layer."""
        cells = []
        for position, row in zip(positions, self.found.lens_rows(positions), strict=True):
            best = zip(row.here[:, 0].tolist(), row.ids[:, 0].tolist(), strict=True)
            cells += [LensCell(layer, position, self.spell(token), share) for layer, (share, token) in enumerate(best)]
        return tuple(cells)

    def lens_top(self, layer: int, position: int) -> tuple[Candidate, ...]:
        """Return the most probable tokens after `layer` layers, each with its probability there and after the last
        layer."""
        (row,) = self.found.lens_rows([position])
        found = zip(*(values[layer].tolist() for values in row), strict=True)
        return tuple(Candidate(n, self.spell(n), here, at_end) for n, here, at_end in found)

    def weights(self, layer: int) -> np.ndarray | None:
        """Return the attention weights [head, token, context] of a layer, or None if its module records none."""
        stage = self.found.find("weights", layer)
        return None if stage is None else stage.values.float().cpu().numpy()
