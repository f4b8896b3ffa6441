"""Define the requirements of a model, its cache, settings and device, and how each is detected.

Each of `FEATURES` is one requirement. Unsupported features are declared, with the reason, where they would be
implemented: in the `supports` of a backend's operators (programs/operators.py) and of programs. capabilities.py lists
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch

from compiled_kernels import BackendError
from compiled_kernels.attention_rules import rules_of
from compiled_kernels.backends import triton_interpreted
from compiled_kernels.blocked.layout import PANEL_PAIR
from compiled_kernels.linear.matrix_format import INT8_MATRIX, WORDS, MatrixFormat
from compiled_kernels.masks import seen_by_head
from compiled_kernels.quantized_attention import SCALED_FORMATS
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import KVStore
from workbench.model.attention_spec import AttentionSpec, MLASpec, QKNormSpec
from workbench.model.custom import build_mask, build_score
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, NormSpec
from workbench.model.transformer import DENSE, Transformer

REFUSALS = {
    "speculate": "cannot verify trees of drafts",
    "device": "does not work here",
    "model": "does not support this model",
    "cache": "does not support this cache",
    "batch_invariant": "cannot keep it",
    "parallel.tensor": "cannot run on several ranks",
    "sampling": "cannot give the logits that its filter combines",
}
FLOATS = "float32", "bfloat16", "float16", "float64"
STEP_QK_NORMS = None, QKNormSpec(), QKNormSpec(over="projection")
# Settings that mlir's whole step reads or that FEATURES test by value; together with the names in FEATURES, all known
# settings.
STEP_SETTINGS = {"kind", "scale", "position", "rotary", "mask", "score", "pages", "module", "qkv_bias", "o_proj_bias",
                 "mlp_bias", "norm", "norms", "activation", "tie_word_embeddings", "eos_token_ids"}  # fmt: skip


@dataclass(frozen=True)
class Requirements:
    """The requirements that a model, its weights, its cache and its device put on a backend; by default as few as
    possible.
    """

    spec: ModelSpec | None = None
    dtype: torch.dtype = torch.float32
    weights: WeightFormat = DENSE
    cache: tuple[KVCacheSpec, ...] = ()
    cache_dtype: torch.dtype | None = None  # dtype of unquantized keys and values; None: `dtype`
    device: str = "cpu"
    batch_invariant: bool = False
    ranks: int = 1  # number of processes that share the model (tensor parallelism)
    early_layers: bool = False  # a request's filter combines the logits of earlier layers
    tree_drafts: bool = False  # drafts are trees (speculate.tree)
    uneven_heads: bool = False  # heads keep different numbers of tokens (a `spread` of cache.evict)

    @classmethod
    def from_model(cls, model: Transformer, store: KVStore) -> Requirements:
        return cls(model.spec, model.dtype, model.format, store.specs, store.dtype, model.device.type)

    @property
    def norm(self) -> NormSpec:
        return NormSpec() if self.spec is None else self.spec.norm

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return () if self.spec is None else self.spec.layers


Finder = Callable[[Requirements], str | None]  # describes the requirement ("layer 2 has ALiBi"); None if absent


class Refusal(NamedTuple):
    verdict: str  # "does not support this cache"
    reason: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


GELU = ActivationSpec(kind="gelu_tanh")


class Feature(NamedTuple):
    """One requirement that a backend may support, and how it is detected."""

    about: str  # a key of REFUSALS
    sought: Finder | str  # a string names a setting of the spec, detected if it differs from its default

    def find(self, wanted: Requirements) -> str | None:
        """Describe the requirement as it occurs in `wanted`; None if it does not occur."""
        sought = self.sought
        return _changed(wanted, lambda name: name == sought) if isinstance(sought, str) else sought(wanted)


class Supports(dict[str, str]):
    """The features that an operator or program does not support, with the reasons."""

    def __call__(self, wanted: Requirements) -> Refusal | None:
        """Return the first reason against the requirements, in the order of FEATURES; None if all are supported."""
        for name, feature in FEATURES.items():
            if name in self and (what := feature.find(wanted)) is not None:
                return Refusal(REFUSALS[feature.about], f"{what}: {self[name]}" if what else self[name])
        return None


def _demand(name: str) -> Finder:
    """Detect a requirement of a run, which needs no description."""
    return lambda wanted: "" if getattr(wanted, name) else None


def _layer(describe: Callable[[LayerSpec], Any]) -> Finder:
    """Detect the first layer that `describe` returns a text for."""
    return lambda wanted: _first(wanted.layers, describe)


def _attention(describe: Callable[[Any], Any]) -> Finder:
    return _layer(lambda kind: describe(kind.attention))


def _cache(describe: Callable[[KVCacheSpec], Any]) -> Finder:
    return lambda wanted: _first(wanted.cache, lambda shape: shape.format.quantized and describe(shape))


def _format(kind: str) -> Finder:
    """Detect a quantized layer with keys or values of format `kind`."""
    return _cache(lambda shape: kind in shape.format.key_value_formats and str(shape.format))


def _first(layers: tuple[Any, ...], describe: Callable[[Any], Any]) -> str | None:
    return next((f"layer {i} has {what}" for i, each in enumerate(layers) if (what := describe(each))), None)


def _changed(wanted: Requirements, is_such: Callable[[str], bool]) -> str | None:
    """Detect a spec's setting of such a name that differs from its default."""
    parts: list[tuple[str, Any]] = [("the model", wanted.spec)] if wanted.spec else []
    for index, kind in enumerate(wanted.layers):
        parts += [(f"layer {index}", kind.attention), (f"layer {index}", kind)]
    for where, part in parts:
        for name, field in type(part).model_fields.items():
            if is_such(name) and not field.is_required() and getattr(part, name) != field.default:
                return f"{where} has {name} {getattr(part, name)}"
    return None


def _unknown_setting(wanted: Requirements) -> str | None:
    known = STEP_SETTINGS | {each.sought for each in FEATURES.values()}
    return _changed(wanted, lambda name: name not in known)


def _device(is_other: Callable[[str], bool]) -> Finder:
    return lambda wanted: f"device is {wanted.device!r}" if is_other(wanted.device) else None


def _dtype(name: str) -> Finder:
    return lambda wanted: f"{name} weights" if _name(wanted.dtype) == name else None


def _cache_dtype(wanted: Requirements) -> str | None:
    if wanted.cache_dtype in (None, wanted.dtype):
        return None
    return f"{_name(wanted.dtype)} weights and a {_name(wanted.cache_dtype)} cache"


def _weights(are_such: Callable[[MatrixFormat], Any]) -> Finder:
    """Detect such a format in the blocks or the head."""
    return lambda wanted: next(
        (f"weights of {own}" for own in (*wanted.weights.of_blocks, wanted.weights.head) if are_such(own)), None
    )


def _gate_and_up(wanted: Requirements) -> str | None:
    runs = (name for name, rows in wanted.weights.own if len(rows) > 1 and name.endswith("gate_up.weight"))
    return next((f"{name} in several formats" for name in runs), None)


def _in_words(name: str) -> Finder:
    return _weights(lambda own: own.codes == name)


def _quantized_embedding(wanted: Requirements) -> str | None:
    tied = wanted.spec is not None and wanted.spec.tie_word_embeddings
    stored = wanted.weights.head if tied else wanted.weights.embedding
    return None if stored.is_dense else "a quantized embedding"


def _rotary_by_length(wanted: Requirements) -> str | None:
    if wanted.spec is None:
        return None
    model = wanted.spec.rotary
    return _attention(
        lambda own: own.rotary_dim and (kind := (own.rotary or model).scaling).by_length and f"rotary {kind.kind}"
    )(wanted)


def _untraceable(wanted: Requirements) -> str | None:
    """Detect a custom mask or score function that torch.compile cannot trace, by trying it."""
    at = torch.arange(4)
    rows = torch.zeros(2, 4, 4), torch.arange(2)[:, None, None], at[None, :, None], at[None, None]

    def describe(attention: Any) -> str | None:
        for kind, part, build, inputs in (
            ("mask", attention.mask, _shown_by_head, (at[:, None], at[None], rows[1])),
            ("score", attention.score, build_score, rows),
        ):
            if part is not None and (problem := _trace_problem(build(attention), *inputs)):
                return f"{kind} {part.path}, which cannot be traced ({problem})"
        return None

    return _attention(describe)(wanted)


def _shown_by_head(attention: Any) -> Callable[..., torch.Tensor]:
    """Return a mask or score as a function of (query, key, head)."""
    return functools.partial(seen_by_head, build_mask(attention))


def _without_scalar_form(wanted: Requirements) -> str | None:
    """Detect a custom mask or score function that cannot be traced to scalar code."""

    def describe(attention: Any) -> str | None:
        if attention.mask is None and attention.score is None:
            return None
        try:
            rules_of(build_mask(attention), build_score(attention), "", "")
        except BackendError as error:
            part = attention.mask or attention.score
            return f"{part.path}: {str(error).removeprefix(': backend : ')}"
        return None

    return _attention(describe)(wanted)


def _trace_problem(function: Any, *inputs: torch.Tensor) -> str | None:
    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return function(*inputs)

    # A new code object: torch counts recompilations by code object, and refuses a function after a few.
    call = FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)
    try:
        torch.compile(call, backend="eager", fullgraph=True)(*inputs)
    except Exception as error:  # any exception of the compiler or the user's function
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _unusual_mixture(wanted: Requirements) -> str | None:
    """Detect a mixture that mlir's whole step does not support: it needs experts in panels, and plain routers."""

    def describe(kind: LayerSpec) -> str | None:
        if kind.experts is None:
            return None
        router, sizes = kind.experts.router, (kind.intermediate_size, wanted.spec.hidden_size if wanted.spec else 64)
        found = {
            "experts in groups": router.groups > 1,
            "a bias of the choice of experts": router.selection_bias,
            "experts whose inputs are weighed": router.weighs_input,
            "a shared expert": kind.experts.shared_intermediate_size,
            "experts with biases": kind.mlp_bias,
            "a router with biases": kind.experts.router_bias,
            f"experts of {sizes[0]} x {sizes[1]}, no multiples of {PANEL_PAIR}": any(
                size % PANEL_PAIR for size in sizes
            ),
        }
        return next((what for what, there in found.items() if there), None)

    return _first(wanted.layers, describe)


def _experts_in_groups(odd: Callable[[int], Any]) -> Finder:
    """Detect experts with scales for groups of this many columns."""

    def find(wanted: Requirements) -> str | None:
        group = wanted.weights.of_experts.group
        there = wanted.spec is not None and wanted.spec.has_experts and odd(group)
        return f"experts in groups of {group}" if there else None

    return find


def _trees_beside_other_caches(wanted: Requirements) -> str | None:
    if not wanted.tree_drafts:
        return None

    def describe(shape: KVCacheSpec) -> str | None:
        if shape.state is not None:
            return "recurrent states"
        if shape.summaries is not None:
            return "summaries of pages"
        return str(shape.format) if shape.format.quantized or shape.format.codec is not None else None

    return _first(wanted.cache, describe)


def _on_ranks(find: Callable[[Requirements], object]) -> Finder:
    """Detect several ranks combined with the requirement of `find`."""
    return lambda wanted: f"{wanted.ranks} ranks" if wanted.ranks > 1 and find(wanted) else None


FEATURES: dict[str, Feature] = {
    "several ranks (tensor parallelism)": Feature("parallel.tensor", _on_ranks(lambda wanted: True)),
    "mixture of experts on several ranks": Feature(
        "parallel.tensor", _on_ranks(lambda wanted: wanted.spec is not None and wanted.spec.has_experts)
    ),
    "parallel attention and feed-forward on several ranks": Feature(
        "parallel.tensor", _on_ranks(_layer(lambda kind: kind.parallel != "no" and "both"))
    ),
    "norms over all heads on several ranks": Feature("parallel.tensor", _on_ranks(_attention(
        lambda own: isinstance(own, AttentionSpec) and own.qk_norm is not None and own.qk_norm.over == "projection"
    ))),
    "norms of a layer's parts on several ranks": Feature("parallel.tensor", _on_ranks(_layer(
        lambda kind: kind.norms == "both" and "norms of a layer's parts"
    ))),
    "trees of drafts": Feature("speculate", _demand("tree_drafts")),
    "trees of drafts over quantized or encoded keys, summaries of pages, or states": Feature(
        "speculate", _trees_beside_other_caches
    ),
    "trees of drafts on several ranks": Feature("parallel.tensor", _on_ranks(lambda wanted: wanted.tree_drafts)),
    "heads that keep different numbers of tokens": Feature("cache", _demand("uneven_heads")),
    "logits of early layers": Feature("sampling", _demand("early_layers")),
    "logits of early layers on several ranks": Feature("sampling", _on_ranks(lambda wanted: wanted.early_layers)),
    "batch_invariant": Feature("batch_invariant", _demand("batch_invariant")),
    "a CPU": Feature("device", _device(lambda device: device == "cpu" and not triton_interpreted())),
    "a CUDA device": Feature("device", _device(lambda device: device == "cuda")),
    "other devices": Feature("device", _device(lambda device: device not in ("cpu", "cuda"))),
    **{name: Feature("model", _dtype(name)) for name in FLOATS},
    "INT8 weights": Feature("model", _weights(lambda own: own == INT8_MATRIX)),
    "INT8 weights by group of columns": Feature("model", _weights(lambda own: own.codes == "int8" and own.group)),
    "INT4 weights": Feature("model", _weights(lambda own: own.codes == "int4" and own.minima is None)),
    "INT4 weights with minima": Feature("model", _weights(lambda own: own.codes == "int4" and own.minima is not None)),
    "FP8 weights": Feature("model", _weights(lambda own: own.codes == "fp8")),
    **{f"{name.upper()} weights": Feature("model", _in_words(name)) for name in WORDS},
    "gate and up in several formats": Feature("model", _gate_and_up),
    "weights in groups that are not a power of two": Feature("model", _weights(lambda own: own.group.bit_count() > 1)),
    "experts in groups that are not a multiple of 4": Feature("model", _experts_in_groups(lambda group: group % 4)),
    "experts in groups that are not a power of two": Feature(
        "model", _experts_in_groups(lambda group: group.bit_count() > 1)
    ),
    "INT8 activations": Feature(
        "model", lambda wanted: "INT8 activations" if wanted.weights.activations == "int8" else None
    ),
    "sliding window": Feature("model", "sliding_window"),
    "sinks of a window": Feature("model", "num_sink_tokens"),
    "soft-capped scores": Feature("model", "softcap"),
    "sink logits": Feature("model", "sink_logits"),
    "norms of queries and keys": Feature("model", "qk_norm"),
    "norms of queries and keys without weights, by head, or after rotary": Feature("model", _attention(
        lambda own: isinstance(own, AttentionSpec) and own.qk_norm not in STEP_QK_NORMS and "such norms"
    )),
    "partly rotated heads": Feature("model", "rotated_columns"),
    "no position encoding": Feature("model", _attention(lambda own: own.position == "none" and "no position encoding")),
    "ALiBi": Feature("model", _attention(lambda own: own.position == "alibi" and "ALiBi")),
    "custom score function": Feature("model", _attention(lambda own: own.score and f"score {own.score.path}")),
    "custom mask": Feature("model", _attention(lambda own: own.mask and f"mask {own.mask.path}")),
    "choice of pages": Feature("model", _attention(
        lambda own: isinstance(own, AttentionSpec) and own.pages and f"pages {own.pages.path}"
    )),
    "custom part that torch.compile cannot trace": Feature("model", _untraceable),
    "custom part that is not arithmetic on positions": Feature("model", _without_scalar_form),
    "chunks of attention": Feature("model", "chunk_size"),
    "temperature by position": Feature("model", "temperature"),
    "residual streams": Feature("model", "altup"),
    "keys and values of another layer": Feature("model", "kv_shared_with"),
    "rotary by a sequence's length": Feature("model", _rotary_by_length),
    "recurrent layers": Feature("model", _layer(
        lambda kind: kind.recurrent is not None and f"a recurrent state ({kind.recurrent.kind})"
    )),
    "custom attention module": Feature("model", _attention(lambda own: own.module and f"module {own.module.path}")),
    "latent attention": Feature("model", _attention(lambda own: isinstance(own, MLASpec) and "latent attention")),
    "heads of odd width": Feature("model", _attention(
        lambda own: isinstance(own, AttentionSpec) and own.head_dim % 2 and f"heads of odd width {own.head_dim}"
    )),
    "mixture of experts": Feature("model", "experts"),
    "mixtures with groups, shared experts, biases or weighed inputs": Feature("model", _unusual_mixture),
    "gates other than SiLU, GELU by its tanh, clamped": Feature("model", _layer(
        lambda kind: (
            not kind.activation.gated
            or kind.activation.kind in ("gelu", "relu", "relu2", "xielu")
            or kind.activation.gate_scale != 1
            or kind.activation.sparsity
        )
        and f"activation {kind.activation}"
    )),
    "gates other than SiLU and GELU by its tanh": Feature("model", _layer(
        lambda kind: kind.activation not in (ActivationSpec(), GELU) and f"activation {kind.activation}"
    )),
    "GELU in a mixture of experts": Feature("model", _layer(
        lambda kind: kind.experts is not None and kind.activation == GELU and "GELU of experts"
    )),
    "norms only after attention and feed-forward": Feature("model", _layer(
        lambda kind: kind.norms == "post" and "norms only after a layer's parts"
    )),
    "parallel attention and feed-forward": Feature("model", "parallel"),
    "LayerNorm": Feature("model", lambda wanted: "LayerNorm" if wanted.norm.kind == "layer" else None),
    "scaled embedding": Feature("model", "embedding_scale"),
    "quantized embedding": Feature("model", _quantized_embedding),
    "soft-capped logits": Feature("model", "final_logit_softcapping"),
    "model settings that this table does not know": Feature("model", _unknown_setting),
    **{f"{kind.upper()} keys or values": Feature("cache", _format(kind)) for kind in SCALED_FORMATS},
    "user-defined cache codec": Feature(
        "cache", lambda wanted: _first(wanted.cache, lambda own: own.format.codec and str(own.format))
    ),
    "user-defined cache codec of groups of tokens": Feature("cache", lambda wanted: _first(
        wanted.cache, lambda own: own.format.codec and own.keeps_residual and f"{own.format}, in groups"
    )),
    "quantized keys with dense values, or the other way": Feature("cache", _format("dense")),
    "rotated heads": Feature("cache", _cache(lambda own: own.format.rotate and "rotated heads")),
    "a cache with another dtype than the weights": Feature("cache", _cache_dtype),
}  # fmt: skip
