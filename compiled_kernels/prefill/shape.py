"""Define the shape that the parts of a block before and after attention are compiled for, with any number of rows and
sequences.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property

from compiled_kernels.blocked.few import FewRows
from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.many_rows import ManyRows
from compiled_kernels.blocked.shape import Panels
from compiled_kernels.builder.target import SIZE_BOUND, Named, Target, memref
from compiled_kernels.decode_step.layer_kernel import AnyProduct, LayerKernel, int8_buffers
from compiled_kernels.decode_step.shape import LayerShape, StepShape
from compiled_kernels.paged_attention.mlir_shape import HeadShape


@dataclass(frozen=True)
class BlockShape:
    """A decoder block for prefill. The weights of its products (qkv, output, gate and up, down) must be in panels: see
    blocked/layout.py.

    `dtype` (f32 or bf16) is the type of queries, keys and values; the residual stream is float32.
    """

    layer: LayerShape
    hidden_size: int
    eps: float
    dtype: str
    target: Target
    norm_dtype: str = ""

    def __post_init__(self) -> None:
        products = *self.layer.qkv, self.layer.output, self.layer.gate_up, self.layer.down
        if not all(weight.panels for weight in products):
            raise ValueError("a block of a prefill needs all of its weights in panels")

    @property
    def code_key(self) -> BlockShape:
        """Return the shape without the fields that only attention and the cache depend on. Blocks share compiled code
        if this value is equal."""
        rotary = None if self.layer.rotary_index is None else 0
        ours = {each.name: each.default for each in fields(HeadShape) if each.default is not MISSING}
        pages = {"page_table": 0, "quantized": None, "quantized_page_table": None, "selection": None}
        return replace(self, layer=replace(self.layer, rotary_index=rotary, scale=1.0, **ours, **pages))

    @cached_property
    def layer_kernel(self) -> LayerKernel:
        """Return the kernel description of the layer, for any number of rows; the compiled decode step has a fixed
        number.
        """
        sizes = SIZE_BOUND, self.hidden_size, 1, self.eps, self.dtype, (), None, 1, 1, 1
        return LayerKernel(StepShape(*sizes, self.target, norm_dtype=self.norm_dtype), self.layer, "block")

    @cached_property
    def qkv(self) -> tuple[ManyRows, ...]:
        return tuple(map(_many, self.layer_kernel.qkv))

    @cached_property
    def output(self) -> ManyRows:
        return _many(self.layer_kernel.output)

    @cached_property
    def gate_up(self) -> ManyRows:
        """Return the product with the gate and up weights. A pair of panels has one of the gate and one of up, so that
        the gated result is `intermediate_size` columns wide."""
        hidden = self.layer.intermediate_size
        return replace(
            _many(self.layer_kernel.gate_up),
            out_dtype=self.down.multiplied_dtype,
            columns=hidden,
            panel_distance=hidden // PANEL,
        )

    @cached_property
    def down(self) -> ManyRows:
        return _many(self.layer_kernel.down)

    @property
    def x(self) -> Named:
        """Return the argument for the residual stream."""
        return self.layer_kernel.x

    @property
    def normed(self) -> Named:
        return Named("normed", memref((SIZE_BOUND, self.hidden_size), self.qkv[0].multiplied_dtype))

    @property
    def products(self) -> tuple[ManyRows, ...]:
        return *self.qkv, self.output, self.gate_up, self.down

    @property
    def mixed(self) -> Named:
        """Return the argument for the result of attention, in the type of the cache."""
        return Named("mixed", memref((SIZE_BOUND, self.layer.num_heads * self.layer.head_dim), self.dtype))

    @property
    def widened(self) -> list[Named]:
        """Return the buffer for the result of attention in the type of the next product's operand; empty if the types
        are equal.
        """
        return [] if self.output.multiplied_dtype == self.dtype else [Named("widened", self.output.x_type)]

    @property
    def gated(self) -> Named:
        return Named("gated", self.gate_up.out_type)

    @property
    def heads(self) -> list[Named]:
        """Return the arguments for queries, keys and values [row, head, dim]."""
        dim, groups = self.layer.head_dim, self.layer.num_kv_heads
        sizes = {"q": self.layer.num_heads, "k": groups, "v": groups}
        return [Named(name, memref((SIZE_BOUND, count, dim), self.dtype)) for name, count in sizes.items()]

    @property
    def before(self) -> list[Named]:
        """Return the arguments of the part before attention, except the number of rows."""
        norm = Named("attention_norm", self.layer_kernel.step.norm_type)
        head_norms = self.layer_kernel.head_norms.values()
        products = [named for product in self.qkv for named in self.layer_kernel.stored(product)]
        weights = [norm, *products, *head_norms]
        between = [self.normed, *int8_buffers(self.qkv, SIZE_BOUND), self.layer_kernel.qkv_out]
        return [*weights, self.x, *self.layer_kernel.angles, *between, *self.heads]

    @property
    def after(self) -> list[Named]:
        """Return the arguments of the part after attention, except the number of rows."""
        norm = Named("feedforward_norm", self.layer_kernel.step.norm_type)
        post = [each for part in ("attention", "feedforward") for each in self.layer_kernel.post_norm(part)]
        products = self.output, self.gate_up, self.down
        weights = [norm, *post, *(named for product in products for named in self.layer_kernel.stored(product))]
        rows = int8_buffers(products, SIZE_BOUND)
        added = [] if self.layer_kernel.adds else [self.layer_kernel.added]
        return [*weights, self.x, *added, self.mixed, *self.widened, self.normed, self.gated, *rows]

    def buffers(self) -> dict[str, tuple[int, str]]:
        """Return the number of columns and the element type of each intermediate buffer: an argument with a row for
        each token.
        """
        found = {}
        for name, kind in (*self.before, *self.after):
            rows, *sizes, element = kind.removeprefix("memref<").removesuffix(">").split("x")
            if rows == str(SIZE_BOUND):
                found[name] = (math.prod(map(int, sizes)), element)
        return found


def _many(product: AnyProduct) -> ManyRows:
    assert isinstance(product, FewRows)  # its weight is in panels
    shared = {each.name: getattr(product, each.name) for each in fields(Panels)}
    return ManyRows(**shared, columns=product.columns, first_column=product.first_column)
