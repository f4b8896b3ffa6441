"""Helpers for writing, launching and compiling Triton kernels. Importing this package does not import triton."""

from compiled_kernels.triton_code.ahead_of_time import TritonArtifact, artifacts, stages

__all__ = [
    "TritonArtifact",
    "artifacts",
    "stages",
]
