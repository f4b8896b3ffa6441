"""Read a GGUF architecture's metadata by type; the keys that were read are recorded, so that unread keys can be
refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import compress, count
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.formats.gguf.file import GGUFArray, GGUFFile
from workbench.model.hf.fields import REQUIRED, ConfigFields

END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# End tokens that may lack a key, found by name as in llama.cpp (llama-vocab.cpp): older converters only wrote eos.
END_NAMES = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>",
))  # fmt: skip


class GGUFValues:
    """The metadata of a file whose keys begin with its architecture (`llama.block_count` is `block_count` here).

    Args:
        files: the parts of the model; the first has the metadata, each has its own tensors.
    """

    def __init__(self, files: Sequence[GGUFFile]):
        file = files[0]
        self._prefix = f"{file.metadata['general.architecture']}."
        own = {key: value for key, value in file.metadata.items() if key.startswith(self._prefix)}
        self._fields = ConfigFields({key: _plain(key, value, file) for key, value in own.items()}, str(file.path))
        self._file, self._parts = file, {name: part for part in files for name in part.tensors}
        self.tensors = {name: part.tensors[name] for name, part in self._parts.items()}
        self._read: set[str] = set()

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        return self._fields.integer(self._noted(key), default, minimum)

    def number(self, key: str, default: Any = REQUIRED, zero: bool = False) -> Any:
        return self._fields.number(self._noted(key), default, zero)

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self._fields.invalid(self._prefix + key, value, "a string")
        return value

    def take(self, key: str) -> Any:
        """Return a metadata value unchanged; None if the key is missing."""
        return self._fields.get(self._noted(key))

    def flags(self, key: str, layers: int, period: int) -> list[bool]:
        """Return a boolean for each layer: the values of an array in the metadata, or true in all but every n-th layer,
        with n from the metadata or `period`.
        """
        value = self.take(key)
        if isinstance(value, list):
            if len(value) < layers:
                raise self._fields.invalid(self._prefix + key, value, f"{layers} values")
            return [bool(each) for each in value[:layers]]
        period = self.integer(key, default=period)
        return [(index + 1) % period != 0 for index in range(layers)]

    def head_dim(self) -> int:
        """Return the number of columns of a head, which is the same for keys and values."""
        width, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        dim: int = self.integer("attention.key_length", default=width // heads)
        value = self.integer("attention.value_length", default=dim)
        if value != dim:
            raise self.invalid("attention.value_length", value, f"attention.key_length ({dim})")
        return dim

    def rotary_share(self) -> float | None:
        """Return the fraction of a head's columns that are rotated; None if the metadata have none."""
        columns, dim = self.integer("rope.dimension_count", default=None), self.head_dim()
        if columns is None or columns == dim:
            return None if columns is None else 1.0
        share = columns / dim
        return share if int(dim * share) == columns else (columns + 0.5) / dim

    def end_token_ids(self) -> list[int]:
        """Return the ids of end tokens: first those that metadata keys give, then those known by name."""
        found = [self._file.metadata.get(f"tokenizer.ggml.{key}") for key in END_TOKENS]
        entries = self._file.metadata.get("tokenizer.ggml.tokens")
        names = entries.values() if isinstance(entries, GGUFArray) else entries if isinstance(entries, list) else []
        ends = END_NAMES - ({"<|end|>"} if "<|return|>" in names else set())  # in this model it ends a channel
        found += compress(count(), map(ends.__contains__, names))
        return list(dict.fromkeys(each for each in found if isinstance(each, int)))

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            raise WorkbenchError(f"{self._file.path}: has no tensor {tensor!r}; fetch the file again")
        return self.tensors[tensor].shape

    def numbers(self, tensor: str) -> list[float] | None:
        """Return the numbers of a small tensor; None if the file has no such tensor."""
        return self._parts[tensor].read(tensor).tolist() if tensor in self._parts else None

    def invalid(self, key: str, value: object, right: str) -> WorkbenchError:
        return self._fields.invalid(self._prefix + key, value, right)

    def refuse_unread(self, harmless: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise WorkbenchError for metadata that were not read, unless their value has no effect."""
        vocab = self.integer("vocab_size", default=None)
        rows = self.shape("token_embd.weight")[0]
        if vocab not in (None, rows):
            raise self.invalid("vocab_size", vocab, f"the rows of token_embd.weight ({rows})")
        for key, value in self._fields.values.items():
            short = key.removeprefix(self._prefix)
            if key not in self._read and value not in harmless.get(short, ()):
                raise self.invalid(short, value, "absent: its effect is not supported")

    def _noted(self, key: str) -> str:
        self._read.add(self._prefix + key)
        return self._prefix + key


def _plain(key: str, value: Any, file: GGUFFile) -> Any:
    """Return a value in the form of config.json: a constant array as its value, and float32 in its shortest decimal
    form.
    """
    if isinstance(value, GGUFArray):
        if len(value) > 100_000:
            raise file.damaged(f"{key} has {len(value):,} values")
        values = [_shortest(each) for each in value.values()]
        same = values and all(each == values[0] for each in values) and not isinstance(values[0], bool)
        return values[0] if same else values
    return _shortest(value)


def _shortest(value: Any) -> Any:
    """Return a number stored as float32 in the shortest form that float32 rounds to it: 1e-05, not 9.9999997e-06."""
    if not isinstance(value, float):
        return value
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", stored)[0] != value:
        return value
    return next(short for digits in range(1, 18) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == stored)
