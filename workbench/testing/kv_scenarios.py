"""Build tiny models with texts that fill quantization groups; return the logits of every sampled row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from workbench.kv_cache.codec import load_codec
from workbench.kv_cache.format import CacheFormat, LayerFormat
from workbench.model.attention_spec import AttentionSpec
from workbench.model.hf.weights import random_weights
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.testing import attention_scenarios as attention_scenes
from workbench.testing.attention_scenarios import VOCAB, SampledLogits, random_texts

HEAD_DIM = 16
OUTPUT_TOKENS = 3  # output tokens of each text
TOKENS_OF_A_PAGE = 8  # without a larger quantization group
CALIBRATION_TOKENS = 64  # for calibrating a small model's codecs, with every runner


@dataclass(frozen=True)
class KVScenario:
    """A scenario for cache formats: the lengths of texts, an optional window in every second layer, and the runner's
    token budget and page size.
    """

    seed: int
    layers: int
    num_kv_heads: int
    window: int | None
    lengths: tuple[int, ...]
    max_num_batched_tokens: int  # tokens per step
    quant_groups_per_page: int  # quantization groups per page

    def __repr__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return (
            f"texts of {', '.join(map(str, self.lengths))} tokens "
            f"({self.num_kv_heads} groups{window}, seed {self.seed})"
        )

    def texts(self) -> dict[str, tuple[int, ...]]:
        return {f"{i}": text for i, text in enumerate(random_texts(self.seed, self.lengths))}

    def model(self) -> Transformer:
        """Build the model in float64 with random weights."""
        kinds = [
            AttentionSpec(
                num_heads=2 * self.num_kv_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=HEAD_DIM,
                sliding_window=window,
            )
            for window in (None, self.window)
        ]
        layers = tuple(LayerSpec(attention=kinds[layer % 2], intermediate_size=12) for layer in range(self.layers))
        context = max(self.lengths) + OUTPUT_TOKENS + 1
        spec = ModelSpec(
            name="tiny",
            vocab_size=VOCAB,
            hidden_size=8,
            layers=layers,
            max_position_embeddings=context,
            tie_word_embeddings=True,
        )
        return Transformer.from_state(spec, random_weights(spec, torch.float64, self.seed))

    def page_size(self, format: CacheFormat) -> int:
        return self.quant_groups_per_page * quant_group_tokens(format)


def shrink_to_test_layers(format: CacheFormat) -> CacheFormat:
    """Return `format` adapted to the few layers of the kit's small models.

    The first two layers have the format's default kind; each other kind of layer gets two layers, of which the second
    may have a window.
    """
    usual = format.for_layer(max(format.layers, default=0) + 1)
    others = {mine: change for layer, change in format.layers.items() if (mine := format.for_layer(layer)) != usual}
    layers = {2 + 2 * i + second: change for i, change in enumerate(others.values()) for second in (0, 1)}
    calibration = format.calibration.model_copy(update={"tokens": CALIBRATION_TOKENS})
    return format.model_copy(update={"layers": layers, "calibration": calibration})


def num_test_layers(format: CacheFormat) -> int:
    """Return the number of layers that a test model needs for `format` after `shrink_to_test_layers`."""
    return max(format.layers, default=1) + 1


def quant_group_tokens(format: CacheFormat) -> int:
    """Return the smallest number of tokens that forms whole quantization groups in every layer."""
    layers = map(format.for_layer, range(num_test_layers(format)))
    return math.lcm(*(_group(each) or TOKENS_OF_A_PAGE for each in layers), TOKENS_OF_A_PAGE)


def _group(layer: LayerFormat) -> int | None:
    """Return the tokens per quantization group; None if the codec encodes each token when it is written."""
    return layer.quant_group if layer.codec is None else load_codec(layer.codec).group


def kv_scenarios(format: CacheFormat) -> st.SearchStrategy[KVScenario]:
    """Return a hypothesis strategy for scenarios with texts whose lengths are near those at which
    quantization starts.
    """
    layers = num_test_layers(format)
    formats = map(format.for_layer, range(layers))
    groups = ((each.residual_length, _group(each)) for each in formats)
    reach = max(TOKENS_OF_A_PAGE if group is None else residual + group for residual, group in groups)
    length = st.one_of(st.integers(2, reach + 2 * quant_group_tokens(format)), st.integers(reach - 2, reach + 2))
    windows = st.sampled_from([None, reach // 2 + 1, reach + 5])
    lengths = st.lists(length, min_size=1, max_size=3).map(tuple)
    return st.builds(KVScenario, st.integers(0, 10_000), st.just(layers), st.integers(1, 2), windows, lengths,
                     st.integers(1, reach), st.integers(1, 2))  # fmt: skip


def sampled_kv_logits(
    scenario: KVScenario, format: CacheFormat, texts: dict[str, tuple[int, ...]] | None = None, **settings: Any
) -> SampledLogits:
    """Return the logits of every row that a runner samples while continuing the texts (see attention_scenarios.py)."""
    size = settings.pop("page_size", scenario.page_size(format))
    given = scenario.texts() if texts is None else texts
    pages = settings.pop("pages", 2 * len(given) * (-(-(max(map(len, given.values())) + OUTPUT_TOKENS) // size) + 1))
    return attention_scenes.sampled_logits(
        scenario.model(), given, OUTPUT_TOKENS, page_size=size, pages=pages, cache=format, **settings
    )
