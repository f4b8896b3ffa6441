"""Triton's kernels in Triton's interpreter. It is on or off from the moment triton is imported, so what is in
`triton_interpreted.py` is run in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.backends import triton_interpreted
from tests.patience import limit

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'")
@pytest.mark.timeout(limit(240))
def test_kernels_agree_with_their_specification_in_the_interpreter(tmp_path: Path) -> None:
    files = [str(HERE / f"{name}.py") for name in ("triton_interpreted", "triton_fixed_interpreted")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "--no-header", "-p", "no:cacheprovider", *files],
        cwd=tmp_path,  # where hypothesis keeps its examples
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or triton_interpreted(),
    reason="pip install 'inference-workbench[triton]', and TRITON_INTERPRET unset",
)
def test_tensors_on_the_cpu_are_refused_by_name() -> None:
    with pytest.raises(BackendError, match="rms_norm: backend triton needs tensors on a CUDA device .* not on cpu"):
        compiled_kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5, Backend.TRITON)


def test_importing_the_kernels_package_leaves_triton_alone() -> None:
    code = "import sys, compiled_kernels, compiled_kernels.triton_code; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1]).returncode == 0
