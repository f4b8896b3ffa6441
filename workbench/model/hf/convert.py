"""Convert a model to a folder of safetensors files: matrices as INT8 or INT4 in compressed-tensors' layout, or
dense.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX
from compiled_kernels.linear.planes import unpack_planes
from compiled_kernels.linear.quantize import quantize_matrix
from workbench.errors import WorkbenchError
from workbench.model.formats.compressed_tensors import PACKED
from workbench.model.formats.open import gguf_file, open_checkpoint
from workbench.model.formats.packed import pack_bits
from workbench.model.formats.texts import save_texts
from workbench.model.hf.families import read_names, read_spec
from workbench.model.hf.kept import KeptMatrix, kept_matrices
from workbench.model.hf.shards import SHARD_BYTES, write_json, write_shards
from workbench.model.hf.weights import read_parameter, wanted_parameters
from workbench.model.model_parameters import stored_parameters
from workbench.model.parameters import RowLayout, StoredParameter
from workbench.model.quantized import WeightFormat

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
CONFIG_FILES = ("config.json", "quantize_config.json")


def convert_model(
    source: str | Path,
    target: str | Path,
    format: WeightFormat,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write the model at `source` into the new folder `target`, quantized to `format`; experts stay dense.

    `workbench.load(target)` has the same codes and scales, bit for bit, as `workbench.load(source)` with this format. A
    matrix that the source stores in this format keeps its codes. Tokenizer and templates are copied, or converted from
    those of a GGUF file.

    Args:
        source: a folder or a GGUF file.
        target: a new or empty folder.
        format: dense, int8 or int4 in the blocks; the head is dense or in the format of the blocks.
        dtype: dtype of dense parameters, and of a matrix before it is quantized.
        shard_bytes: maximum bytes of a file.

    Returns:
        The format, the bytes written, and the number of quantized matrices.

    Raises:
        WorkbenchError: for an unreadable model, a format that its sizes do not allow or that no reader supports, and a
            target that contains files.
    """
    source, target, format = Path(source), Path(target), replace(format, experts=DENSE_MATRIX)
    spec, checkpoint = read_spec(source), open_checkpoint(source)
    _check(format, spec.tie_word_embeddings, target)
    format.check(spec)
    if not format.blocks.is_dense and spec.has_experts:
        raise WorkbenchError(
            f"{spec.name}: is a mixture, whose experts stay dense; transformers reads no such folder quantized in "
            "part: write a GGUF file (--to gguf), or --weights dense"
        )
    wanted = wanted_parameters(checkpoint, spec)
    stored = stored_parameters(spec, read_names(checkpoint.config))
    kept = kept_matrices(checkpoint, wanted, spec.tie_word_embeddings, format)
    quantized: list[str] = []
    # transformers creates a separate module for a tied head, and would look for its codes.
    dense = [f"{read_names(checkpoint.config).head}.weight"] if spec.tie_word_embeddings else []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in wanted.items():
            kind = format.of(name, len(parameter.shape))
            if kind.is_dense:
                for part, own in stored[name].to_stored(read_parameter(checkpoint, parameter, dtype)):
                    dense.extend([part.name] * (len(part.shape) > 1))
                    yield part.name, own
                continue
            _check_rows(stored[name])
            if isinstance(matrix := kept.get(name), KeptMatrix):
                codes, scales = matrix.runs[0].tensors()
            else:
                codes, scales = quantize_matrix(read_parameter(checkpoint, parameter, dtype), kind)
            codes = codes if kind == INT8_MATRIX else unpack_planes(codes, (4,))
            parts = zip(stored[name].to_stored(codes), stored[name].to_stored(scales), strict=True)
            for (part, own), (_, own_scales) in parts:
                module = part.name.removesuffix(".weight")
                quantized.append(module)
                yield from _packed(module, kind.codes, own, own_scales)

    try:
        target.mkdir(parents=True, exist_ok=True)
        files = write_shards(target, tensors(), shard_bytes)
        config = {key: value for key, value in checkpoint.config.values.items() if key not in QUANTIZATION_KEYS}
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        if quantized:
            config["quantization_config"] = _section(format, quantized, dense)
        if source.is_dir():
            _copy_others(source, target)
        if gguf_file(source) is not None:
            save_texts(source, target)
        write_json(target / "config.json", config)
    except (OSError, SafetensorError) as error:
        raise WorkbenchError(f"{target}: the model cannot be written there ({error})") from error
    written = sum(file.stat().st_size for file in files)
    return {"from": checkpoint.format, "weights": format.blocks.codes, "bytes": written, "matrices": len(quantized)}


def _check(format: WeightFormat, tied: bool, target: Path) -> None:
    if format.head not in (DENSE_MATRIX, format.blocks):
        raise WorkbenchError(
            f"a head of {format.head.codes} with blocks of {format.blocks.codes}: make the head dense, or like blocks"
        )
    if not format.head.is_dense and tied:
        raise WorkbenchError("its head is the embedding, which quantized files keep dense; leave the head dense")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WorkbenchError(f"{target}: holds files already; name a new folder")


def _check_rows(parameter: StoredParameter) -> None:
    for part in parameter.parts:
        if part.layout is not None and not (isinstance(part.layout, RowLayout) and not part.layout.transposed):
            raise WorkbenchError(f"{part.name} is stored transposed: quantized it cannot be read")


def _packed(module: str, kind: str, codes: Tensor, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a quantized matrix [out, in]: codes of int8, or of INT4 plus 8, and scales [out] or [out,
    group]."""
    bits = 8 if kind == "int8" else 4
    unsigned = codes.view(torch.uint8) ^ 128 if bits == 8 else codes
    yield f"{module}.weight_packed", pack_bits(unsigned, bits)
    yield f"{module}.weight_scale", scales[:, None] if kind == "int8" else scales
    yield f"{module}.weight_shape", torch.tensor(codes.shape)


def _section(format: WeightFormat, quantized: list[str], dense: list[str]) -> dict[str, Any]:
    """Return the quantization_config; dense matrices are listed, so that no reader looks for their codes."""
    four = format.blocks.codes == "int4"
    weights = {"num_bits": 4, "strategy": "group", "group_size": format.blocks.group}
    weights = weights if four else {"num_bits": 8, "strategy": "channel", "group_size": None}
    ignored = [name.removesuffix(".weight") for name in dense if name.endswith(".weight")]
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": sorted(set(ignored) - set(quantized)),
        "kv_cache_scheme": None,
    }


def _copy_others(source: Path, target: Path) -> None:
    """Copy the tokenizer, templates and all other files except weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in CONFIG_FILES and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, target / file.name)
