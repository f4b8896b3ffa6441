"""FP8 by blocks (`quant_method: fp8`, DeepSeek's): F8_E4M3 `weight` [out, in], and `weight_scale_inv`
[out / 128, in / 128], rounded up, which multiplies a block's values.

The blocks are the config's `weight_block_size`: a matrix of 576 rows has a partial last one. Without, a matrix has one
scale. Scales are F32 or powers of two (F8_E8M0).

https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py: `weight_dequant`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.model.formats.checkpoint import QuantizedMatrix, StoredTensor
from workbench.model.formats.packed import FLOATS, Module, PackedTensor, Stored, modules, refuse_unconverted
from workbench.model.hf.fields import ConfigFields

PARTS = ("weight", "weight_scale_inv", "input_scale", "activation_scale")
SCALES = (*FLOATS, "F8_E8M0")


@dataclass(frozen=True)
class FP8Tensor(PackedTensor):
    """`scale` names the part with scales, each of `block` rows and columns."""

    scale: str
    block: tuple[int, int]

    def quantized(self) -> QuantizedMatrix:
        scales = self.parts[self.scale].read()
        rows, columns = self.block
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        return QuantizedMatrix("fp8", self.parts["weight"].read, scales, columns, rows)


def fp8_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the matrices that `config` says are stored as FP8, by their names, and the format in words. Raises
    WorkbenchError for variants that are not read, and where tensors disagree with the config."""
    if config.get("fmt") not in (None, "e4m3"):
        raise config.invalid("fmt", config.get("fmt"), "e4m3")
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise config.invalid("weight_block_size", block, "two positive integers, or null for one scale a matrix")
    packed = modules(stored, "weight_scale_inv", PARTS)
    refuse_unconverted(config, "modules_to_not_convert", packed)
    found: dict[str, StoredTensor] = {}
    for name, parts in packed.items():
        module = Module(name, config, parts)
        shape = module.shape("weight", ("F8_E4M3",))
        rows, columns = block or shape
        if block is None:
            module.expect("weight_scale_inv", SCALES, *((1,) if len(parts["weight_scale_inv"].shape) else ()))
        else:
            module.expect("weight_scale_inv", SCALES, -(-shape[0] // rows), -(-shape[1] // columns))
        found[f"{name}.weight"] = FP8Tensor(
            Path(str(module.file)), "F8_E4M3", shape, module.nbytes, name, parts, "weight_scale_inv", (rows, columns)
        )
    return found, "FP8" + ("" if block is None else f" in blocks of {block[0]}x{block[1]}")
