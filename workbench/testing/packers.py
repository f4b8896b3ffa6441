"""Pack matrices into each quantized format, written plainly from the formats' documentation: bits are joined to one
long integer.

Each packer takes a matrix [out, in] and returns the stored tensors, by suffixes of their names, and the matrix that
they represent, computed in float64. Tests may use random codes, so that rounding cannot hide errors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Packed:
    """A packed matrix: the stored tensors by suffixes of their names, the matrix that they represent in float64, and
    the quantization section for the model's config.
    """

    tensors: dict[str, Tensor]
    dense: Tensor
    config: dict[str, Any] = field(default_factory=dict)


Packer = Callable[[Tensor], Packed]


def words(values: Sequence[int], bits: int) -> np.ndarray:
    """Return values of `bits` bits packed into int32 words, the first value in the lowest bits; a value may cross a
    word boundary.
    """
    whole = sum(int(value) << bits * place for place, value in enumerate(values))
    return np.frombuffer(whole.to_bytes(-(-len(values) * bits // 32) * 4, "little"), dtype="<i4")


def along_rows(codes: np.ndarray, bits: int) -> Tensor:
    """Return a matrix with the values of each row packed into words: [row, column] -> [row, word]."""
    return torch.from_numpy(np.stack([words(row, bits) for row in codes.tolist()]).copy())


def codes_of(
    weight: Tensor, bits: int, group: int, zero: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Quantize a matrix: return unsigned codes [out, in], unsigned zeros [out, group] and scales [out, group]."""
    out, columns = weight.shape
    groups = weight.double().unflatten(1, (columns // group, group))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    most = (1 << bits) - 1
    scales = (high - low) / most if zero else 2 * torch.maximum(-low, high) / most
    scales = scales.clamp_min(1e-4).to(dtype)
    zeros = (-low / scales.double()).round() if zero else torch.full_like(low, 1 << (bits - 1))
    codes = (groups / scales.double()[..., None] + zeros[..., None]).round().clamp(0, most).flatten(1)
    return codes.numpy().astype(np.int64), zeros.clamp(1, most).numpy().astype(np.int64), scales


def affine(codes: np.ndarray, zeros: np.ndarray, scales: Tensor, index: np.ndarray) -> Tensor:
    """Return (codes - zeros) * scales in float64; `index` has the group of each column."""
    return torch.from_numpy((codes - zeros[:, index]) * scales.double().numpy()[:, index])


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    zero: bool = False,
    version: int = 1,
    order: torch.Generator | None = None,
    index: bool = True,
) -> Packed:
    columns = weight.shape[1]
    size = columns if group == -1 else group
    place = np.arange(columns) // size
    if order is not None:
        place = place[torch.randperm(columns, generator=order).numpy()]
    codes, zeros, scales = codes_of(weight, bits, size, zero, torch.float16)
    stored = zeros - 1 if version == 1 else zeros
    tensors = {
        "qweight": along_rows(codes, bits).T.contiguous(),
        "qzeros": along_rows(stored.T, bits),
        "scales": scales.T.contiguous(),
    }
    if index:
        tensors["g_idx"] = torch.from_numpy(place.astype(np.int32))
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order is not None, "sym": not zero,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Packed(tensors, affine(codes, zeros, scales, place), config)


def awq(weight: Tensor, group: int = 32, zero: bool = True) -> Packed:
    codes, zeros, scales = codes_of(weight, 4, group, zero, torch.float16)

    def woven(values: np.ndarray) -> Tensor:  # [out, row] -> [row, out / 8]
        order = [8 * word + each for word in range(len(values) // 8) for each in AWQ_ORDER]
        return along_rows(values[order].T, 4)

    tensors = {"qweight": woven(codes), "qzeros": woven(zeros), "scales": scales.T.contiguous()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero, "version": "gemm"}
    return Packed(tensors, affine(codes, zeros, scales, np.arange(weight.shape[1]) // group), config)


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def pack_quantized(
    weight: Tensor, bits: int = 4, group: int | None = 32, zero: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Packed:
    rows, columns = weight.shape
    size = group or columns
    codes, zeros, scales = codes_of(weight, bits, size, zero, dtype)
    tensors = {
        "weight_packed": along_rows(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero:
        tensors["weight_zero_point"] = along_rows(zeros.T, bits).T.contiguous()
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    config = _compressed("pack-quantized", num_bits=bits, type="int", symmetric=not zero, **strategy)
    return Packed(tensors, affine(codes, zeros, scales, np.arange(columns) // size), config)


def int_quantized(weight: Tensor, dtype: torch.dtype = torch.float32) -> Packed:
    codes, zeros, scales = codes_of(weight, 8, weight.shape[1], False, dtype)
    dense = affine(codes, zeros, scales, np.zeros(weight.shape[1], int))
    tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": scales}
    return Packed(
        tensors, dense, _compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
    )


def float_quantized(weight: Tensor, block: tuple[int, int] | None = None, tensor: bool = False) -> Packed:
    rows, columns = (block or weight.shape) if block or tensor else (1, weight.shape[1])
    values, scales, dense = fp8_codes(weight, rows, columns)
    tensors = {"weight": values, "weight_scale": scales.reshape(-1)[:1] if tensor else scales}
    strategy: dict[str, Any] = {"strategy": "block", "block_structure": list(block)} if block else {
        "strategy": "tensor" if tensor else "channel"
    }  # fmt: skip
    return Packed(tensors, dense, _compressed("float-quantized", num_bits=8, type="float", symmetric=True, **strategy))


def fp8_codes(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix in blocks: return F8_E4M3 values, a float32 scale for each block, and the matrix that they
    represent.
    """
    out, width = weight.shape
    scales = torch.ones(-(-out // rows), -(-width // columns))
    values, dense = torch.empty(out, width, dtype=torch.float8_e4m3fn), torch.empty(out, width, dtype=torch.float64)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max().clamp_min(1e-6) / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = values[at].double() * scales[i, j].double()
    return values, scales, dense


def fp8(weight: Tensor, block: tuple[int, int] = (128, 128)) -> Packed:
    values, scales, dense = fp8_codes(weight, *block)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Packed({"weight": values, "weight_scale_inv": scales}, dense, config)


def e2m1_codes(weight: Tensor) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Quantize a matrix: return E2M1 codes [out, in], biased exponents [out, in / 32], and the matrix that they
    represent.
    """
    blocks = weight.double().unflatten(1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    near = (blocks[..., None] / 2 ** exponents[..., None, None] - torch.tensor(E2M1, dtype=torch.float64)).abs()
    codes = near.argmin(-1)
    dense = torch.tensor(E2M1, dtype=torch.float64)[codes] * 2 ** exponents[..., None]
    return codes.flatten(1).numpy(), (exponents + 127).numpy().astype(np.uint8), dense.flatten(1)


def mxfp4_pack(weight: Tensor) -> Packed:
    codes, exponents, dense = e2m1_codes(weight)
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    tensors = {"weight_packed": packed, "weight_scale": torch.from_numpy(exponents)}
    config = _compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    return Packed(tensors, dense, config)


def nf4(weight: Tensor, nested: bool = False, kind: str = "nf4", block: int = 64) -> Packed:
    """Pack a matrix in bitsandbytes' 4-bit format, whose codes index a table of 16 values; any table works, since it is
    stored with the codes.
    """
    table = torch.linspace(-1, 1, 16) ** 3
    flat = weight.flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(-1).clamp_min(1e-6)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {}
    if nested:
        offset, size, steps = float(absmax.mean()), 256, torch.linspace(-1, 1, 256)
        apart = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % size)).view(-1, size)
        largest = apart.abs().amax(-1).clamp_min(1e-6)
        octets = ((apart / largest[:, None])[..., None] - steps).abs().argmin(-1)
        absmax = (steps[octets] * largest[:, None]).flatten()[: len(absmax)] + offset
        state |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
        tensors = {
            "weight.absmax": octets.flatten()[: len(absmax)].to(torch.uint8),
            "weight.nested_absmax": largest,
            "weight.nested_quant_map": steps,
        }
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).flatten()[: len(flat)]
    dense = (table[codes] * absmax.repeat_interleave(block)[: len(flat)]).view(weight.shape)
    codes = torch.nn.functional.pad(codes, (0, len(codes) % 2))
    tensors = {
        "weight.absmax": absmax, **tensors, "weight.quant_map": table,
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    return Packed(tensors, dense.double(), config)


def bnb_int8(weight: Tensor) -> Packed:
    largest = weight.float().abs().amax(-1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    dense = codes.float() * largest[:, None] * 7.874015718698502e-3
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    return Packed(
        {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, dense.double(), config
    )


def pack_folder(source: Path, target: Path, pack: Packer, skip: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Write a copy of a Hugging Face folder with the matrices of its blocks packed; return the matrices that they
    represent.

    Args:
        source: a folder with one model.safetensors.
        target: the folder to write.
        pack: packs one matrix.
        skip: name parts of matrices that stay dense.

    Returns:
        The dense matrices in float32, by their names in `source`.
    """
    shutil.copytree(source, target)
    stored, dense, section = load_file(source / "model.safetensors"), {}, {}
    for name in [name for name in stored if name.endswith("_proj.weight") and not any(part in name for part in skip)]:
        made = pack(stored.pop(name).float())
        stored |= {name.removesuffix("weight") + end: tensor.clone() for end, tensor in made.tensors.items()}
        dense[name], section = made.dense.float(), made.config
    save_file(stored, target / "model.safetensors")
    edit_config(target, lambda config: config.update(quantization_config=section))
    return dense


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the folder's config.json in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
