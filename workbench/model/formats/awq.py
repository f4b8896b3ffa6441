"""Read AWQ weights of 4 bits, in the order of AWQ's GEMM kernel (`quant_method: awq`, `version: gemm`).

`qweight` [in, out / 8] and `qzeros` [group, out / 8] hold eight outputs in a word of int32: nibble j, the lowest first,
is output 8 c + ORDER[j]. `scales` [group, out]. w = (q - z) * scale.

https://github.com/casper-hansen/AutoAWQ: awq/utils/packing_utils.py, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import QuantizedMatrix, StoredTensor
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

PARTS = ("qweight", "qzeros", "scales", "weight")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble


@dataclass(frozen=True)
class AWQTensor(PackedTensor):
    group: int

    def quantized(self) -> QuantizedMatrix:
        zeros = _nibbles(self.parts["qzeros"].read())
        return QuantizedMatrix(
            "int4",
            lambda: _nibbles(self.parts["qweight"].read()).contiguous(),
            self.parts["scales"].read().T,
            self.group,
            zeros=zeros if zeros.any() else None,
        )


def _nibbles(words: Tensor) -> Tensor:
    """Return the signed values in words [row, out / 8], outputs first: [out, row]."""
    places = torch.tensor(ORDER).argsort()
    values = unpack_bits(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)[..., places]
    return (values.flatten(1).to(torch.int8) - 8).T


def awq_tensors(config: ConfigFields, stored: Stored) -> tuple[dict[str, StoredTensor], str]:
    """Return the AWQ matrices of a folder under their dense names, and a description of the format. Raises
    WorkbenchError for unsupported variants, and if tensors disagree with the config.
    """
    names = {"bits": "w_bit", "group_size": "q_group_size"}  # and their names in older files
    bits, group = (old if config.get(name) is None else name for name, old in names.items())
    if config.integer(bits) != 4:
        raise config.invalid(bits, config.get(bits), "4")
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise config.invalid("version", version, "gemm: other layouts are not read")
    if config.get("backend") not in (None, "autoawq"):
        raise config.invalid("backend", config.get("backend"), "autoawq")
    size = -1 if config.get(group) == -1 else config.integer(group)
    packed = modules(stored, "qweight", PARTS)
    refuse_unconverted(config, "modules_to_not_convert", packed)
    found: dict[str, StoredTensor] = {}
    for name, parts in packed.items():
        module = Module(name, config, parts)
        module.only(*PARTS[:3])
        columns, words = module.shape("qweight", ("I32",))
        columns_of_group = columns if size == -1 else size
        if columns % columns_of_group:
            raise WorkbenchError(f"{module.file}: {name} has {columns} inputs, no multiple of {group} {size}")
        groups = columns // columns_of_group
        module.expect("scales", FLOATS, groups, 8 * words)
        module.expect("qzeros", ("I32",), groups, words)
        shape = 8 * words, columns
        found[f"{name}.weight"] = AWQTensor(
            Path(str(module.file)), "AWQ4", shape, module.nbytes, name, parts, columns_of_group
        )
    return found, "AWQ 4 bits" + ("" if size == -1 else f" in groups of {size}")
