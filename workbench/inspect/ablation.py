"""Switch heads and layers of a model off, and continue a text without them.

The model is called module by module, apart from its runner: the model is not changed, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.inspect.whole_text import TextAttention
from workbench.kv_cache.layer import CacheLayer, LayerView
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import Angles
from workbench.model.transformer import RunBlock, Transformer
from workbench.request import SamplingParameters
from workbench.sampling.filter_trace import trace_filters
from workbench.sampling.filters import History
from workbench.sampling.samplers import uniform


@dataclass(frozen=True)
class Ablation:
    """Heads and layers to switch off. Each head in `heads`, a pair (layer, head), gives zeros; each layer in `layers`
    adds nothing to the residual stream, but still writes its keys and values, which other layers may read.
    """

    heads: frozenset[tuple[int, int]] = frozenset()
    layers: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.heads or self.layers)

    def check(self, model: Transformer) -> None:
        """Raise WorkbenchError for a layer or head that the model does not have."""
        count = len(model.blocks)
        for layer in {*self.layers, *(layer for layer, _ in self.heads)}:
            if not 0 <= layer < count:
                raise WorkbenchError(f"there is no layer {layer} to switch off; the model has 0 to {count - 1}")
        for layer, head in self.heads:
            heads = model.spec.layers[layer].attention.num_heads
            if not 0 <= head < heads:
                raise WorkbenchError(f"layer {layer} has no head {head} to switch off; it has 0 to {heads - 1}")

    def run_blocks(self, model: Transformer) -> RunBlock:
        """Return a function that calls blocks of `model` without these heads and layers. Raises WorkbenchError like
        `check`.
        """
        self.check(model)
        numbers = {block: number for number, block in enumerate(model.blocks)}

        def run(
            block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
        ) -> Tensor:
            layer = numbers[block]
            heads = sorted(head for at, head in self.heads if at == layer)
            if not heads:
                out = block(x, cos, sin, batch, cache)
            else:
                without = CacheWithoutHeads(cache, heads)
                out = block(x, cos, sin, batch, without)
                if not without.attended:
                    raise WorkbenchError(f"layer {layer}: a custom attention module whose heads cannot be switched off")
            return x if layer in self.layers else out

        return run


class CacheWithoutHeads(LayerView):
    """A view of a layer's cache in which attention of some query heads is zero."""

    def __init__(self, source: CacheLayer, heads: Iterable[int]):
        super().__init__(source)
        self.heads, self.attended = list(heads), False

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Any) -> Tensor:
        """Return attention [token, head, head_dim], zero for the switched-off heads."""
        self.attended = True
        mixed = super().attend(q, batch, parameters, backend)
        mixed[:, self.heads] = 0
        return mixed


@torch.inference_mode()
def continue_text(
    model: Transformer, prompt_ids: Iterable[int], sampling: SamplingParameters, ablation: Ablation,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[int, ...]:  # fmt: skip
    """Return the tokens with which `model` continues a prompt without the heads and layers of `ablation`.

    `is_cancelled` is called after each token; the text ends when it returns True.

    With an empty ablation they equal the tokens of a request with the same parameters and seed, up to rounding and the
        effects of the runner's cache (quantization, eviction): keys are used as computed. An end token is included.

    Raises:
        WorkbenchError: for heads or layers that are not in the model, and for parameters that need more than one row of
            logits.
    """
    refuse_parameters(sampling)
    prompt = tuple(model.validate_token_ids(prompt_ids).tolist())
    text = TextAttention(model, prompt, ablation.run_blocks(model))
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.spec.eos_token_ids)}
    made: tuple[int, ...] = ()
    room = model.spec.max_position_embeddings - len(prompt)
    while True:
        logits = model.compute_logits(text.hidden_states[-1:])[0]
        (token,) = trace_filters(logits, History(prompt, made), sampling).draw([uniform(sampling.seed, len(made))])
        made = (*made, token)
        if len(made) >= min(sampling.max_tokens, room) or token in ends or is_cancelled():
            return made
        text.extend([token])


def refuse_parameters(sampling: SamplingParameters) -> None:
    """Raise WorkbenchError for parameters under which a token depends on more than its own row of logits."""
    for name in ("response_format", "thinking", "stop"):
        if getattr(sampling, name):
            raise WorkbenchError(f"{name}: has no effect on a text with heads or layers off; leave it out")
    if sampling.num_sequences > 1:
        raise WorkbenchError("n, best_of, beams: only one text can be continued; leave them out")
