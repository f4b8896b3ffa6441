"""Define the memory calculator's settings form, and read its initial values from a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, create_model

from workbench.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

THIS_MACHINE = "this machine"


def settings_model(given: Sequence[str]) -> type[BaseModel]:
    """Return the pydantic model of the settings form. `given` is offered in addition to the known models."""
    from workbench.engine.config import DTYPES
    from workbench.engine.loaded_model import BUNDLED_MODELS
    from workbench.kv_cache.format import FORMATS
    from workbench.model.quantized import WEIGHT_DTYPES
    from workbench.model.shapes import SHAPES
    from workbench.simulate.roofline import HARDWARE

    one_of: Any = Literal
    models = (*given, *BUNDLED_MODELS, *(f"shape:{name}" for name in SHAPES))
    fields: dict[str, tuple[Any, str]] = {
        "model": (one_of[models] | str, "a known model, or as a text a config.json or a folder with one"),
        "memory": (one_of[(*HARDWARE, THIS_MACHINE)] | str, "a machine's, or as a text a size such as 24GiB"),
        "context": (int, "tokens of each sequence"),
        "batch": (int, "number of sequences"),
        "weights": (one_of[WEIGHT_DTYPES], "format of the weights"),
        "cache": (one_of[FORMATS], "format of keys and values"),
        "dtype": (one_of[tuple(DTYPES)], "dtype of what is not quantized"),
        "step_tokens": (int, "most tokens that a step computes"),
        "page_size": (int, "tokens of a page; the cache is counted in whole pages"),
    }
    made: Any = create_model
    return made(
        "MemorySettings",
        **{
            name: (kind, Field(ge=1, description=text) if kind is int else Field(description=text))
            for name, (kind, text) in fields.items()
        },
    )


def available_bytes(name: str) -> int | None:
    """Return the number of bytes of a memory, which is given as a machine's name, `this machine`, or a size."""
    import psutil

    from workbench.simulate.roofline import HARDWARE

    if name == THIS_MACHINE:
        return psutil.virtual_memory().total
    return int(HARDWARE[name].memory) if name in HARDWARE else parse_bytes(name)


def describe_fit(found: dict[str, Any]) -> str:
    from workbench.memory.report import describe_longest

    if "sequences" not in found:
        return "The size of this machine's memory is unknown."
    size, sequences = format_bytes(found["memory_bytes"]), f"{found['sequences']:,} of {found['context']:,} tokens"
    words = f"{sequences}, or {describe_longest(found)}"
    return f"Sequences that fit into {size} beside weights and activations: {words}."


def settings_of_runner(runner: Runner) -> dict[str, Any]:
    """Return the settings of the calculator that correspond to `runner`."""
    quantized = next((shape.format for shape in runner.store.specs if shape.format.quantized), None)
    return {
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "weights": runner.model.format.blocks.codes,
        "cache": "dense" if quantized is None else quantized.format,
        "page_size": runner.store.page_size,
        "step_tokens": runner.scheduler.limits.max_num_batched_tokens,
        "memory": THIS_MACHINE,
    }
