"""Load a model's weights as a dict of tensors, or draw random weights."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from compiled_kernels.memory import zero_pages
from compiled_kernels.threads import in_threads
from workbench.errors import WorkbenchError
from workbench.model.by_rows import BLOCK_VALUES, row_blocks, store_dense, whole_rows
from workbench.model.formats.checkpoint import Checkpoint, StoredTensor
from workbench.model.formats.mapped import release
from workbench.model.formats.open import open_checkpoint
from workbench.model.formats.safetensors_files import FLOAT_DTYPES
from workbench.model.hf.families import read_names
from workbench.model.hf.kept import KeptMatrix, kept_matrices
from workbench.model.model_parameters import parameter_shapes, stored_parameters
from workbench.model.parameters import StoredParameter, StoredPart
from workbench.model.quantized import WeightFormat, named_parts, part_name, store_as, stored_name
from workbench.model.spec import ModelSpec

IGNORED_TENSORS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
UNUSED_IN_SHARING_LAYERS = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm.")
XIELU_VALUES = {"alpha_p": 0.2, "alpha_n": -1.05, "beta": 0.5, "eps": -1e-6}  # xIELU before training: alphas of 0.8
DRAW_CHUNK = BLOCK_VALUES  # random numbers drawn at once, in float32; a multiple of 16 (see `_draws`)
DENSE_FORMAT = WeightFormat()
Keep = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # selects the part to keep of a parameter's stored tensors


def keep_all(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's stored tensors unchanged: the default of `keep`, which may keep a part of them."""
    return stored


def load_weights(
    path: str | Path, spec: ModelSpec, dtype: torch.dtype, format: WeightFormat = DENSE_FORMAT
) -> dict[str, Tensor]:
    """Load the weights of a folder or file as `dtype`, under our names and shapes (`parameter_shapes(spec)`).

    Files are memory-mapped: a parameter that needs neither a cast nor fusing stays a view of its file. Matrices are
    converted to `format` during reading, with scales as further tensors; matrices already stored in this format keep
    their codes. Raises WorkbenchError for weights that are missing, corrupt or of another architecture.
    """
    checkpoint = open_checkpoint(path)
    return read_weights(checkpoint, spec, wanted_parameters(checkpoint, spec), dtype, format)


def read_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    wanted: dict[str, StoredParameter],
    dtype: torch.dtype,
    format: WeightFormat = DENSE_FORMAT,
    keep: Keep = keep_all,
    done: Callable[[StoredParameter], object] = lambda parameter: None,
) -> dict[str, Tensor]:
    """Read the weights `wanted` of an open checkpoint, as `load_weights` does. `keep` reduces each parameter before the
    next is read, and `done` is called with it.
    """
    tied = spec.tie_word_embeddings
    kept = {} if format == DENSE_FORMAT else kept_matrices(checkpoint, wanted, tied, format)

    def store(name: str) -> dict[str, Tensor]:
        ours = stored_name(name, spec, format)
        if name in kept:
            return read_kept(ours, kept[name], wanted[name].shape)
        if format.is_dense(ours, len(wanted[name].shape)):
            return {ours: read_parameter(checkpoint, wanted[name], dtype)}
        blocks = (block.to(dtype) for block in _blocks(checkpoint, wanted[name]))
        return _stored(ours, wanted[name].shape, dtype, format, blocks)

    def read_kept(ours: str, matrix: KeptMatrix, shape: tuple[int, ...]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if len(shape) == 3:
            return named_parts(ours, [each.unflatten(0, shape[:2]) for each in matrix.runs[0].tensors()])
        for index, run in enumerate(matrix.runs):
            own, parts = part_name(ours, index, matrix.rows), tuple(each.part for each in run.parts)
            dense = run.format.is_dense
            tensors = (read_parameter(checkpoint, StoredParameter(parts), dtype),) if dense else run.tensors()
            found |= named_parts(own, tensors)
        return found

    def stored_and_kept(name: str) -> dict[str, Tensor]:
        found = keep(store(name))
        done(wanted[name])
        return found

    return _together(in_threads(stored_and_kept, wanted))


def _together(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for each in found for name, tensor in each.items()}


def _view(checkpoint: Checkpoint, parameter: StoredParameter, dtype: torch.dtype) -> Tensor | None:
    """Return a parameter as a view of its file; None if it is fused, cast or reordered."""
    part, *others = parameter.parts
    stored = checkpoint.tensors[part.name]
    if others or part.layout is not None or FLOAT_DTYPES.get(stored.dtype) != dtype:
        return None
    tensor = stored.read()
    return tensor.view(parameter.shape) if tensor.dtype == dtype and tensor.is_contiguous() else None


def read_parameter(checkpoint: Checkpoint, parameter: StoredParameter, dtype: torch.dtype) -> Tensor:
    """Read one parameter as `dtype`; a view of its file if it needs neither a cast nor fusing."""
    if (whole := _view(checkpoint, parameter, dtype)) is not None:
        return whole
    stored = [(checkpoint.tensors[part.name], part.layout) for part in parameter.parts]
    if all(layout is None and FLOAT_DTYPES.get(tensor.dtype) == dtype for tensor, layout in stored):
        whole = zero_pages(parameter.shape, dtype)
        for (tensor, _), own in zip(stored, whole.view(-1).split([_size(tensor) for tensor, _ in stored]), strict=True):
            tensor.read_into(own.view(tensor.shape))
        return whole
    return store_dense(parameter.shape, dtype, _blocks(checkpoint, parameter))


def _size(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def wanted_parameters(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, StoredParameter]:
    """Return the stored parts of each parameter of `spec`, under the checkpoint's names. Raises WorkbenchError if the
    checkpoint lacks a tensor, has an unknown tensor, or has a tensor of another shape or an unsupported type.
    """
    stored, names = checkpoint.tensors, checkpoint.names or read_names(checkpoint.config)
    if f"{names.embedding}.weight" not in stored and f"{names.embedding}.weight".partition(".")[2] in stored:
        names = names.without_prefix()  # files of a base model, such as GPT-2's
    wanted = stored_parameters(spec, names)
    _check(checkpoint, spec, [part for parameter in wanted.values() for part in parameter.parts])
    return wanted


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int = 0,
    format: WeightFormat = DENSE_FORMAT,
    keep: Keep = keep_all,
) -> dict[str, Tensor]:
    """Draw random weights from a seed, scaled so that activations and logits stay near 1; norm weights are ones.

    Every parameter is drawn in float32 from its own generator, seeded by `seed` and the parameter's name: the numbers
    do not depend on order, and the dtype only rounds them. They are converted to `format` while they are drawn; `keep`
    selects the part of each to keep.
    """
    shapes = parameter_shapes(spec)

    def store(name: str) -> dict[str, Tensor]:
        ours, blocks = stored_name(name, spec, format), _drawn(name, shapes[name], spec, dtype, seed)
        return _stored(ours, shapes[name], dtype, format, blocks)

    return _together(in_threads(lambda name: keep(store(name)), shapes))


def _stored(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, format: WeightFormat, blocks: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Store a parameter from blocks of rows in `format`, under its name, with its scales."""
    if format.is_dense(name, len(shape)):
        return {name: store_dense(shape, dtype, blocks)}
    return named_parts(name, store_as(name, shape, format, blocks))


def _blocks(checkpoint: Checkpoint, parameter: StoredParameter) -> Iterator[Tensor]:
    """Yield the stored rows of a parameter, part by part; the files' pages are released after use."""
    for part in parameter.parts:
        tensor = checkpoint.tensors[part.name].read()
        rows = tensor if part.layout is None else part.layout.from_stored(tensor)
        for block in row_blocks(rows):
            yield block
            release(block)
        release(tensor)


def _check(checkpoint: Checkpoint, spec: ModelSpec, wanted: list[StoredPart]) -> None:
    stored, known = checkpoint.tensors, {part.name for part in wanted}
    missing = [part.name for part in wanted if part.name not in stored]
    extra = [name for name in stored if name not in known and not _harmless(name, spec)]
    if missing or extra:
        faults = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has extra", extra)) if names]
        if missing == ["lm_head.weight"]:
            faults.append("if the head is the embedding, config.json must say tie_word_embeddings: true")
        raise WorkbenchError(f"{checkpoint.path}: the weights are not those of config.json ({'; '.join(faults)})")
    for part in wanted:
        tensor = stored[part.name]
        if tensor.shape != part.shape:
            shape, right = list(tensor.shape), list(part.shape)
            raise WorkbenchError(f"{tensor.file}: {part.name} has shape {shape}, config.json asks for {right}")
        if problem := tensor.problem():
            raise WorkbenchError(f"{tensor.file}: {part.name} {problem}")


def _harmless(name: str, spec: ModelSpec) -> bool:
    """Return whether a stored tensor is not needed for inference: buffers, a tied head, multi-token prediction layers
    (DeepSeek-V3's come after the last layer, Qwen3-Next's are called mtp), keys and values of layers that read another
    layer's (Gemma 3n's).
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if name.startswith("mtp.") or (layer and int(layer[1]) >= len(spec.layers) and spec.has_experts):
        return True
    own = spec.layers[int(layer[1])].attention if layer and int(layer[1]) < len(spec.layers) else None
    if layer and own and own.kv_shared_with is not None and name[layer.end() :].startswith(UNUSED_IN_SHARING_LAYERS):
        return True
    return name.endswith(IGNORED_TENSORS) or (spec.tie_word_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _drawn(name: str, shape: tuple[int, ...], spec: ModelSpec, dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """Draw a parameter's rows in order, in blocks."""
    if (value := _constant(name, spec)) is not None:
        yield torch.full(shape, value, dtype=dtype)
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    draws = _draws(math.prod(shape), _std(name, shape, spec), generator)
    rows = shape if len(shape) < 3 else (math.prod(shape[:-1]), shape[-1])
    yield from whole_rows((draw.to(dtype) for draw in draws), rows)


def _constant(name: str, spec: ModelSpec) -> float | None:
    """Return the constant value of a parameter that is not random; None for a random one."""
    if name.endswith("norm_weight"):
        return 1.0
    if name.endswith("norm.weight"):
        return 1.0 - spec.norm.offset
    return XIELU_VALUES[name.rpartition(".")[2]] if ".activation." in name else None


def _draws(count: int, std: float, generator: torch.Generator) -> Iterator[Tensor]:
    """Draw `count` normal numbers in float32 in blocks, equal to the numbers of a single draw.

    Torch draws 16 at a time; the last block is never smaller than that, because fewer numbers use another algorithm.
    """
    while count:
        size = count if count < DRAW_CHUNK + 16 else DRAW_CHUNK
        yield torch.empty(size).normal_(0.0, std, generator=generator)
        count -= size


def _std(name: str, shape: Iterable[int], spec: ModelSpec) -> float:
    """Return the standard deviation: 1 / sqrt(inputs) keeps a product's magnitude; it is further divided for the 2 *
    layers terms of the residual sum (GPT-2).
    """
    *_, inputs = shape
    if name.endswith("bias"):
        return 0.1
    if name.endswith("sink_logits"):
        return 1.0
    if name == "embedding.weight" and not spec.tie_word_embeddings:
        return 1.0 / spec.embedding_scale
    added = name.endswith(("output.weight", "feedforward.down.weight", "feedforward.down"))
    return (inputs * (2 * len(spec.layers) if added else 1)) ** -0.5
