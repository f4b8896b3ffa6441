"""Load the same folder with transformers, and compare it with ours in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.check.compare import ModelComparison, compare_models
from workbench.errors import WorkbenchError
from workbench.machine.processor import available_bytes
from workbench.memory.report import format_bytes
from workbench.model.formats.open import open_checkpoint
from workbench.model.hf.families import read_names
from workbench.model.hf.weights import read_weights, wanted_parameters
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer

FLOAT32_BYTES = 4


def comparison_problem(spec: ModelSpec, folder: Path | None) -> str | None:
    """Return why a comparison cannot be made here; None where it can."""
    if folder is None:
        return "random weights have no folder that transformers could read"
    if not folder.is_dir():
        return "transformers reads folders"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'transformers>=5'"
    needed, free = 2 * FLOAT32_BYTES * spec.num_parameters, available_bytes()
    if needed > free:
        return f"two models in float32 take {format_bytes(needed)}, {format_bytes(free)} are free"
    return None


def compare_with_transformers(folder: Path, spec: ModelSpec) -> ModelComparison:
    """Load the model in `folder` here and by transformers, in float32, and compare them.

    Raises:
        WorkbenchError: where transformers cannot load it, or its weights are not those of its config.
    """
    checkpoint = open_checkpoint(folder)
    state = read_weights(checkpoint, spec, wanted_parameters(checkpoint, spec), torch.float32)
    names = checkpoint.names or read_names(checkpoint.config)
    return compare_models(Transformer.from_state(spec, state), load_theirs(folder), names)


def load_theirs(folder: Path) -> Any:
    """Load the model in `folder` by transformers in float32, its operators as written.

    Nothing is fetched, and no code of the folder runs.

    Raises:
        WorkbenchError: where it cannot be loaded.
    """
    with _quiet() as transformers:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a model's code and its formats' packages throw
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise WorkbenchError(f"{folder}: transformers cannot load it ({reason})") from error
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model.eval()


@contextmanager
def _quiet() -> Iterator[Any]:
    """Import transformers and silence its notes meanwhile."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
