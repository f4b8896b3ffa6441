"""Compute decodes by a compiled step of the backend mlir: describe a model's shapes, and bind its weights and rotary
angles by the names that the step uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from compiled_kernels.attention_rules import rules_of
from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.layout import as_words, in_panels, whole_panels
from compiled_kernels.builder.target import MLIR_TYPES, Target
from compiled_kernels.decode_step import DecodeStep, LayerShape, MixtureShape, QuantizedLayout, StepShape, WeightLayout
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.mlir import weight_kind
from compiled_kernels.quantized_attention import SCALED_FORMATS
from workbench.errors import WorkbenchError
from workbench.executors.contention import StepThreads
from workbench.executors.packing import MIN_TABLE_WIDTH, bucket_for, pack_batch, verify_bucket_for
from workbench.executors.programs.kernels import one_function
from workbench.executors.programs.operators import MLIR
from workbench.executors.programs.program import StepProgram
from workbench.executors.requirements import Requirements, Supports
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.pages import NULL_PAGE, pages_for
from workbench.kv_cache.store import KVStore
from workbench.model.feedforward import STACKS, GatedMLP, MixtureOfExperts
from workbench.model.layers import TransformerBlock, attention_of
from workbench.model.linear import Linear, RMSNorm, StackedLinear
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan

POSITIONS_PER_BLOCK = 1024  # number of positions with angles computed together, always
KNOWN_MODULES = (
    "workbench.model.layers",
    "workbench.model.linear",
    "workbench.model.feedforward",
    "torch.nn.modules.linear",
)
NOT_IN_STEP = (
    "norms of queries and keys without weights, by head, or after rotary", "keys and values of another layer",
    "custom attention module", "latent attention", "heads of odd width",
    "mixtures with groups, shared experts, biases or weighed inputs", "gates other than SiLU and GELU by its tanh",
    "norms only after attention and feed-forward", "parallel attention and feed-forward",
    "model settings that this table does not know", "gate and up in several formats",
)  # fmt: skip
AS_THEY_ARE, BETWEEN_DRAFTS = "tokens are embedded as they are", "tokens are quantized between steps"
supports = Supports({
    **MLIR, **dict.fromkeys(NOT_IN_STEP, "the compiled decode step does not support it"),
    "mixture of experts on several ranks": "the compiled step's router names experts that another rank holds",
    "norms over all heads on several ranks": "the compiled step has no sum over ranks within attention",
    "norms of a layer's parts on several ranks": "the compiled step norms a part before its sum over ranks",
    "GELU in a mixture of experts": "the compiled step's experts have SiLU",
    "logits of early layers": "the step is one kernel, which keeps the states between layers; blocks give them",
    "rotary by a sequence's length": "it reads angles from a table by position",
    "user-defined cache codec": "the compiled decode step cannot call it",
    "rotated heads": "the compiled decode step does not rotate heads",
})  # fmt: skip
supports_drafts = Supports({  # several draft steps in one call
    **supports,
    "several ranks (tensor parallelism)": "several steps in one call do not sum over ranks between steps",
    "scaled embedding": AS_THEY_ARE,
    "quantized embedding": AS_THEY_ARE,
    **dict.fromkeys([f"{kind.upper()} keys or values" for kind in SCALED_FORMATS], BETWEEN_DRAFTS),
})  # fmt: skip
MIN_ROWS_PER_THREAD = 8  # below this number of rows x KV heads per thread, the context is split among threads


class RotaryCaches:
    """The rotary angles of a model by position, in float32 tables that its compiled programs share. Recomputing them
    would take as long as a small step and could give other bits.
    """

    def __init__(self, model: Transformer):
        self._model = model
        self.reset()

    def reset(self) -> None:
        self._known: dict[int, tuple[Tensor, ...]] = {}  # cos and sin [position, head_dim / 2]

    def fill(self, buffers: Mapping[int, Iterable[Tensor]], positions: Tensor) -> None:
        """Write the angles of `positions` [token] to the first rows of `buffers`, which has the buffers (cos, sin) of
        each rotary.
        """
        for rotary, pair in buffers.items():
            known = self._known.get(rotary, ())
            while not known or len(known[0]) <= int(positions.max()):
                start = len(known[0]) if known else 0
                more = self._model.rotary[rotary](torch.arange(start, start + POSITIONS_PER_BLOCK))
                known = tuple(torch.cat([*known[side : side + 1], part.float()]) for side, part in enumerate(more))
                self._known[rotary] = known
            for buffer, table in zip(pair, known, strict=True):
                buffer[: len(positions)] = table[positions]


class MlirStep:
    """The compiled step of a `DecodeProgram` for one bucket of rows."""

    def __init__(self, program: DecodeProgram, rows: int):
        self.program, model, store = program, program.model, program.store
        shape = step_shape(model, store.page_size, rows, store.specs, program.verifies)
        self.step, self.name = (
            DecodeStep(shape, step_tensors(model, store)),
            f"{'check' if program.verifies else 'decode'} {rows}",
        )
        self._ids = torch.zeros(rows, dtype=torch.long)
        # Written through numpy: a small step takes less time than creating a few small tensors in torch.
        self._fields = [each.numpy() for each in (self._ids, self.step.lengths, *self.step.tables)]

    def __call__(self, plan: StepPlan) -> Tensor:
        """Return the logits of every row, [row, vocab] in float32, for a plan of one token per row. The next call
        overwrites them.
        """
        program, step, spans = self.program, self.step, plan.spans
        if program.residual_length is not None:
            program.store.quantize_pending(pack_batch(plan, program.store.page_size, program.model.device))
        rows, (ids, lengths, *tables) = len(spans), self._fields
        ids[:rows] = [span.token_ids[0] for span in spans]
        lengths[:rows] = [span.end - span.sequence.num_evicted_tokens for span in spans]
        lengths[rows:] = 1
        for t, table in enumerate(tables):
            for row, span in enumerate(spans):
                pages = span.sequence.pages[t]
                table[row, : len(pages)] = pages
            table[rows:, 0] = NULL_PAGE
        step.x.copy_(program.model.embed(self._ids))
        program.angles.fill(step.angles, torch.tensor([span.start for span in spans]))
        program.threads.run(self.name, step)
        return program.model.cap_logits(step.logits)


class DecodeProgram(StepProgram):
    """A program that computes decodes, with `verifies` also their drafts (several rows per sequence), by one compiled
    function for each bucket of rows.
    """

    resets = every_row = is_timed = True
    described = one_function("mlir: blocks and head are one compiled function", "whole step", "mlir")

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        angles: RotaryCaches | None = None,
        threads: StepThreads | None = None,
        verifies: bool = False,
    ):
        super().__init__(model, store)
        self.angles, self.threads = angles or RotaryCaches(model), threads or StepThreads()
        self.verifies, self.residual_length = verifies, store.residual_length
        self.kind = "verify" if verifies else "decode"
        self.reset()

    def reset(self) -> None:
        check_mlir_step(self.model, self.store)
        self.steps, self.artifacts = dict[int, MlirStep](), {}
        self.angles.reset()

    def accept(self, plan: StepPlan) -> StepPlan | None:
        if plan.layers or self.verifies != (plan.num_draft_tokens > 0):  # the compiled step is one kernel
            return None
        rows = plan.as_decode_rows(self.residual_length)
        return rows if rows.decode_only else None

    def pack(self, plan: StepPlan) -> StepPlan:
        """Return the plan unchanged: a step packs it directly into the buffers of its bucket."""
        return plan

    def __call__(self, plan: StepPlan, layers: tuple[int, ...] = ()) -> Tensor:
        count = len(plan.spans)
        rows = verify_bucket_for(count) if self.verifies else bucket_for(count + plan.padding_rows)
        if rows not in self.steps:
            step = self.steps[rows] = MlirStep(self, rows)
            self.artifacts = {**self.artifacts, step.name: step.step.kernel.digest}
            self.made += 1
        self.chosen = self.steps[rows].step.chosen
        with torch.inference_mode():
            return self.steps[rows](plan)


def check_mlir_step(model: Transformer, store: KVStore) -> None:
    """Raise WorkbenchError or BackendError if no step can be compiled for the model. Weights that a step can read only
    in panels are converted to panels.
    """
    if refusal := supports(Requirements.from_model(model, store)):
        raise WorkbenchError(f"backend mlir: cannot decode {model.spec.name}: {refusal.reason}")
    for part in model.blocks.modules():
        if part is not model.blocks and type(part).__module__ not in KNOWN_MODULES:
            remedy = "load the model on backend inductor or eager"
            raise BackendError(f"backend mlir: does not know how to decode with a {type(part).__name__}; {remedy}")
    model.use_code_panels()


def step_shape(
    model: Transformer,
    page_size: int,
    rows: int,
    cache_specs: tuple[KVCacheSpec, ...] | None = None,
    rows_share_sequences: bool = False,
) -> StepShape:
    """Return the shape that a step of `rows` rows is compiled for, by default over a dense cache."""
    cache_specs = cache_specs or model.cache_shapes()
    blocks = list(model.blocks)
    threads = torch.get_num_threads()
    groups = min(kind.attention.num_kv_heads for kind in model.spec.layers)
    return StepShape(
        rows=rows,
        hidden_size=model.spec.hidden_size,
        vocab_size=model.spec.vocab_size,
        eps=model.spec.norm.eps,
        dtype=MLIR_TYPES[model.dtype],
        layers=tuple(_layer(block, cache_specs[i], model.rotary_of_block[i]) for i, block in enumerate(blocks)),
        head=_head(model),
        page_size=page_size,
        max_pages=max(MIN_TABLE_WIDTH, pages_for(model.spec.max_position_embeddings, page_size)),
        chunks=threads if rows * groups < MIN_ROWS_PER_THREAD * threads else 1,
        target=Target.current(),
        same_sequence=rows_share_sequences,
        norm_dtype="f32" if model.spec.norm.offset else "",
    )


def _layer(block: TransformerBlock, cache: KVCacheSpec, rotary: int | None) -> LayerShape:
    attention, feedforward = attention_of(block), block.feedforward
    spec, experts = attention.spec, feedforward if isinstance(feedforward, MixtureOfExperts) else None
    runs = _runs(attention.qkv)
    rules = rules_of(attention.mask, attention.score, "decode_step", "mlir")
    if experts is not None:
        gate_up, down = (_expert_layout(experts, name) for name in STACKS)
        width = experts.sizes["down"][-1]
    else:
        assert isinstance(feedforward, GatedMLP)
        gate_up, down = _stored(feedforward.gate_up), _stored(feedforward.down)
        width = feedforward.down.in_features
    return LayerShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=width,
        scale=attention.scale,
        qkv=tuple(_stored(part, bias is not None, len(runs) > 1) for part, bias in runs),
        output=_stored(attention.output),
        gate_up=gate_up,
        down=down,
        activation=feedforward.activation.kind if isinstance(feedforward, GatedMLP) else "silu",
        post_norms=isinstance(block.attention_post_norm, RMSNorm),
        **rules._asdict(),
        selected=attention.selection is not None,
        selection=attention.selection,
        softcap=spec.softcap,
        sink_logits=spec.sink_logits,
        qk_norm=spec.qk_norm is not None,
        whole_qk_norm=spec.qk_norm is not None and spec.qk_norm.over == "projection",
        experts=None if experts is None else _mixture(experts),
        rotary_index=rotary,
        page_table=cache.residual_group if cache.format.quantized else cache.group,
        quantized=_layout(cache) if cache.format.quantized else None,
        quantized_page_table=cache.group if cache.format.quantized else None,
    )


def _mixture(experts: MixtureOfExperts) -> MixtureShape:
    router = experts.router.spec
    return MixtureShape(
        num_experts=len(experts.gate_up),
        per_row=experts.num_experts_per_tok,
        router=_stored(experts.router),
        score=router.score,
        softmax_chosen=router.softmax_chosen,
        renormalize=router.renormalize,
        factor=router.factor,
    )


def _expert_layout(experts: MixtureOfExperts, name: str) -> WeightLayout:
    weight, *_ = experts.stack(name)
    if not in_panels(weight):
        raise BackendError("backend mlir: needs the experts of a mixture in panels; see Transformer.use_panels")
    return replace(_weight(experts.formats[name], weight.dtype), panels=True)


def _layout(cache: KVCacheSpec) -> QuantizedLayout:
    columns = min(cache.format.columns, cache.head_dim)
    return QuantizedLayout(*cache.format.key_value_formats, columns, cache.quantization_rule)


def _runs(linear: Linear | StackedLinear) -> list[tuple[Linear, Tensor | None]]:
    """Return the parts that a matrix is stored in, each a range of rows, with their biases."""
    if isinstance(linear, Linear):
        return [(linear, linear.bias)]
    biases = [None] * len(linear.sizes) if linear.bias is None else linear.bias.split(linear.sizes)
    return list(zip(linear.parts, biases, strict=True))


def _stored(linear: Linear, bias: bool | None = None, is_part: bool = False) -> WeightLayout:
    if not linear.format.is_dense and not in_panels(linear.weight):
        reason = linear.panels_refusal or "it is not laid out in panels"
        raise BackendError(f"backend mlir: cannot decode with a matrix in {linear.format}: {reason}")
    weight = _weight(linear.format, linear.weight.dtype, linear.bias is not None if bias is None else bias)
    if is_part and not in_panels(linear.weight):
        raise BackendError("backend mlir: decodes with parts of a matrix in several formats only from panels")
    group = linear.panel_group if weight.quant_group else 0
    rows = linear.out_features if is_part else 0
    panels = in_panels(linear.weight)
    return replace(weight, quant_group=group, panels=panels, w8a8=linear.quantizes_x, rows=rows)


def _head(model: Transformer) -> WeightLayout:
    return WeightLayout(MLIR_TYPES[model.dtype]) if model.head is None else _stored(model.head)


def _weight(format: MatrixFormat, dtype: torch.dtype, bias: bool = False) -> WeightLayout:
    if format.is_dense:
        return WeightLayout(MLIR_TYPES[dtype], bias=bias)
    if format.words is not None:
        return WeightLayout(format.codes, bias=bias)
    minima = "" if format.minima is None else MLIR_TYPES[format.minima]
    return WeightLayout(weight_kind(format, dtype), format.group, bias, scales=MLIR_TYPES[format.scales], minima=minima)


def step_tensors(model: Transformer, store: KVStore) -> dict[str, Tensor]:
    """Return the model's weights and the cache's pages, by the names that the step uses."""
    found: dict[str, Tensor] = {"norm": _norm_weight(model.norm)}
    head = model.head_tensors if model.head is None else _stored_tensors(model.head)
    found |= {f"head_{i}": tensor for i, tensor in enumerate(head)}
    for index, (block, cache) in enumerate(zip(model.blocks, store.layers, strict=True)):
        found[f"attention_norm_{index}"] = _norm_weight(block.attention_norm)
        found[f"feedforward_norm_{index}"] = _norm_weight(block.feedforward_norm)
        attention, feedforward = attention_of(block), block.feedforward
        if isinstance(block.attention_post_norm, RMSNorm):
            for part in ("attention", "feedforward"):
                found[f"{part}_post_norm_{index}"] = _norm_weight(getattr(block, f"{part}_post_norm"))
        runs = _runs(attention.qkv)
        for number, (part, bias) in enumerate(runs if len(runs) > 1 else ()):
            stored = _stored_tensors(part, bias)
            found |= {f"qkv_{number}{i}_{index}": tensor for i, tensor in enumerate(stored)}
        products = {"output": attention.output} | ({"qkv": attention.qkv} if len(runs) == 1 else {})
        if isinstance(feedforward, MixtureOfExperts):
            products["router"] = feedforward.router
            for name in STACKS:
                weight, *beside = feedforward.stack(name)
                there = (each for each in beside if each is not None)
                parts = [as_words(weight), *(each[..., 0] if in_panels(each) else each for each in there)]
                found |= {f"{name}{i}_{index}": part.flatten(0, 1) for i, part in enumerate(parts)}
        else:
            assert isinstance(feedforward, GatedMLP)
            products |= {"gate_up": feedforward.gate_up, "down": feedforward.down}
        for name, linear in products.items():
            found |= {f"{name}{i}_{index}": tensor for i, tensor in enumerate(_stored_tensors(linear))}
        if attention.query_norm is not None and attention.key_norm is not None:
            found[f"query_norm_{index}"] = _norm_weight(attention.query_norm)
            found[f"key_norm_{index}"] = _norm_weight(attention.key_norm)
        if attention.sink_logits is not None:
            found[f"sink_logits_{index}"] = attention.sink_logits.float()
        found |= {f"{name}_{index}": _words(tensor) for name, tensor in cache.kernel_tensors().items()}
    return found


def _norm_weight(norm: Module) -> Tensor:
    """Return the weight of an RMS norm for the compiled step."""
    assert isinstance(norm, RMSNorm)
    return norm.multiplier


def _stored_tensors(linear: Linear, bias: Tensor | None = None) -> list[Tensor]:
    """Return a product's tensors as the step reads them: for panels the words, and scales and minima for whole pairs of
    panels; a dense matrix row by row unchanged.
    """
    tensors = [*linear.tensors, *([] if bias is None else [bias])]
    if not in_panels(linear.weight):
        return tensors
    words, *beside = tensors
    return [as_words(words), *(each[..., 0] if in_panels(each) else whole_panels(each) for each in beside)]


def _words(part: Tensor) -> Tensor:
    """View codes as the step's 32-bit words of four consecutive bytes; return other tensors unchanged."""
    return part.view(torch.int32)[..., 0] if part.dtype == torch.uint8 else part
