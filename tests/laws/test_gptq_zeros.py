"""A stored zero of GPTQ version 1 is one less than the code of zero; only symmetric files may have got it wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.model.formats.gptq import GPTQTensor
from workbench.testing import packers

OUT, COLUMNS, GROUP, BITS = 8, 64, 32, 4
HALF = 1 << (BITS - 1)


@dataclass
class Part:
    tensor: Tensor

    def read(self) -> Tensor:
        return self.tensor


@pytest.mark.parametrize(("version", "symmetric", "zero"), [(1, False, HALF + 1), (1, True, HALF), (2, False, HALF)])
def test_zeros_in_the_middle_are_those_of_the_version(version: int, symmetric: bool, zero: int) -> None:
    """A file of version 1 without symmetry may store the middle code, as any other."""
    packed = packers.gptq(torch.randn(OUT, COLUMNS, generator=torch.Generator().manual_seed(0)), BITS, GROUP)
    zeros = packers.along_rows(np.full((COLUMNS // GROUP, OUT), HALF), BITS)
    parts = {name: Part(tensor) for name, tensor in (packed.tensors | {"qzeros": zeros}).items()}
    given = Path("file"), "GPTQ4", (OUT, COLUMNS), 0, "q_proj", parts, BITS, GROUP, version, symmetric
    scales = packed.tensors["scales"].T.double().repeat_interleave(GROUP, 1)
    dense = packed.dense - (zero - HALF) * scales  # packed as if its zeros were the middle code
    torch.testing.assert_close(GPTQTensor(*given).read().double(), dense, atol=1e-3, rtol=1e-3)  # type: ignore[arg-type]
