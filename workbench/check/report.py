"""Check a model: supported backends and cache formats, sizes, memory and speed on this machine, and agreement with
transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_kernels import Backend, backend_problems
from workbench.check.mechanisms import describe_mechanisms
from workbench.check.transformers_model import compare_with_transformers, comparison_problem
from workbench.custom import load_registrations
from workbench.engine.cache import auto_num_pages
from workbench.engine.config import DTYPES, CacheConfig, EngineConfig, ModelConfig
from workbench.engine.loaded_model import describe_model, model_folder, weight_format, weight_storage
from workbench.errors import WorkbenchError
from workbench.executors.capabilities import COLUMNS, Role, unsupported
from workbench.executors.requirements import Requirements
from workbench.kv_cache.format import FORMATS
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.machine.processor import available_bytes, cpu_model
from workbench.measure.predictions import prefill_steps
from workbench.measure.simulated import model_sizes, step_cost_of
from workbench.memory.capacity import lasting_bytes_per_token, meta_kv_store
from workbench.memory.report import read_spec_and_remarks
from workbench.model.formats.open import open_checkpoint
from workbench.model.formats.texts import open_tokenizer
from workbench.model.hf.weights import wanted_parameters
from workbench.model.memory import cache_shapes, weight_bytes
from workbench.model.quantized import WEIGHT_DTYPES, WeightFormat
from workbench.model.spec import ModelSpec

DENSE = WeightFormat()
CONTEXT, PREFILL = 512, 512  # tokens: context of the estimated decode step, length of the estimated prompt


def check_model(
    name: str, compare: bool = True, custom: str | None = None, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Check the model called `name` and return the findings, JSON-ready.

    Args:
        name: a folder, a file, `demo`, `demo-draft` or `shape:NAME`.
        compare: also load the model with transformers, if installed, and compare.
        custom: a file that registers the model's family, as `model.custom`.
        report: receives a line on each slow part.

    Returns:
        `problem`, the reason why the model cannot be loaded, or None; and the findings, with `comparison`.

    Raises:
        WorkbenchError: if there is no such model.
    """
    if custom is not None:
        load_registrations(custom)
    folder = model_folder(name)
    found: dict[str, Any] = {"model": name, "problem": None, "remarks": []}
    try:
        spec, dtype = describe_model(name)
    except WorkbenchError as error:
        return found | {"problem": str(error)} | _partly(name)
    found |= _of_spec(spec) | {"dtype": dtype, "family": None, "files": None, "tokenizer": None}
    try:
        if folder is not None:
            found |= _of_files(folder, spec) | {"stored": weight_storage(ModelConfig(name=name))}
    except WorkbenchError as error:
        found["problem"] = str(error)
    found["carried_out"] = carried_out(spec, dtype)
    found["memory"] = memory_here(spec, dtype)
    report("measuring this machine's ceilings: read bandwidth and matrix products")
    found["speed"] = estimated_speed(spec, dtype, _loaded_format(name))
    problem = comparison_problem(spec, folder) if compare else "not asked for"
    if found["problem"] is None and folder is not None and problem is None:
        report("loading it by transformers, and comparing")
        try:
            found["comparison"] = compare_with_transformers(folder, spec).as_json()
        except WorkbenchError as error:
            problem = str(error)
    if "comparison" not in found:
        found["comparison"] = {"skipped": problem or "the model cannot be loaded"}
    return found


def passed(found: dict[str, Any]) -> bool:
    """Return whether a checked model can be loaded and does not differ from transformers."""
    return found["problem"] is None and found["comparison"].get("equal", True)


def _partly(name: str) -> dict[str, Any]:
    """Return the findings for a model with a config that cannot be read completely."""
    skipped = {"comparison": {"skipped": "the model cannot be loaded"}}
    try:
        spec, remarks = read_spec_and_remarks(name)
    except WorkbenchError:
        return skipped
    sizes = _of_spec(spec)
    del sizes["mechanisms"]  # unknown for an unsupported family
    return {**sizes, "remarks": remarks, "memory": memory_here(spec, "bfloat16"), **skipped}


def _of_spec(spec: ModelSpec) -> dict[str, Any]:
    sizes = {
        "parameters": spec.num_parameters, "layers": len(spec.layers), "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size, "context": spec.max_position_embeddings,
    }  # fmt: skip
    return {"name": spec.name, "sizes": sizes, "mechanisms": describe_mechanisms(spec)}


def _of_files(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the family, the files' format and the tokenizer. Raises WorkbenchError for weights of another model."""
    checkpoint = open_checkpoint(folder)
    wanted_parameters(checkpoint, spec)
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    files = {"format": checkpoint.format, "tensors": len(checkpoint.tensors), "bytes": size}
    found = {"family": checkpoint.config.get("model_type"), "files": files}
    tokenizer = open_tokenizer(folder)
    if tokenizer is not None:
        tokenizer.check_vocab_size(spec.vocab_size)
    return found | {"tokenizer": None if tokenizer is None else repr(tokenizer)}


def carried_out(spec: ModelSpec, dtype: str) -> dict[str, dict[str, str | None]]:
    """Return for each format of cache or weights, and each backend, why that backend cannot run the model with the
    format; None if it can.

    Backends and reasons are those of the capability table; a backend that does not work on this machine has that as its
    reason.
    """
    rows: dict[str, dict[str, str | None]] = {}
    for format in FORMATS:
        rows[f"{format} cache"] = _row(spec, dtype, WeightFormat(), CacheConfig(format=format))
    for weights in WEIGHT_DTYPES:
        if weights != "dense":
            rows[f"{weights} weights"] = _row(spec, dtype, WeightFormat.parse(weights), CacheConfig())
    return rows


def _row(spec: ModelSpec, dtype: str, weights: WeightFormat, cache: CacheConfig) -> dict[str, str | None]:
    try:
        weights.check(spec)
        cache.check(len(spec.layers), cache.page_size)
        shapes = cache_shapes(spec, cache)
        for shape in shapes:
            shape.page_formats(cache.page_size)
    except WorkbenchError as error:
        return dict.fromkeys(COLUMNS, str(error))
    wanted = Requirements(spec, DTYPES[dtype], weights, shapes, DTYPES[dtype])
    return {column: _problem(backend, role, wanted) for column, (backend, role) in COLUMNS.items()}


def _problem(backend: Backend, role: Role, wanted: Requirements) -> str | None:
    if problem := backend_problems()[backend]:
        return f"does not work here: {problem}"
    refusal = unsupported(backend, wanted, role)
    return refusal and str(refusal)


def memory_here(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the bytes of weights and cache in each format, and the free bytes of memory on this machine."""
    weights, itemsize = {}, DTYPES[dtype].itemsize
    for format in WEIGHT_DTYPES:
        parsed = WeightFormat.parse(format)
        try:
            parsed.check(spec)
        except WorkbenchError:
            continue
        weights[format] = weight_bytes(spec, itemsize, parsed)
    config = EngineConfig()
    shapes = cache_shapes(spec, config.cache)
    pages = auto_num_pages(config, shapes, spec, DTYPES[dtype])
    store = meta_kv_store(spec, config.cache, dtype)
    sizes = (store.page_bytes(group) for group in range(len(store.groups)))
    return {
        "weight_bytes": weights,
        "cache_bytes_per_token": _cache_bytes(spec, dtype),
        "pages": list(pages),
        "page_size": config.cache.page_size,
        "default_cache_bytes": sum((count + 1) * size for count, size in zip(pages, sizes, strict=True)),
        "available_bytes": available_bytes(),
    }


def _cache_bytes(spec: ModelSpec, dtype: str) -> dict[str, float]:
    """Return the bytes per token in each cache format that the model supports."""
    found = {}
    for format in FORMATS:
        try:
            found[format] = lasting_bytes_per_token(meta_kv_store(spec, CacheConfig(format=format), dtype))
        except WorkbenchError:
            continue
    return found


def _loaded_format(name: str) -> WeightFormat:
    """Return the format in which the model's weights are loaded; dense if they cannot be loaded."""
    try:
        return weight_format(ModelConfig(name=name))
    except WorkbenchError:  # `problem` gives the reason
        return WeightFormat()


def estimated_speed(spec: ModelSpec, dtype: str, format: WeightFormat = DENSE) -> dict[str, Any]:
    """Return upper bounds of speed in tokens per second, by this machine's measured ceilings, for decoding one sequence
    and for a prompt. Weights have the given format, and the cache is dense."""
    context, prefill = (min(tokens, spec.max_position_embeddings) for tokens in (CONTEXT, PREFILL))
    sizes = model_sizes(spec, dtype, format, CacheConfig())
    size = round(sizes.weight_bytes)
    ceilings = ceilings_for(size, dtypes=gemm_dtypes(dtype), compiled=backend_problems()[Backend.INDUCTOR] is None)
    reading, computing = ceilings.read_ceiling(size), ceilings.gemm_ceiling(dtype)
    read, gemm = reading.value, computing.value
    cost = step_cost_of(sizes)
    decode = cost([(context - 1, 1)], 1).seconds(gemm, read)
    steps = prefill_steps(cost, prefill, EngineConfig().schedule.max_num_batched_tokens)
    return {
        "decode_tokens_per_s": 1 / decode, "decode_context": context,
        "prefill_tokens_per_s": prefill / sum(step.seconds(gemm, read) for step in steps), "prefill_tokens": prefill,
        "read_bytes_per_s": read, "flops_per_s": gemm, "cpu": cpu_model(), "weight_bytes": size,
        "measured_beside_work": reading.is_beside_work or computing.is_beside_work,
    }  # fmt: skip
