"""Read FP8 weights scaled by blocks (`quant_method: fp8`, DeepSeek's): F8_E4M3 `weight` [out, in], and
`weight_scale_inv` [out / 128, in / 128], rounded up, which multiplies a block's values.

The size of blocks is the config's `weight_block_size`; the last block may be partial, as in a matrix of 576 rows. If
the config has no such size, a matrix has one scale. Scales are F32 or powers of two (F8_E8M0).

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
    """A matrix in FP8. `scale` is the name ending of the tensor with its scales, one for each `block` of rows and
    columns.
    """

    scale: str
    block: tuple[int, int]

    def quantized(self) -> QuantizedMatrix:
        scales = self.parts[self.scale].read()
        rows, columns = self.block
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        return QuantizedMatrix("fp8", self.parts["weight"].read, scales, columns, rows)


def fp8_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the FP8 matrices of a folder by name, and a description of the format. Raises WorkbenchError for
    unsupported variants, and if tensors disagree with the config.
    """
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
