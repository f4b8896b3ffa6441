"""Each operator's claim: a row has the same bits alone and among others, or the table says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.capabilities import BATCH_VARIANT, batch_variance
from compiled_kernels.cases import random_normal, suite_of, suites
from tests.helpers.kernels import needs, on_threads
from tests.kernels.kernel_rows import TABLES
from tests.thorough import THOROUGH, run_seed

OPERATORS = (
    "linear", "linear_quantized", "expert_linear", "rms_norm", "rotary", "gated_silu", "gated_gelu", "gated_clamped",
)  # fmt: skip
PER_ROW = {"rotary": 3, "expert_linear": 2}  # how many of the first inputs have a line for each row; of others one
MAX_ROWS = 6  # of an operator's, in `make test`
ODD = (None, torch.nan, torch.inf, 1e30)


def kept() -> list[Any]:
    """Return backend, operator and row for what the table does not call variant."""
    found = []
    for operator, table in TABLES:
        if operator not in OPERATORS:
            continue
        several = [row for row in table.rows() if row.get("tokens", row.get("rows", 0)) > 1]
        for row in several[:: 1 if THOROUGH else -(-len(several) // MAX_ROWS)]:
            for backend in (Backend.EAGER, Backend.MLIR):  # sums of INT8 are exact on either
                if not batch_variance(operator, backend) or row.get("activations") == "int8":
                    found.append(pytest.param(backend, operator, row, marks=needs(backend)))
    return found


@pytest.mark.parametrize(("backend", "operator", "row"), kept())
def test_row_has_the_same_bits_alone(backend: Backend, operator: str, row: dict[str, Any]) -> None:
    """At every place, beside rows that are no numbers, on any number of threads."""
    suite = suite_of(operator)
    inputs = suite.input_maker(torch.Generator().manual_seed(run_seed()), **row)
    lines, rest = inputs[: PER_ROW.get(operator, 1)], inputs[PER_ROW.get(operator, 1) :]
    count = len(lines[0])
    for place in range(0, count, 1 + count // 40):
        alone = suite.call(*(each[[place]] for each in lines), *rest, backend=backend)
        among = [each.clone() for each in lines]
        if (odd := ODD[place % len(ODD)]) is not None:
            among[0][(place + 1) % count] = odd
        with on_threads(1 + place % 3):
            found = suite.call(*among, *rest, backend=backend)
        assert torch.equal(found[[place]], alone), place


def test_linear_on_the_backend_eager_is_rightly_in_the_table() -> None:
    """The negative control: some width and number of rows gives some row other bits."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 576, 1536):
        weight, x = (random_normal(generator, torch.float32, (length, width)) for length in (33, 64))
        alone = compiled_kernels.linear(x[:1].clone(), weight)
        if any(not torch.equal(compiled_kernels.linear(x[:rows].clone(), weight)[:1], alone) for rows in (2, 4, 8, 64)):
            return
    pytest.fail("torch's product gives a row the same bits among any number of rows: strike it from the table")


def test_the_table_names_what_there_is() -> None:
    operators = {suite.operator for suite in suites()}
    assert {row.operator for row in BATCH_VARIANT} <= operators
    assert len({(row.operator, row.backend) for row in BATCH_VARIANT}) == len(BATCH_VARIANT)
    assert batch_variance("decode_step", Backend.MLIR) is None
    for backend in (Backend.EAGER, Backend.INDUCTOR, Backend.TRITON):
        assert (batch_variance("decode_step", backend) or "").startswith("linear: ")
