"""The shape that the two sides of a block are compiled for: any number of rows, whatever sequences they are of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from compiled_kernels.blocked.few import FewRows
from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.many import ManyRows
from compiled_kernels.decode_step.parts import AnyProduct, Layer, int8_buffers, matrices
from compiled_kernels.decode_step.shape import LayerShape, StepShape
from compiled_kernels.mlir_text import PAGES, Named, Target, memref


@dataclass(frozen=True)
class BlockShape:
    """A block of `layer`, whose four products have their weights in panels, in a model of this `hidden_size`.

    `dtype` (f32 or bf16) is the type of queries, keys and values; the residual stream is float32.
    """

    layer: LayerShape
    width: int
    eps: float
    kind: str
    target: Target

    def __post_init__(self) -> None:
        products = self.layer.qkv, self.layer.output, self.layer.gate_up, self.layer.down
        if not all(weight.panels for weight in products):
            raise ValueError("a block of a prefill reads all of its weights in panels")

    @property
    def alike(self) -> BlockShape:
        """Return the shape without what only attention and the cache are compiled for: blocks with equal keys share
        code."""
        turn = None if self.layer.turn is None else 0
        ours = {"table": 0, "packing": None, "window": 0, "sinks": 0, "softcap": 0.0, "sink_logits": False}
        return replace(self, layer=replace(self.layer, turn=turn, scale=1.0, **ours))

    @cached_property
    def parts(self) -> Layer:
        """Return the layer with rows of any number, as the compiled step has it with a fixed one."""
        step = StepShape(PAGES, self.width, 1, self.eps, self.kind, (), None, 1, 1, 1, self.target)
        return Layer(step, self.layer, "block")

    @cached_property
    def qkv(self) -> ManyRows:
        return _many(self.parts.qkv)

    @cached_property
    def output(self) -> ManyRows:
        return _many(self.parts.output)

    @cached_property
    def gate_up(self) -> ManyRows:
        """Return the product of gate and up. Pairs of panels are one of the gate and one of up, so that its end is
        `intermediate_size` columns wide."""
        hidden = self.layer.hidden
        return replace(_many(self.parts.gate_up), result=self.down.entering, columns=hidden, apart=hidden // PANEL)

    @cached_property
    def down(self) -> ManyRows:
        return _many(self.parts.down)

    @property
    def x(self) -> Named:
        """Return the residual stream."""
        return self.parts.x

    @property
    def normed(self) -> Named:
        return Named("normed", memref((PAGES, self.width), self.qkv.entering))

    @property
    def products(self) -> tuple[ManyRows, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def mixed(self) -> Named:
        """Return the result of attention, in the type of the cache."""
        return Named("mixed", memref((PAGES, self.layer.heads * self.layer.dim), self.kind))

    @property
    def widened(self) -> list[Named]:
        """Return the result of attention as it is multiplied, where that is another type."""
        return [] if self.output.entering == self.kind else [Named("widened", self.output.x_type)]

    @property
    def gated(self) -> Named:
        return Named("gated", self.gate_up.out_type)

    def int8(self, *products: ManyRows) -> list[Named]:
        """Rows of INT8 that are multiplied with these weights in place of rows of numbers, one buffer a width."""
        return int8_buffers(products, PAGES)

    @property
    def heads(self) -> list[Named]:
        """Return the queries, keys and values: [row, head, dim]."""
        dim, groups = self.layer.dim, self.layer.groups
        sizes = {"q": self.layer.heads, "k": groups, "v": groups}
        return [Named(name, memref((PAGES, count, dim), self.kind)) for name, count in sizes.items()]

    @property
    def before(self) -> list[Named]:
        """Return the arguments of the side before attention, but for the number of rows."""
        norm = Named("attention_norm", self.parts.norm_type)
        head_norms = self.parts.head_norms.values()
        weights = [norm, *matrices("qkv", self.qkv), *head_norms]
        between = [self.normed, *self.int8(self.qkv), self.parts.qkv_out]
        return [*weights, self.x, *self.parts.angles, *between, *self.heads]

    @property
    def after(self) -> list[Named]:
        """Return the arguments of the side after attention, but for the number of rows."""
        norm = Named("feedforward_norm", self.parts.norm_type)
        products = (("output", self.output), ("gate_up", self.gate_up), ("down", self.down))
        weights = [norm, *(named for name, product in products for named in matrices(name, product))]
        rows = self.int8(self.output, self.gate_up, self.down)
        return [*weights, self.x, self.mixed, *self.widened, self.normed, self.gated, *rows]

    def buffers(self) -> dict[str, tuple[int, str]]:
        """Return columns and type of what lies between: of each argument that holds a row for each token."""
        found = {}
        for name, kind in (*self.before, *self.after):
            rows, *sizes, element = kind.removeprefix("memref<").removesuffix(">").split("x")
            if rows == str(PAGES):
                found[name] = (_product(map(int, sizes)), element)
        return found


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _many(product: AnyProduct) -> ManyRows:
    assert isinstance(product, FewRows)  # its weight is in panels
    stored = product.kind, product.x, product.target, product.bias
    return ManyRows(product.name, product.width, product.out, *stored, w8a8=product.w8a8)
