"""Open a GGUF file as a checkpoint: its config, and its tensors one by one, with stacked tensors split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import codes_of_matrix
from workbench.errors import WorkbenchError
from workbench.model.formats.checkpoint import Checkpoint, QuantizedKind, QuantizedMatrix, StoredTensor
from workbench.model.formats.gguf.blocks import (
    PLAIN_DTYPES,
    dequantize_blocks,
    fill_words,
    matrix_in_words,
)
from workbench.model.formats.gguf.families import SHARED, architecture_of, config_of, names_of
from workbench.model.formats.gguf.file import GGUFFile, GGUFTensor, open_gguf
from workbench.model.formats.mapped import release
from workbench.model.hf.fields import ConfigFields

MAX_PARTS = 1000
GROUPED_KINDS: dict[str, QuantizedKind] = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8"}
# Tensors with rotary scaling factors (see gguf_rotary.py), and tables that are computed here.
NO_PARAMETERS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class GGUFStoredTensor(StoredTensor):
    """A tensor of a GGUF file, or a range of its rows, which are counted over all axes but the last; `dtype` is GGUF's
    name.

    Args:
        source: the file.
        info: the tensor in it.
        first_row: the first of the rows.
        offset: the constant that was added to the model's numbers when they were stored.
    """

    source: GGUFFile
    info: GGUFTensor
    first_row: int = 0
    offset: float = 0.0

    def read(self) -> Tensor:
        type = self.info.type
        dtype = PLAIN_DTYPES.get(type.name, torch.float32)
        numbers = dequantize_blocks(type, self._blocks(), dtype).view(self.shape)
        return numbers - self.offset if self.offset else numbers

    def own_format(self) -> MatrixFormat | None:
        type = self.info.type
        format = MatrixFormat("float16") if type.name == "F16" else type.format
        return format if len(self.shape) == 2 else None

    def fill(self, stored: Sequence[Tensor]) -> None:
        data = self._blocks()
        if self.info.type.format is None:
            stored[0].copy_(data.view(stored[0].dtype).view(self.shape))
        else:
            fill_words(self.info.type, data, stored)
        release(data)

    def quantized(self) -> QuantizedMatrix | None:
        """Return the tensor as a quantized matrix, bit for bit, if its type is Q4_0, Q4_1 or Q8_0: integers in groups
        of 32 columns. None for other types: they have several scales per group, or no integers.
        """
        type = self.info.type
        if type.name not in GROUPED_KINDS or len(self.shape) != 2:
            return None
        data, rows, size = self._blocks(), self.shape[0], type.values
        format = type.format
        assert format is not None
        blocks = data.view(-1, type.bytes)
        scales = [blocks[:, at : at + 2].contiguous().view(torch.float16).float().view(rows, -1) for at in type.scales]

        def codes() -> Tensor:
            return codes_of_matrix(format, *matrix_in_words(type, data, rows))[0]

        minima = scales[1] if len(scales) > 1 else None
        return QuantizedMatrix(GROUPED_KINDS[type.name], codes, scales[0], size, minima=minima)

    def _blocks(self) -> Tensor:
        start = self.first_row * self.info.shape[-1] // self.info.type.values * self.info.type.bytes
        return self.source.blocks(self.info.name)[start : start + self.nbytes]


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, with all parts if it is split; only headers are read and checked.

    Raises:
        WorkbenchError: for a damaged file, a missing part, and unsupported contents.
    """
    files = open_parts(path)
    infos = {name: (file, info) for file in files for name, info in file.tensors.items()}
    if len(infos) < sum(len(file.tensors) for file in files):
        raise WorkbenchError(f"{path}: a tensor is in several of its parts; fetch them again")
    plain = {name: info for name, (_, info) in infos.items()}
    offset = float(architecture_of(files[0]).norm_offset)
    tensors: dict[str, StoredTensor] = {}
    for name, (file, info) in infos.items():
        if name not in NO_PARAMETERS and not name.endswith("attn_rot_embd.weight"):
            tensors |= _named(file, info, offset if name.endswith("norm.weight") else 0.0)
    kinds = sorted({info.type.name for info in plain.values() if len(info.shape) > 1})
    config, names = gguf_config(path), names_of(files[0], plain)
    return Checkpoint(path, config, tensors, f"GGUF {', '.join(kinds)}", names)


_configs: WeakKeyDictionary[GGUFFile, ConfigFields] = WeakKeyDictionary()


def gguf_config(path: Path) -> ConfigFields:
    """Return the equivalent of config.json for the file's model; it is computed once while the file is open."""
    files = open_parts(path)
    if (config := _configs.get(files[0])) is None:
        config = _configs[files[0]] = config_of(files)
    return config


def open_parts(path: Path) -> list[GGUFFile]:
    """Open the file, and the other parts of its model: NAME-00001-of-00003.gguf, ..."""
    first = open_gguf(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return [first]
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if found is None or int(found[2]) != count or count > MAX_PARTS:
        right = f"NAME-00001-of-{count:05}.gguf"
        raise WorkbenchError(f"{path}: is one of {count} parts; name the first of them, which is called {right}")
    paths = [path.with_name(f"{found[1]}-{index:05}-of-{count:05}.gguf") for index in range(2, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise WorkbenchError(f"{path}: {len(missing)} of its {count} parts are missing: {', '.join(missing[:3])}")
    return [first, *map(open_gguf, paths)]


def _named(file: GGUFFile, info: GGUFTensor, offset: float) -> dict[str, StoredTensor]:
    """Return a tensor by name; for a stacked tensor, one entry per expert."""

    def rows(first: int, shape: tuple[int, ...]) -> GGUFStoredTensor:
        numbers = 1
        for size in shape:
            numbers *= size
        nbytes = numbers // info.type.values * info.type.bytes
        return GGUFStoredTensor(file.path, info.type.name, shape, nbytes, file, info, first, offset)

    if stacked := re.fullmatch(r"(blk\.\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)", info.name):
        layer, part, kind = stacked.groups()
        if len(info.shape) != (3 if kind == "weight" else 2):
            return {info.name: rows(0, info.shape)}  # an error with its name follows
        count, *each = info.shape
        size = each[0] if kind == "weight" else 1
        if part == "gate_up" and kind == "weight":
            half = (size // 2, each[1])
            return {
                f"{layer}.ffn_{name}_exps.{expert}.weight": rows(expert * size + at, half)
                for expert in range(count)
                for name, at in (("gate", 0), ("up", size // 2))
            }
        return {f"{layer}.ffn_{part}_exps.{expert}.{kind}": rows(expert * size, tuple(each)) for expert in range(count)}
    if shared := re.fullmatch(r"(blk\.\d+)\.ffn_(gate|up|down)_shexp\.weight", info.name):
        return {f"{shared[1]}.ffn_shexp.{SHARED[shared[2]]}.weight": rows(0, info.shape)}
    if info.name.endswith("ffn_gate_inp_shexp.weight"):
        return {info.name: rows(0, (1, info.shape[-1]))}
    return {info.name: rows(0, info.shape)}
