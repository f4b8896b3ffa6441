"""Export a Hugging Face folder as ONNX for the CPU provider, with the model builder of ONNX Runtime GenAI."""

# pyright: reportMissingImports=false
from __future__ import annotations

import subprocess
import sys
import tempfile

from peer_protocol import answer_with

INT4 = ("int4", ["int4_block_size=32", "int4_accuracy_level=4"])  # the head too: the builder knows no other
BUILDER = {"float32": ("fp32", []), "int4": INT4, "int4-head": INT4}  # for each format, its precision and options


def export(job: dict) -> dict:
    import onnx_ir  # noqa: F401 (the builder needs it; the error names it where it is absent)
    import onnxruntime_genai  # noqa: F401
    import transformers  # noqa: F401

    precision, options = BUILDER[job["format"]]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", job["source"], "-i", job["source"]]
    with tempfile.TemporaryDirectory(dir=job["target"]) as scratch:
        words = [*builder, "-o", job["target"], "-p", precision, "-e", "cpu", "-c", scratch]
        done = subprocess.run([*words, *(["--extra_options", *options] if options else [])])
    if done.returncode:
        raise RuntimeError(f"the builder ended with {done.returncode}")
    return {"detail": ", ".join([f"all matrices {precision}, the head too", *options])}


if __name__ == "__main__":
    answer_with(export)
