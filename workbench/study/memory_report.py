"""`workbench memory`: a model's memory as a report, for any config.json, folder or named shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.engine.load import DTYPES, SHAPE, SHIPPED
from workbench.errors import WorkbenchError, nearest
from workbench.model.any_config import spec_from_any_config
from workbench.model.memory import Memory
from workbench.model.memory import memory as count
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.model.variants import vary_spec
from workbench.study.cache_of import parts_of, store_of
from workbench.study.experiment import Experiment

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
REASONABLE = 2**60


def parse_bytes(text: str) -> int:
    """`80GB`, `64MiB`, `1000000`. Raises WorkbenchError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if (
        match is None
        or (unit := match[2].upper()) not in UNITS
        or not 0 < (size := float(match[1]) * UNITS[unit]) < REASONABLE
    ):
        raise WorkbenchError(f"memory {text!r}: write a number and a unit, such as 80GB or 64GiB")
    return int(size)


def spec_and_remarks(name: str) -> tuple[ModelSpec, list[str]]:
    """The architecture of a named shape, a shipped model, a folder or a config.json; and what is not exact of it."""
    if name.startswith(SHAPE):
        return named_shape(name.removeprefix(SHAPE)), []
    place = SHIPPED.get(name, Path(name))
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        raise WorkbenchError(f"{name}: no config.json there; name one, a folder with one, demo, or {SHAPE}NAME")
    return spec_from_any_config(file)


def grouped_saving(spec: ModelSpec) -> float | None:
    """How many times larger the cache were if every query head had a key/value head of its own; None where heads have
    no keys of their own to cache."""
    kinds = [layer.attention for layer in spec.layers]
    if any(kind.kind != "grouped" for kind in kinds):
        return None
    return sum(kind.heads * kind.dim for kind in kinds) / sum(kind.groups * kind.dim for kind in kinds)


def report(
    spec: ModelSpec, found: Memory, settings: Mapping[str, Any], remarks: list[str], memory_bytes: int | None = None
) -> dict[str, Any]:
    """What `workbench memory --json` prints."""
    told = list(remarks)
    if found.context > spec.context:
        told.insert(
            0, f"a formula: the model was made for {spec.context:,} positions, this context has {found.context:,}"
        )
    per_token = found.cache_bytes_per_token
    out = {
        "model": spec.name,
        **settings,
        "context": found.context,
        "model_context": spec.context,
        "beyond_model_context": found.context > spec.context,
        "batch": found.batch,
        "parameters": found.parameters,
        "weight_bytes": found.weight_bytes,
        "cache_bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "cache_bytes_per_sequence": found.sequence_bytes,
        "cache_bytes": found.cache_bytes,
        "activation_bytes": found.activation_bytes,
        "total_bytes": found.total_bytes,
        "grouped_saving": grouped_saving(spec),
        "remarks": told,
    }
    if memory_bytes is not None:
        out |= {"memory_bytes": memory_bytes, "sequences": found.sequences(memory_bytes)}
        if found.weight_bytes + found.activation_bytes > memory_bytes:
            told.append(f"weights and activations alone exceed {told_bytes(memory_bytes)}")
    return out


def told_bytes(size: float) -> str:
    """As people say it: 41.9 GB."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def of_name(
    name: str,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    weights: str = "dense",
    cache: str = "dense",
    changes: tuple[str, ...] = (),
    step_tokens: int = 512,
    page_size: int = 1,
    memory: str | None = None,
) -> dict[str, Any]:
    """The report of the model called `name`; `changes` are settings of cache and attention as in an experiment."""
    if dtype not in DTYPES:
        raise WorkbenchError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; known: {', '.join(DTYPES)}")
    spec, remarks = spec_and_remarks(name)
    settings = Experiment.of(
        {"question": "how much memory?", "cache": {"format": cache}, "workload": {"kind": "random"}}, "memory"
    ).with_(*changes)
    spec = vary_spec(spec, settings.attention)
    settings.cache.check(len(spec.layers), settings.cache.page_size)
    format = WeightFormat.of(weights)
    format.check(spec)
    found = count(
        spec, parts_of(store_of(spec, settings.cache, dtype)), context or spec.context, batch,
        DTYPES[dtype].itemsize, format, step_tokens, page_size,
    )  # fmt: skip
    told = {"dtype": dtype, "weights": weights, "cache": cache}
    return report(spec, found, told, remarks, None if memory is None else parse_bytes(memory))
