"""Triton's kernels in Triton's interpreter. It is on or off from the moment triton is imported, so what is in
`interpreted/` is run in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.backends import triton_interpreted
from tests.helpers.refusals import kernel_refuses

HERE = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="pip install 'inference-workbench[triton]'"
)
PARTS = {
    "rows": ("laws.py", "test_kernel_equals_float64"),
    "parts": ("laws.py", "test_any_number_of_parts_equals_float64"),
    "other laws": ("laws.py", "not test_kernel_equals_float64 and not test_any_number_of_parts_equals_float64"),
    "batch invariance": ("batch_invariance.py", ""),
}


def in_the_interpreter(file: str, tests: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", "-p", "no:cacheprovider", "-k", tests]
    done = subprocess.run(
        [*command, str(HERE / "interpreted" / file)],
        cwd=folder,  # where hypothesis keeps its examples
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.interpreter
@pytest.mark.parametrize("part", PARTS)
def test_laws_hold_in_the_interpreter(part: str, tmp_path: Path) -> None:
    in_the_interpreter(*PARTS[part], tmp_path)


@needs_triton
@pytest.mark.interpreter
@pytest.mark.smoke
def test_norms_equal_float64_in_the_interpreter(tmp_path: Path) -> None:
    in_the_interpreter("laws.py", "test_kernel_equals_float64 and rms_norm", tmp_path)


@needs_triton
@pytest.mark.skipif(triton_interpreted(), reason="TRITON_INTERPRET is set: unset it")
def test_tensors_on_the_cpu_are_refused_by_name() -> None:
    kernel_refuses(
        "rms_norm: backend triton needs tensors on a CUDA device .* not on cpu",
        lambda: compiled_kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5, Backend.TRITON),
    )


def test_importing_the_kernels_package_leaves_triton_alone() -> None:
    code = "import sys, compiled_kernels, compiled_kernels.triton_code; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1]).returncode == 0
