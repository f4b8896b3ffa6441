"""Describe one kind of layer for the compiler: its products, its attention, its weights, and the buffers between
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from compiled_kernels.blocked.few import FewRows, few
from compiled_kernels.blocked.int8_rows import quantize
from compiled_kernels.blocked.shape import Panels
from compiled_kernels.builder.functions import Given, call
from compiled_kernels.builder.target import Named, memref
from compiled_kernels.builder.values import Value
from compiled_kernels.decode_step.shape import LayerShape, MixtureShape, StepShape, WeightLayout
from compiled_kernels.expert_linear.listed_rows import ListedRows
from compiled_kernels.linear.rows import RowByRow, by_row
from compiled_kernels.page_selection.mlir import summary_arguments
from compiled_kernels.paged_attention.mlir_pages import Context
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention, HeadShape
from compiled_kernels.quantized_attention.mlir_context import QuantizedContext
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention

AnyProduct = RowByRow | FewRows
"""A matrix product of a step: with a weight stored row by row, or in panels (see blocked/layout.py)."""
Sized = RowByRow | Panels
"""A matrix product of a step, or a product with any number of rows."""


@dataclass(frozen=True)
class LayerKernel:
    """All layers of a step that have this `shape`. The names of their functions begin with `name`."""

    step: StepShape
    shape: LayerShape
    name: str = "layer"

    @property
    def qkv(self) -> tuple[AnyProduct, ...]:
        """Return the products that give queries, keys and values: one for each run of rows in which the matrix is
        stored.
        """
        (first, *more), width, columns = self.shape.qkv, self.step.hidden_size, self._qkv_columns
        if not more:
            return (layer_product(self.step, f"{self.name}_qkv", width, columns, first),)
        begins = itertools.accumulate((each.rows for each in self.shape.qkv), initial=0)
        runs = enumerate(zip(self.shape.qkv, begins, strict=False))
        named = ((f"{self.name}_qkv_{i}", run, begin) for i, (run, begin) in runs)
        return tuple(
            layer_product(self.step, name, width, run.rows, run, columns=columns, first_column=begin)
            for name, run, begin in named
        )

    @property
    def output(self) -> AnyProduct:
        width = self.shape.num_heads * self.shape.head_dim
        return layer_product(
            self.step, f"{self.name}_output", width, self.step.hidden_size, self.shape.output, accumulate=self.adds
        )

    @property
    def adds(self) -> bool:
        """Return whether products add their results to the residual stream directly."""
        return self.step.half is None and not self.shape.post_norms

    @property
    def gate_up(self) -> AnyProduct:
        columns = 2 * self.shape.intermediate_size
        return layer_product(
            self.step, f"{self.name}_gate_up", self.step.hidden_size, columns, self.shape.gate_up, segments=2
        )

    @property
    def down(self) -> AnyProduct:
        return layer_product(
            self.step,
            f"{self.name}_down",
            self.shape.intermediate_size,
            self.step.hidden_size,
            self.shape.down,
            accumulate=self.adds,
        )

    @property
    def experts(self) -> MixtureShape:
        """Return the mixture of experts of this layer, which must have one."""
        assert self.shape.experts is not None
        return self.shape.experts

    @property
    def router(self) -> AnyProduct:
        """Return the product that computes each row's logits of the experts."""
        experts, step = self.experts, replace(self.step, dtype=self.expert_dtype)
        return layer_product(step, f"{self.name}_router", step.hidden_size, experts.num_experts, experts.router)

    @property
    def expert_gate_up(self) -> ListedRows:
        """Return the product of rows with the gate and up weights of their experts; its result has a row for each
        expert of each row."""
        width = self.step.hidden_size, 2 * self.shape.intermediate_size
        return self._by_experts("gate_up", *width, self.shape.gate_up, self.rows_per_token)

    @property
    def expert_down(self) -> ListedRows:
        return self._by_experts("down", self.shape.intermediate_size, self.step.hidden_size, self.shape.down, 1)

    def _by_experts(self, name: str, width: int, out: int, weight: WeightLayout, reads: int) -> ListedRows:
        stack = width, self.experts.num_experts * out, weight.dtype, self.expert_dtype, self.step.target
        beside = {"quant_group": weight.quant_group, "scales": weight.scales, "minima": weight.minima}
        return ListedRows(f"{self.name}_{name}", *stack, rows=self.feedforward_rows, columns=out, reads=reads, **beside)

    @property
    def expert_dtype(self) -> str:
        """Return the type of the experts' operands: bfloat16 if the processor sums pairs of bfloat16 products, else
        float32.
        """
        return self.step.dtype if self.step.target.has_bf16_dot else "f32"

    @property
    def rows_per_token(self) -> int:
        """Return the number of feed-forward rows for each row of the step: one for each expert that the row chooses."""
        return 1 if self.shape.experts is None else self.shape.experts.per_row

    @property
    def feedforward_rows(self) -> int:
        return self.step.rows * self.rows_per_token

    def name_of(self, product: Sized) -> str:
        """Return the name of a product's weights: the product's name without the layer's."""
        return product.name.removeprefix(f"{self.name}_")

    @property
    def products(self) -> tuple[AnyProduct, ...]:
        """Return the products that multiply all rows of the step."""
        feedforward = (self.gate_up, self.down) if self.shape.experts is None else (self.router,)
        return (*self.qkv, self.output) * self.step.has("attention") + feedforward * self.step.has("feedforward")

    @property
    def attention(self) -> DecodeAttention:
        step, shape = self.step, self.shape
        sizes = {each: getattr(step, each) for each in ("rows", "page_size", "max_pages", "chunks", "dtype", "target")}
        heads = {each.name: getattr(shape, each.name) for each in fields(HeadShape)}
        if shape.quantized is None:
            return DecodeAttention(**heads, **sizes)
        return QuantizedAttention(**heads, **sizes, layout=shape.quantized)

    @property
    def context(self) -> Context:
        """Return the description of the keys and values that a row's attention reads."""
        shape = self.attention
        return QuantizedContext(shape) if isinstance(shape, QuantizedAttention) else Context(shape)

    @property
    def quantized_pages(self) -> list[Named]:
        """Return the arguments for quantized keys and values (codes, scales, minima); an empty list without a quantized
        cache.
        """
        return [each for kind in self.context.kinds[1:] for each in kind.memories]

    @property
    def summaries(self) -> list[Named]:
        """Return the arguments for the pages' summaries, if the layer selects pages."""
        attention, selection = self.attention, self.shape.selection
        return [] if selection is None else summary_arguments(attention, selection)

    @property
    def page_tables(self) -> list[Named]:
        """Return the arguments for page tables: the table of the residual pages and, with a quantized cache, the table
        of the quantized pages.
        """
        kind = self.attention.types["table"]
        return [Named("table", kind), *([Named("quantized_table", kind)] if self.quantized_pages else [])]

    @property
    def weights(self) -> list[Named]:
        """Return the arguments for the layer's weights, in the order in which they are passed."""
        attention, feedforward = self.step.has("attention"), self.step.has("feedforward")
        products = [each for product in (*self.qkv, self.output) for each in self.stored(product)]
        return [
            *[Named("attention_norm", self.step.norm_type), *products, *self.post_norm("attention")] * attention,
            *[
                Named("feedforward_norm", self.step.norm_type),
                *self._feedforward_weights,
                *self.post_norm("feedforward"),
            ]
            * feedforward,
            *[*self.head_norms.values(), *self.sink_logits] * attention,
        ]

    @property
    def _feedforward_weights(self) -> list[Named]:
        if self.shape.experts is None:
            products = self.gate_up, self.down
        else:
            products = self.router, self.expert_gate_up, self.expert_down
        return [each for product in products for each in self.stored(product)]

    def stored(self, product: Sized) -> list[Named]:
        """Return the arguments for the weight of a product."""
        return weight_arguments_of(self.name_of(product), product)

    def post_norm(self, part: str) -> list[Named]:
        """Return the weight of the norm after `part` (attention or feed-forward); an empty list if there is no such
        norm.
        """
        return [Named(f"{part}_post_norm", self.step.norm_type)] if self.shape.post_norms else []

    @property
    def head_norms(self) -> dict[str, Named]:
        """Return the norm weights of queries and keys; empty if they are not normalized."""
        heads = {"query": self.shape.num_heads, "key": self.shape.num_kv_heads}
        widths = {of: self.shape.head_dim * (count if self.shape.whole_qk_norm else 1) for of, count in heads.items()}
        kind = self.step.norm_dtype or self.step.dtype
        norms = {of: Named(f"{of}_norm", memref((width,), kind)) for of, width in widths.items()}
        return norms if self.shape.qk_norm else {}

    @property
    def sink_logits(self) -> list[Named]:
        return [Named("sink_logits", self.attention.types["sinks"])] if self.shape.sink_logits else []

    @property
    def own_arguments(self) -> list[Named]:
        """Return the arguments that differ between layers of the same shape: weights and pages."""
        kind = self.attention.pages
        pages = [Named("keys", kind), Named("values", kind), *self.quantized_pages, *self.summaries]
        return [*self.weights, *pages * self.step.has("attention")]

    @property
    def x(self) -> Named:
        """Return the buffer of the residual stream."""
        return Named("x", memref((self.step.rows, self.step.hidden_size), "f32"))

    @property
    def added(self) -> Named:
        """Return the buffer that products write or add results to: the residual stream, or a separate buffer if the
        step computes half of each layer or a norm follows.
        """
        return self.x if self.adds else Named("added", self.x.type)

    @property
    def qkv_out(self) -> Named:
        return Named(f"qkv_out_{self._qkv_columns}", memref((self.step.rows, self._qkv_columns), "f32"))

    @property
    def partial(self) -> Named:
        return Named(f"partial_{self.shape.num_heads}_{self.shape.head_dim}", self.attention.types["partial"])

    @property
    def gate_up_out(self) -> Named:
        return Named(
            f"gate_up_out_{self._feedforward_size}",
            memref((self.feedforward_rows, 2 * self.shape.intermediate_size), "f32"),
        )

    @property
    def gated(self) -> Named:
        dtype = self.step.dtype if self.shape.experts is None else self.expert_dtype
        return Named(
            f"gated_{self._feedforward_size}", memref((self.feedforward_rows, self.shape.intermediate_size), dtype)
        )

    @property
    def _feedforward_size(self) -> str:
        experts = self.shape.experts
        return f"{self.shape.intermediate_size}" + ("" if experts is None else f"x{experts.per_row}")

    @property
    def expert_buffers(self) -> list[Named]:
        """Return the buffers for the experts' logits and for the result of each expert of each row; empty without a
        mixture.
        """
        if self.shape.experts is None:
            return []
        return [self.router_logits, self.expert_out]

    @property
    def chosen(self) -> list[Named]:
        """Return the buffer with the experts that each row chose, one row after another; none without a mixture of
        experts.
        """
        there = self.shape.experts and self.step.has("feedforward")
        return [Named("chosen", self.expert_down.order_type)] if there else []

    @property
    def router_logits(self) -> Named:
        count = self.experts.num_experts
        return Named(f"router_logits_{count}", memref((self.step.rows, count), "f32"))

    @property
    def expert_out(self) -> Named:
        return Named(f"expert_out_{self.rows_per_token}", self.expert_down.out_type)

    @property
    def shared_buffers(self) -> list[Named]:
        """Return the buffers that all threads share. They are named after their sizes, so that layers of equal size
        share them."""
        found = [self.x] if self.adds else [self.x, self.added]
        if self.step.has("attention"):
            found += [Named("lengths", self.attention.types["lengths"]), self.qkv_out, self.partial]
        return found + ([self.gate_up_out, self.gated, *self.expert_buffers] if self.step.has("feedforward") else [])

    @property
    def angles(self) -> list[Named]:
        """Return the arguments for cosines and sines of each row's position; empty if queries and keys are not
        rotated.
        """
        return [] if self.shape.rotary_index is None else rotary_arguments(self.step, self.shape.head_dim)

    @property
    def _qkv_columns(self) -> int:
        return (self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim


def head_product(step: StepShape) -> AnyProduct | None:
    """Return the product of the last norm's output with the output head, which gives the logits; None if the step has
    no head.
    """
    return step.head and layer_product(step, "head", step.hidden_size, step.vocab_size, step.head)


def rotary_arguments(step: StepShape, dim: int, suffix: str = "") -> list[Named]:
    return [Named(name + suffix, memref((step.rows, dim // 2), "f32")) for name in ("cos", "sin")]


def layer_product(
    step: StepShape, name: str, width: int, out: int, weight: WeightLayout, accumulate: bool = False,
    segments: int = 1, columns: int = 0, first_column: int = 0,
) -> AnyProduct:  # fmt: skip
    """Return the product with a weight of `out` rows. If the weight is a run of rows of a larger matrix, `columns` and
    `first_column` give the place of its result (see `FewRows`)."""
    if weight.panels:
        panels = weight.dtype, step.dtype, step.target, weight.bias
        return FewRows(
            name, width, out, *panels, step.rows, accumulate, w8a8=weight.w8a8, quant_group=weight.quant_group,
            scales=weight.scales, minima=weight.minima, columns=columns, first_column=first_column,
        )  # fmt: skip
    stored = weight.dtype, step.dtype, step.target, weight.bias
    return RowByRow(name, step.rows, width, out, *stored, accumulate, segments)


def make_products(prefix: str, products: Iterable[AnyProduct], rows: int) -> None:
    """Build the functions @name(x, weights, out, begin, end) of these products, and the functions that quantize their
    inputs.
    """
    for product in products:
        few(product) if isinstance(product, FewRows) else by_row(product)
    make_quantizers(prefix, products, rows)


def make_quantizers(prefix: str, products: Iterable[Sized], rows: int) -> None:
    """Build the functions that quantize rows to INT8, for the products that read INT8 rows."""
    for int8 in dict.fromkeys(each.int8_rows for each in products if isinstance(each, Panels) and each.w8a8):
        quantize(f"{prefix}_{int8.named(rows).name}", int8, rows)


def int8_buffers(products: Iterable[Sized], rows: int) -> list[Named]:
    """Return the buffers for rows in INT8: one for all products of equal width."""
    return list(
        dict.fromkeys(each.int8_rows.named(rows) for each in products if isinstance(each, Panels) and each.w8a8)
    )


def enter(
    products: Iterable[Sized], given: Given, x: str, prefix: str, rows: tuple[Value | int, Value | int]
) -> None:  # fmt: skip
    """Convert the rows of x between two bounds to the operands of these products, by functions whose names begin with
    `prefix`. Each thread converts all of these rows itself rather than wait for other threads."""
    for made, _ in int8_buffers(products, 1):
        call(f"{prefix}_{made}", [given[x], given[made], *rows])


def multiply(product: Sized, weights: str, given: Given, x: str, out: str, *bounds: Iterable[Value | int]) -> None:
    """Emit out = x times the weight, or out += for a product that adds, once for each of `bounds`. The names of the
    weight's arguments begin with `weights`."""
    entering = product.int8_rows.named(1).name if isinstance(product, Panels) and product.w8a8 else x
    stored = [given[name] for name, _ in weight_arguments_of(weights, product)]
    for each in bounds:
        call(product.name, [given[entering], *stored, given[out], *each])


def weight_arguments_of(name: str, of: Sized) -> list[Named]:
    """Return the arguments for a product's weight, scales and bias; their names begin with `name`."""
    return [Named(f"{name}{i}", kind) for i, kind in enumerate(of.weight_types)]
