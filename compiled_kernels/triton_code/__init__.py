"""Helpers of the Triton kernels, and what their compiler makes of them. Importing this does not import triton."""

from compiled_kernels.triton_code.ahead_of_time import TritonArtifact, artifacts, stages

__all__ = [
    "TritonArtifact",
    "artifacts",
    "stages",
]
