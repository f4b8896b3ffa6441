"""Read GPTQ weights of 2, 3, 4 and 8 bits (`quant_method: gptq`): codes and zeros in words of int32, with scales for
groups of inputs.

`qweight` [in * bits / 32, out] packs the inputs of an output, the lowest bits first; `qzeros` [group, out * bits / 32]
packs the outputs of a group; `scales` [group, out]; `g_idx` [in] the group of each input, which is i // group_size
unless weights were quantized in the order of their activations (`desc_act`). w = (q - z) * scale, where files of
version 1 hold z - 1 (`checkpoint_format: gptq`) and of version 2 hold z (`gptq_v2`).

https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/ModelCloud/GPTQModel: `qlinear/*.py`, `pack` and `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import QuantizedKind, QuantizedMatrix, StoredTensor
from workbench.model.formats.packed import (
    FLOATS,
    Module,
    PackedTensor,
    Stored,
    modules,
    refuse_unconverted,
    unpack_bits,
)
from workbench.model.hf.fields import ConfigFields

PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight")
KINDS: dict[int, QuantizedKind] = {2: "int2", 3: "int3", 4: "int4", 8: "int8"}
VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class GPTQTensor(PackedTensor):
    bits: int
    group: int
    version: int
    symmetric: bool

    def quantized(self) -> QuantizedMatrix:
        columns = self.shape[1]
        half = 1 << (self.bits - 1)
        stored = unpack_bits(self.parts["qzeros"].read(), self.bits, self.shape[0]).T
        # Some files declare version 1 but contain version 2: symmetric zeros tell them apart.
        version = 2 if self.symmetric and bool((stored == half).all()) else self.version
        zeros = stored.to(torch.int16) + (1 if version == 1 else 0) - half
        index = self.parts["g_idx"].read() if "g_idx" in self.parts else None
        if index is not None and torch.equal(index, torch.arange(columns, dtype=index.dtype) // self.group):
            index = None

        def codes() -> torch.Tensor:
            return (unpack_bits(self.parts["qweight"].read().T, self.bits, columns) - half).view(torch.int8)

        return QuantizedMatrix(
            KINDS[self.bits],
            codes,
            self.parts["scales"].read().T,
            self.group,
            zeros=zeros if zeros.any() else None,
            group_index=index,
        )


def gptq_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the GPTQ matrices of a folder under their dense names, and a description of the format. Raises
    WorkbenchError for unsupported variants, and if tensors disagree with the config.
    """
    bits, group = config.integer("bits", maximum=8), config.get("group_size")
    if bits not in KINDS:
        raise config.invalid("bits", bits, "2, 3, 4 or 8")
    if group != -1:
        group = config.integer("group_size")
    version = config.get("checkpoint_format") or "gptq"
    if not isinstance(version, str) or version not in VERSIONS:
        raise config.invalid("checkpoint_format", version, f"one of {', '.join(VERSIONS)}")
    if config.get("dynamic"):
        raise config.invalid("dynamic", config.get("dynamic"), "empty: bits by module are not read")
    if config.get("pack_dtype") not in (None, "int32"):
        raise config.invalid("pack_dtype", config.get("pack_dtype"), "int32")
    symmetric = config.boolean("sym", default=True)
    packed = modules(stored, "qweight", PARTS)
    refuse_unconverted(config, "modules_to_not_convert", packed)
    found: dict[str, StoredTensor] = {}
    for name, parts in packed.items():
        module = Module(name, config, parts)
        module.only(*PARTS[:4])
        words, out = module.shape("qweight", ("I32",))
        columns = words * 32 // bits
        size = columns if group == -1 else group
        groups = -(-columns // size)
        if words * 32 % bits or out * bits % 32:
            raise WorkbenchError(f"{module.file}: {name}.qweight {[words, out]} does not fit codes of {bits} bits")
        module.expect("scales", FLOATS, groups, out)
        module.expect("qzeros", ("I32",), groups, out * bits // 32)
        if "g_idx" in parts:
            module.expect("g_idx", ("I32",), columns)
            index = module.read("g_idx")
            if int(index.min()) < 0 or int(index.max()) >= groups:
                raise WorkbenchError(f"{module.file}: {name}.g_idx must lie in 0..{groups - 1}")
        elif config.boolean("desc_act") and groups > 1:
            module.shape("g_idx", ("I32",), 1)
        found[f"{name}.weight"] = GPTQTensor(
            Path(str(module.file)), f"GPTQ{bits}", (out, columns), module.nbytes, name, parts,
            bits, size, VERSIONS[version], symmetric,
        )  # fmt: skip
    return found, f"GPTQ {bits} bits" + ("" if group == -1 else f" in groups of {group}")
