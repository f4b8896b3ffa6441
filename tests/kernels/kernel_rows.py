"""The arguments that every operator is tried with, on every backend: values of each axis, and the rows that come first,
boundaries among them. `covering` makes rows of the axes that hold every pair of values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.capabilities import known_gap
from compiled_kernels.linear.cases import GROUPED, NAMED
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
from compiled_kernels.masks import AndMask, Causal, HeadMask, SlidingWindow
from compiled_kernels.paged_attention.cases import even, later_for_later_heads
from tests.helpers.kernels import needs
from tests.helpers.rows import Row, covering
from tests.thorough import THOROUGH, run_seed

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]


def near_or_every_third(query: Tensor, key: Tensor) -> Tensor:
    return (query - key < 4) | (key % 3 == 0)


def some_blocks(query: Tensor, key: Tensor) -> Tensor:
    """Blocks of four keys by a hash of their numbers, as of BigBird."""
    return ((query // 4 * 2654435761 ^ key // 4 * 40503) % 2**32) % 3 == 0


@dataclass(frozen=True)
class KernelRows:
    """An operator's axes, its rows that come first, and which rows make sense; then other axes of its."""

    axes: dict[str, Sequence[Any]]
    first: tuple[Row, ...] = ()
    valid: Callable[..., bool] = lambda **row: True
    more: tuple[KernelRows, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Yield arguments of the operator's inputs: the first rows, those that hold all pairs, and in
        `make test-thorough` twelve that are drawn by the run's random seed."""
        whole = [{name: row.get(name, values[0]) for name, values in self.axes.items()} for row in self.first]
        whole += covering(self.axes, whole, self.valid)
        if THOROUGH:
            draw = random.Random(run_seed())
            more = [{name: draw.choice(values) for name, values in self.axes.items()} for _ in range(120)]
            whole += [row for row in more if self.valid(**row)][:12]
        for row in whole:
            packed = {name: value for name, value in row.items() if isinstance(value, dict)}
            plain = {name: value for name, value in row.items() if name not in packed}
            yield {**plain, **{name: value for each in packed.values() for name, value in each.items()}}
        for each in self.more:
            yield from each.rows()


# Pages of 4 tokens: contexts of a page less one, of a page, and of one more; one token; spans that end with a page.
ONE = {"contexts": (1,), "spans": (1,)}
DECODES = {"contexts": (3, 4, 5, 13), "spans": (1, 1, 1, 1)}
SPANS = {"contexts": (9, 8, 14), "spans": (4, 8, 3)}
AT_TILES = {"contexts": (65, 64, 79), "spans": (65, 64, 48)}  # spans that end with a tile, one less and one more
MIXED = {"contexts": (9, 14, 8, 5), "spans": (1, 1, 8, 3)}
SINKS = SlidingWindow(5, num_sink_tokens=2)  # sinks that end within a page
PART_PAGE = SlidingWindow(3, num_sink_tokens=6)  # and that fill one, and a part of the next
BY_HEAD = AndMask(Causal(), HeadMask(later_for_later_heads, 6))


def attention_is_sound(mask: Any, sinks: bool, score: dict, heads: dict, **_: Any) -> bool:
    """Weights that no softmax divides have no sink; a mask by head is of six heads."""
    by_head = isinstance(mask, AndMask) and isinstance(mask.second, HeadMask)
    return not (sinks and "sigmoid" in score) and (not by_head or heads["num_kv_heads"] == 2)


LONG = {"contexts": (1, 60, 33), "spans": (1, 1, 1)}
AT_GROUPS = {"contexts": (7, 8, 9, 24), "spans": (1, 1, 1, 1)}  # of eight tokens, which share a scale
WIDTHS = {"width": [64, 1, 70]}
SHORT_ROWS = {"tokens": [3, 1], **WIDTHS, "dtype": DTYPES}
GATES = KernelRows({"tokens": [3, 1], "hidden": [64, 1, 70], "dtype": DTYPES})
PANELS = [
    {"width": 48, "out": 33, "panels": False},
    {"width": 352, "out": 64, "panels": True},  # blocks along the width, of which the last is shorter
    {"width": 16, "out": 192, "panels": True},
]
DENSE = {"tokens": [1, 3, 6, 7, 33], "weight": PANELS, "bias": [True, False], "dtype": DTYPES}
MANY = ({"tokens": 397, "weight": PANELS[1]}, {"tokens": 397, "weight": PANELS[1], "dtype": BF16})
STACKS = [
    {"format": format, "width": width, "out": 128 if panels else 7, "panels": panels}
    for format, width, panels in (
        (DENSE_MATRIX, 352, True), (DENSE_MATRIX, 33, False), (INT8_MATRIX, 352, True),
        (MatrixFormat("int8", 16, torch.float16), 48, False), (MatrixFormat("int4", 8, torch.float16), 352, True),
        (MatrixFormat("int4", 8, torch.bfloat16, torch.float32), 48, False),
        (MatrixFormat.named("mxfp4"), 352, True), (MatrixFormat.named("q5_1"), 64, False),
        (MatrixFormat.named("q4_k"), 512, True), (MatrixFormat.named("q6_k"), 256, False),
    )
]  # fmt: skip

KERNELS: dict[str, KernelRows] = {
    "rms_norm": KernelRows(SHORT_ROWS),
    "add_rms_norm": KernelRows(SHORT_ROWS),
    "rotary": KernelRows({"tokens": [3, 1], "heads": [2, 1], "dim": [2, 64, 70], "dtype": DTYPES}),
    "gated_silu": GATES,
    "gated_gelu": GATES,
    "gated_clamped": GATES,
    "log_softmax": KernelRows({"samples": [3, 1], "vocab": [257, 64, 6], "dtype": [F32]}),
    "top_logprobs": KernelRows({"samples": [3, 1], "vocab": [257, 64, 6], "count": [1, 5, 6], "dtype": [F32]}),
    "kv_write": KernelRows(
        {"tokens": [1, 5], "pages": [5], "num_kv_heads": [2, 1], "size": [4, 1], "dim": [8, 7], "dtype": DTYPES}
    ),
    "linear": KernelRows({**DENSE, "weight_dtype": [None, torch.float16]}, MANY),
    "linear_quantized": KernelRows(
        {**DENSE, "format": [INT8_MATRIX]}, MANY, more=(
            KernelRows({**DENSE, "format": [INT8_MATRIX], "activations": ["int8"]}, MANY),
            KernelRows(
                {
                    "tokens": [1, 3, 6, 17], "width": [176, 192], "out": [9, 33], "bias": [True, False],
                    "dtype": DTYPES, "format": GROUPED,
                },
                valid=lambda width, format, **_: format.codes != "int4" or width == 192,
            ),
            KernelRows(
                {
                    "tokens": [1, 3, 17], "width": [512, 256], "out": [9, 530], "bias": [True, False],
                    "dtype": DTYPES, "format": NAMED,
                }
            ),
        ),
    ),
    "expert_linear": KernelRows(
        {
            "rows": [9, 1, 40], "experts": [5], "named": [5, 1, 3], "bias": [True, False], "dtype": DTYPES,
            "stack": STACKS,
        }
    ),
    "paged_attention": KernelRows(
        {
            "batch": [DECODES, SPANS, MIXED], "mask": [Causal(), SINKS, BY_HEAD, AndMask(PART_PAGE, some_blocks)],
            "heads": [{"num_kv_heads": 2, "queries_per_kv": 3}, {"num_kv_heads": 1, "queries_per_kv": 1}],
            "dim": [8, 32], "size": [4, 3], "softcap": [0.0, 1.5], "sinks": [False, True],
            "score": [{}, {"alibi": True}, {"sigmoid": True}], "selected": [1.0, 0.4], "dtype": DTYPES,
        },
        (
            {"batch": ONE},
            {"batch": DECODES, "mask": SINKS},
            {"batch": DECODES, "mask": PART_PAGE, "dtype": BF16},
            {"batch": SPANS, "mask": PART_PAGE},
            {"batch": AT_TILES, "size": 16},
            {"batch": DECODES, "mask": AndMask(Causal(), even), "size": 1},
            {"batch": SPANS, "mask": AndMask(Causal(), near_or_every_third), "size": 1},
        ),
        attention_is_sound,
    ),
    "quantized_attention": KernelRows(
        {
            "batch": [LONG, AT_GROUPS],
            "formats": [("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("dense", "int4")],
            "window": [
                {"mask": Causal()},
                {"mask": SlidingWindow(6, num_sink_tokens=3), "first": 3},
                {"mask": AndMask(SlidingWindow(11, num_sink_tokens=9), some_blocks), "first": 9},
            ],
            "heads": [
                {"num_kv_heads": 2, "queries_per_kv": 3},
                {"num_kv_heads": 1, "queries_per_kv": 1},
                {"num_kv_heads": 1, "queries_per_kv": 5},
            ],
            "dim": [16, 8], "size": [16, 8], "run": [8], "columns": [8, 64], "lag": [5, 1, 20], "softcap": [0.0, 1.5],
            "sinks": [False, True], "dtype": DTYPES,
        },
        ({"batch": ONE, "formats": ("int4", "int4")},),
    ),
}  # fmt: skip

TABLES = [(operator, part) for operator, table in KERNELS.items() for part in (replace(table, more=()), *table.more)]


def refused(operator: str, backend: Backend, row: Row) -> bool:
    """Return whether a row is none of this backend's: gaps of the table, and what Inductor would compile a graph for,
    which tests of its graphs do."""
    if known_gap(operator, backend, " INT8 activations" if row.get("activations") == "int8" else ""):
        return True
    if backend is Backend.MLIR:
        return "dense" in row.get("formats", ())
    if backend is Backend.TRITON:
        return False
    spans, plain = row.get("spans", ()), isinstance(row.get("mask"), Causal | SlidingWindow)
    plain = plain and row.get("selected", 1.0) == 1.0 and set(spans) == {1}
    return backend is Backend.INDUCTOR and 1 in spans and not plain and not THOROUGH


def kernel_rows(*backends: Backend) -> list[Any]:
    """Return backend, operator, row and a number of threads, as a test's parameters."""
    return [
        pytest.param(backend, operator, row, 1 + number % 3, marks=needs(backend), id=f"{backend}-{operator}-{number}")
        for operator, table in KERNELS.items()
        for number, row in enumerate(table.rows())
        for backend in backends
        if not refused(operator, backend, row)
    ]
