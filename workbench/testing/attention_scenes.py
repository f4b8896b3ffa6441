"""Tiny models with the attention under test, texts for them, and the logits of every sampled row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.engine.plan import StepPlan
from workbench.engine.runner import Runner, generate
from workbench.engine.scheduler import Limits
from workbench.model.composition import AttentionPart
from workbench.model.spec import Attention, LayerKind, ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import vary_spec
from workbench.model.weights import random_weights
from workbench.request import Request, SamplingParameters
from workbench.testing.report import Broken

VOCAB, CONTEXT = 31, 64
Rows = dict[tuple[str, int], tuple[tuple[int, ...], Tensor]]  # (text, number of tokens) -> token ids, logits [vocab]


@dataclass(frozen=True)
class Scene:
    """Sizes of a model, lengths of texts, and the runner's token budget and page size."""

    seed: int
    groups: int
    share: int
    dim: int
    lengths: tuple[int, ...]
    budget: int  # tokens a step
    page_size: int

    def __repr__(self) -> str:
        heads = f"{self.groups * self.share} heads on {self.groups}, width {self.dim}"
        return f"texts of {', '.join(map(str, self.lengths))} tokens ({heads}, seed {self.seed})"

    def texts(self) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in self.lengths]

    def spec(self, change: Mapping[str, Any]) -> ModelSpec:
        attention = Attention(heads=self.groups * self.share, groups=self.groups, dim=self.dim)
        kinds = (LayerKind(attention=attention, hidden=12),) * 2
        plain = ModelSpec(name="tiny", vocab=VOCAB, width=8, layers=kinds, context=CONTEXT, tied=True)
        return vary_spec(plain, AttentionPart.of(dict(change)))

    def model(self, change: Mapping[str, Any]) -> Transformer:
        """Build the model in float64 with random weights."""
        spec = self.spec(change)
        return Transformer.from_state(spec, random_weights(spec, torch.float64, self.seed))


def scenes(longest: int = 40, alike: bool = False) -> st.SearchStrategy[Scene]:
    """Draw scenarios of many sizes.

    With `same_shape` only the lengths of texts differ, so that one compilation serves all.
    """
    lengths = st.lists(st.integers(2, longest), min_size=3 if alike else 2, max_size=3).map(tuple)
    heads = (2, 2, 8) if alike else (st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 8]))
    sizes = (st.just(size) if isinstance(size, int) else size for size in heads)
    page_size = st.just(4) if alike else st.integers(1, 9)
    return st.builds(Scene, st.integers(0, 10_000), *sizes, lengths, st.integers(1, 12), page_size)


def rows_of(model: Transformer, texts: Mapping[str, tuple[int, ...]], most: int = 4, **settings: Any) -> Rows:
    """Return the logits of every row that a runner samples while it continues `texts`.

    Args:
        model: the model.
        texts: token ids by name.
        max_tokens: output tokens of each text.
        settings: of the runner; pages start filled with NaN.
    """
    limits = Limits(settings.pop("max_num_seqs", 4), settings.pop("max_num_batched_tokens", 512))
    runner = Runner(model, limits=limits, **{"page_size": 64, "pages": 4 * CONTEXT, **settings})
    for table in range(len(runner.store.tables)):
        for tensor in runner.store.paged(table):
            tensor[1:].view(torch.uint8).fill_(255)  # NaN in every type of float
    watched = _Watched(runner)
    greedy = SamplingParameters(temperature=0, max_tokens=most, ignore_eos=True)
    for name, event in generate(runner, [Request(name, ids, greedy) for name, ids in texts.items()]).items():
        if event.error:
            raise Broken(f"raised {event.error}, on text {name} of {len(texts[name])} tokens")
    return watched.rows


class _Watched:
    """A wrapper of a runner's executor that records the logits it samples from."""

    def __init__(self, runner: Runner):
        self.inner, self.rows = runner.executor, {}
        self.kernel_seconds, self.artifacts = None, {}
        runner.executor = self  # type: ignore[assignment]

    @property
    def compiles(self) -> int:
        return self.inner.compiles

    def forward(self, plan: StepPlan) -> Tensor:
        logits = self.inner.forward(plan)
        sampled = [span for span in plan.spans if span.samples]
        for span, row in zip(sampled, logits, strict=True):
            tokens = tuple(span.sequence.token_ids[: span.end])
            self.rows[span.sequence.request_id, span.end] = tokens, row.clone()
        return logits


def must_agree(rows: Rows, plain: Rows, otherwise: str, scene: object) -> None:
    """Raise LawBroken unless logits after equal tokens agree, up to rounding in float64."""
    for place, (tokens, row) in rows.items():
        before, right = plain.get(place, (None, None))
        if before == tokens and right is not None:
            away = float((row - right).abs().max())
            if not away <= 1e-9 * (1 + float(right.abs().max())):
                where = "after {1} tokens of text {0}".format(*place)
                raise Broken(f"{otherwise}: logits differ by {away:.2g} {where}, on {scene}")
