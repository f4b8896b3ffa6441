"""Load a model folder with transformers, and compare that model with ours in float32."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from workbench.check.compare import ModelComparison, compare_models
from workbench.errors import WorkbenchError
from workbench.machine.processor import available_bytes
from workbench.model.formats.open import open_checkpoint
from workbench.model.hf.families import read_names
from workbench.model.hf.weights import read_weights, wanted_parameters
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.units import format_bytes

FLOAT32_BYTES = 4


def comparison_problem(spec: ModelSpec, folder: Path | None) -> str | None:
    """Return the reason why the comparison with transformers is impossible here; None if it is possible."""
    if folder is None:
        return "random weights have no folder that transformers could read"
    needs = [f"{package}>=5" if package == "transformers" else package for package in _packages(folder)
             if find_spec(package) is None]  # fmt: skip
    if needs:
        return f"not installed: pip install {shlex.join(needs)}"
    needed, free = 2 * FLOAT32_BYTES * spec.num_parameters, available_bytes()
    if needed > free:
        return f"two models in float32 take {format_bytes(needed)}, {format_bytes(free)} are free"
    return None


def _packages(path: Path) -> tuple[str, ...]:
    """Return the packages that transformers needs to read a folder or a GGUF file."""
    return ("transformers",) if path.is_dir() else ("transformers", "gguf", "accelerate")


def compare_with_transformers(folder: Path, spec: ModelSpec) -> ModelComparison:
    """Load the model of a folder or GGUF file both here and with transformers, in float32, and compare the two models.

    Raises:
        WorkbenchError: if transformers cannot load it, or its weights do not match its config.
    """
    checkpoint = open_checkpoint(folder)
    state = read_weights(checkpoint, spec, wanted_parameters(checkpoint, spec), torch.float32)
    names = read_names(checkpoint.config)  # names of transformers' modules, not of a GGUF file's tensors
    return compare_models(Transformer.from_state(spec, state), load_theirs(folder), names)


def load_theirs(folder: Path) -> Any:
    """Load the model of a folder or GGUF file with transformers in float32, with its eager operators.

    A GGUF file's weights are dequantized by the package gguf. Nothing is downloaded, and no code of the folder runs.

    Raises:
        WorkbenchError: if it cannot be loaded.
    """
    place, file = (folder, {}) if folder.is_dir() else (folder.parent, {"gguf_file": folder.name})
    with _quiet() as transformers:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False,
                **file,
            )  # fmt: skip
        except Exception as error:  # any error of the model's code or its formats' packages
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise WorkbenchError(f"{folder}: transformers cannot load it ({reason})") from error
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model.eval()


@contextmanager
def _quiet() -> Iterator[Any]:
    """Import transformers, and silence its messages within the `with` block."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
