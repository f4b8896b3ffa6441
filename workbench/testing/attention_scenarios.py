"""Build tiny models with the attention under test, and texts for them; return the logits of every sampled row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner, generate
from workbench.executors.select import Backends
from workbench.executors.step_runner import Forward
from workbench.model.attention_config import AttentionConfig
from workbench.model.attention_spec import AttentionSpec
from workbench.model.hf.weights import random_weights
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import change_spec
from workbench.request import Request, SamplingParameters
from workbench.scheduler.plan import StepPlan
from workbench.testing.law import LawBroken

VOCAB, CONTEXT = 31, 64
# Key/value heads, query heads per key/value head, head_dim, tokens per page: each shape is compiled.
Shape = tuple[int, int, int, int]
CLASSES: tuple[Shape, ...] = ((4, 2, 8, 5), (1, 3, 4, 9), (2, 1, 8, 3))
LONGEST = 40  # default maximum tokens of a text
SampledLogits = dict[
    tuple[str, int], tuple[tuple[int, ...], Tensor]
]  # (text, number of tokens) -> token ids, logits [vocab]


def random_texts(seed: int, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in lengths]


@dataclass(frozen=True)
class AttentionScenario:
    """A scenario for attention: the sizes of a model, the lengths of texts, and the runner's token budget and page
    size.
    """

    seed: int
    num_kv_heads: int
    queries_per_kv: int
    head_dim: int
    lengths: tuple[int, ...]
    max_num_batched_tokens: int  # tokens per step
    page_size: int

    def __repr__(self) -> str:
        heads = f"{self.num_kv_heads * self.queries_per_kv} heads on {self.num_kv_heads}, width {self.head_dim}"
        return f"texts of {', '.join(map(str, self.lengths))} tokens ({heads}, seed {self.seed})"

    def texts(self) -> list[tuple[int, ...]]:
        return random_texts(self.seed, self.lengths)

    def spec(self, change: Mapping[str, Any]) -> ModelSpec:
        attention = AttentionSpec(
            num_heads=self.num_kv_heads * self.queries_per_kv, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )
        kinds = (LayerSpec(attention=attention, intermediate_size=12),) * 2
        plain = ModelSpec(
            name="tiny",
            vocab_size=VOCAB,
            hidden_size=8,
            layers=kinds,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
        return change_spec(plain, AttentionConfig.parse(dict(change)))

    def model(self, change: Mapping[str, Any]) -> Transformer:
        """Build the model in float64 with random weights."""
        spec = self.spec(change)
        return Transformer.from_state(spec, random_weights(spec, torch.float64, self.seed))


def attention_scenarios(
    longest: int = LONGEST, page_size: int | None = None, classes: int | None = None
) -> st.SearchStrategy[AttentionScenario]:
    """Return a hypothesis strategy for scenarios of many sizes, by default with any page size. `classes` limits the
    number of shapes, so that few compilations suffice; each scenario then has three texts.
    """
    lengths = st.lists(st.integers(2, longest), min_size=2 if classes is None else 3, max_size=3).map(tuple)
    if classes is None:
        sizes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 8]), st.integers(1, 9))
    else:
        sizes = st.sampled_from(CLASSES[:classes])

    def made(seed: int, size: Shape, lengths: tuple[int, ...], budget: int) -> AttentionScenario:
        heads, share, dim, page = size
        return AttentionScenario(seed, heads, share, dim, lengths, budget, page_size or page)

    return st.builds(made, st.integers(0, 10_000), sizes, lengths, st.integers(1, 12))


def sampled_logits(
    model: Transformer,
    texts: Mapping[str, tuple[int, ...]],
    max_tokens: int = 4,
    page_orders: tuple[list[int], ...] | None = None,
    backends: Backends | None = None,
    **settings: Any,
) -> SampledLogits:
    """Return the logits of every row that a runner samples while continuing `texts`.

    Args:
        model: the model.
        texts: token ids by name.
        max_tokens: output tokens of each text.
        page_orders: passed to `Runner`.
        backends: passed to `LoadedModel`.
        settings: settings of the runner; pages are initially filled with NaN.
    """
    chosen = [shape.summaries.page_size for shape in model.cache_shapes() if shape.summaries is not None]
    sizes = {"page_size": chosen[0]} if chosen else {}
    config = EngineConfig.build(**{"max_num_seqs": 4, "pages": 4 * CONTEXT, **sizes, **settings})
    runner = Runner(config, LoadedModel(model, backends=backends), page_orders=page_orders)
    for table in range(len(runner.store.groups)):
        for tensor in runner.store.page_tensors(table):
            tensor[1:].view(torch.uint8).fill_(255)  # NaN in every float type
    watched = _Recording()
    runner.core.executor.hooks.append(watched)
    greedy = SamplingParameters(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for name, event in generate(runner, [Request(name, ids, greedy) for name, ids in texts.items()]).items():
        if event.error:
            raise LawBroken(f"raised {event.error}, on text {name} of {len(texts[name])} tokens")
    return watched.rows


class _Recording:
    """A hook of a `StepRunner` that records the logits of sampled rows."""

    def __init__(self) -> None:
        self.rows: SampledLogits = {}

    def __call__(self, forward: Forward, plan: StepPlan) -> Tensor:
        logits = forward(plan)
        sampled = [span for span in plan.spans if span.needs_sample]
        for span, row in zip(sampled, logits, strict=True):
            tokens = tuple(span.sequence.token_ids[: span.end])
            self.rows[span.sequence.request_id, span.end] = tokens, row.clone()
        return logits


def require_equal_logits(rows: SampledLogits, plain: SampledLogits, message: str, scenario: object) -> None:
    """Raise LawBroken if logits after equal tokens differ by more than float64 rounding."""
    for place, (tokens, row) in rows.items():
        before, right = plain.get(place, (None, None))
        if before == tokens and right is not None:
            away = float((row - right).abs().max())
            if not away <= 1e-9 * (1 + float(right.abs().max())):
                where = "after {1} tokens of text {0}".format(*place)
                raise LawBroken(f"{message}: logits differ by {away:.2g} {where}, on {scenario}")
