"""Define the settings for the format of keys and values, and the cache spec of each layer.

A format is dense, quantized to INT8, INT4 or FP8 with a residual in full precision, or a user-defined codec. A
layer that is quantized, or encoded in groups of tokens, has two cache groups, any other has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field, ValidationError, model_validator

from compiled_kernels.quantized_attention import (
    PageFormat,
    QuantFormat,
    QuantizationRule,
    bits_per_number,
    codes_per_word,
)
from compiled_kernels.quantized_attention.quantize import INTEGER_BITS
from workbench.errors import WorkbenchError, explain, nearest
from workbench.kv_cache.codec import LoadedCodec, load_codec, stored_bytes
from workbench.kv_cache.pages import KVCacheGroup
from workbench.request import CustomPart, CustomPartSetting
from workbench.settings import Count, NonNegative, Settings, optional_fields

FORMATS: tuple[QuantFormat, ...] = get_args(QuantFormat)


class LayerFormat(Settings):
    """The format of one layer's keys and values.

    Quantized keys have a scale per channel of `quant_group` tokens, quantized values one per `columns` columns of a
    token (Liu et al. 2024, KIVI). Complete groups that are at least `residual_length` tokens old are quantized. The
    others and the first `num_sink_tokens` stay in full precision. With `rotate` heads are rotated by a Hadamard matrix
    first. A `codec` is user-defined and takes the place of a format: it encodes each token as it is written, or groups
    of tokens, for which `residual_length` and `num_sink_tokens` have the same meaning.
    """

    format: QuantFormat = "dense"  # format of keys and values; dense: not quantized
    keys: QuantFormat | None = None  # format of keys; None: as `format`
    values: QuantFormat | None = None  # format of values; None: as `format`
    quant_group: Annotated[int, Field(ge=8, multiple_of=8)] = 64  # tokens that share a key channel's scale
    columns: Annotated[int, Field(ge=8, multiple_of=8)] = 64  # columns that share a value's scale; at most a head
    residual_length: Count = 64  # minimum number of newest tokens in full precision
    num_sink_tokens: NonNegative = 0  # number of first tokens of a text that are never quantized
    rotate: bool = False  # rotate heads by a Hadamard matrix before quantization
    codec: CustomPartSetting | None = None  # user-defined codec, in place of a format

    @model_validator(mode="after")
    def _codec_is_alone(self) -> LayerFormat:
        if self.codec is not None and self.quantized:
            raise ValueError(f"codec and {self.key_value_formats} are both formats; leave one out")
        return self

    @model_validator(mode="after")
    def _groups_are_whole_words(self) -> LayerFormat:
        for form in self.key_value_formats:
            if form in INTEGER_BITS and self.quant_group % codes_per_word(form):
                word = codes_per_word(form)
                raise ValueError(f"quant_group {self.quant_group}: {form} needs a multiple of {word}, a word's codes")
        return self

    @model_validator(mode="after")
    def _rotates_something(self) -> LayerFormat:
        if self.rotate and not self.quantized:
            raise ValueError("rotate without a quantized format changes nothing; set format, keys or values")
        return self

    @property
    def key_value_formats(self) -> tuple[QuantFormat, QuantFormat]:
        """Return the formats of keys and of values."""
        return self.keys or self.format, self.values or self.format

    @property
    def quantized(self) -> bool:
        return self.key_value_formats != ("dense", "dense")

    def __str__(self) -> str:
        if self.codec is not None:
            return f"codec {self.codec.path}"
        keys, values = self.key_value_formats
        return keys if keys == values else f"{keys} keys, {values} values"


class LayerFormatOverride(optional_fields(LayerFormat)):
    """Overrides for one layer; None: as in the other layers."""


class CodecCalibration(Settings):
    """The calibration text of codecs: a file, or the workbench's own text (Python code). For a model without tokenizer
    the text's bytes are the tokens.
    """

    text: str | None = None  # path of a text file; None: the workbench's own text
    tokens: Count = 1024  # number of first tokens to use


class CacheFormat(LayerFormat):
    """The format of all layers, with overrides by layer index. `dtype` is the type of unquantized keys and values;
    `auto`: the model's.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # dtype of unquantized keys, values; auto: the model's
    )
    calibration: CodecCalibration = CodecCalibration()  # calibration text, for codecs that need one
    layers: dict[NonNegative, LayerFormatOverride] = {}  # overrides of single layers, by layer index

    @property
    def codecs(self) -> tuple[CustomPart, ...]:
        """Return all user-defined codecs, those of single layers included."""
        layers = (getattr(layer, "codec", None) for layer in self.layers.values())
        return tuple(codec for codec in (self.codec, *layers) if codec is not None)

    def for_layer(self, layer: int) -> LayerFormat:
        """Return the format of one layer. An override with a `format` discards `keys`, `values` and `codec` of the
        other layers; one with a `codec` discards their formats.
        """
        mine = {name: getattr(self, name) for name in LayerFormat.model_fields}
        change = self.layers[layer].model_dump(exclude_none=True) if layer in self.layers else {}
        if "format" in change or "codec" in change:
            mine |= {"format": "dense", "keys": None, "values": None, "codec": None}
        mine |= change
        if mine["rotate"] and {mine["keys"] or mine["format"], mine["values"] or mine["format"]} == {"dense"}:
            mine["rotate"] = False  # a dense layer is not rotated
        return LayerFormat(**mine)

    def check(self, layers: int, page_size: int) -> None:
        """Raise WorkbenchError for overrides of layers that the model does not have, and for groups of tokens that do
        not divide pages.
        """
        if wrong := [index for index in self.layers if index >= layers]:
            raise WorkbenchError(f"cache.layers: no layer {wrong[0]}; the model has layers 0..{layers - 1}")
        for index in range(layers):
            mine = self.for_layer(index)
            group = mine.quant_group if mine.quantized else mine.codec and load_codec(mine.codec).group
            if group and page_size % group:
                where = "cache.quant_group" if mine.quantized else f"{mine}.group"
                raise WorkbenchError(
                    f"{where}: groups of {group} tokens do not divide pages of {page_size}; "
                    f"set cache.page_size to a multiple, or a smaller {where.split('.')[-1]}"
                )


def parse_cache_format(given: str | Mapping[str, Any] | CacheFormat) -> CacheFormat:
    """Parse a cache format, given as the name of a format, the path of a codec (`mine.py:Codec`), settings, or a
    CacheFormat.
    """
    if isinstance(given, CacheFormat):
        return given
    if isinstance(given, str):
        if ":" in given:
            return CacheFormat(codec=CustomPart(path=given))
        if given not in FORMATS:
            known = ", ".join(FORMATS)
            raise WorkbenchError(f"unknown cache format {given!r}{nearest(given, FORMATS)}; known: {known}")
        return CacheFormat(format=given)
    try:
        return CacheFormat.model_validate(dict(given))
    except ValidationError as error:
        raise explain(error, "cache", CacheFormat) from None


DENSE = LayerFormat()


@dataclass(frozen=True)
class StateShape:
    """The state that a recurrent layer keeps for a sequence: the shape of each of its tensors."""

    parts: tuple[tuple[int, ...], ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the number of bytes of one state in a cache of `dtype`; a state is never narrower than float32."""
        return torch.promote_types(dtype, torch.float32).itemsize * sum(map(math.prod, self.parts))


class PageSummaries(NamedTuple):
    """Summaries of each page's keys, by name (see `compiled_kernels.page_selection`), stored for the selection of pages
    of `page_size` tokens.
    """

    kinds: tuple[str, ...]
    page_size: int


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache spec of one layer: key/value heads, head size, window, format and cache groups.

    With a sliding window, queries see only the last positions and the sink tokens. A layer that is quantized or encoded
    in groups keeps old tokens in `group` and all other tokens, in full precision, in `residual_group`. With
    `num_value_columns` the values are the first columns of the keys and are not stored separately (multi-head latent
    attention). `codec` is the format's loaded codec. A recurrent layer has a `state` instead of keys and values, or in
    addition, in the pages of `state_group`. A layer that reads the keys and values of layer `shared_with` has no cache.
    A layer that selects pages keeps `summaries` of each page.
    """

    num_kv_heads: int
    head_dim: int
    group: int = 0
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    format: LayerFormat = DENSE
    residual_group: int = 0
    num_value_columns: int | None = None
    codec: LoadedCodec | None = field(default=None, compare=False, repr=False)  # the format contains its path
    state: StateShape | None = None
    state_group: int = 0
    shared_with: int | None = None
    summaries: PageSummaries | None = None

    @property
    def values_per_token(self) -> int:
        """Return how many values, of keys and values together, a token stores."""
        return (2 if self.num_value_columns is None else 1) * self.num_kv_heads * self.head_dim

    @property
    def quantization_rule(self) -> QuantizationRule:
        """Return the rule that decides which positions a query reads quantized; a window's sinks stay in full
        precision."""
        sinks = max(self.format.num_sink_tokens, self.num_sink_tokens)
        group = self.format.quant_group if self.codec is None else self.codec.group or 1
        return QuantizationRule(group, self.format.residual_length, sinks)

    @property
    def keeps_residual(self) -> bool:
        """Return whether old tokens are stored in groups, quantized or encoded, and new tokens in `residual_group`."""
        return self.format.quantized or (self.codec is not None and self.codec.group is not None)

    @property
    def cache_groups(self) -> dict[int, KVCacheGroup]:
        """Return the cache groups that the layer belongs to, by number."""
        found = {} if self.state is None else {self.state_group: KVCacheGroup.of_states()}
        if not self.num_kv_heads:
            return found
        if not self.keeps_residual:
            dense = KVCacheGroup(sliding_window=self.sliding_window, num_sink_tokens=self.num_sink_tokens)
            return found | {self.group: dense}
        rule = self.quantization_rule
        quantized = KVCacheGroup(
            sliding_window=self.sliding_window, residual_length=rule.residual_length, quant_group=rule.quant_group
        )
        recent = KVCacheGroup(
            sliding_window=rule.residual_length + rule.quant_group,
            num_sink_tokens=rule.num_sink_tokens,
            stride=rule.quant_group,
        )
        return found | {self.group: quantized, self.residual_group: recent}

    def bytes_per_token(self, dtype: torch.dtype) -> float:
        """Return the number of bytes of a token's keys and values: num_kv_heads x head_dim x bytes per value, for both.

        For a quantized layer these are codes, scales and minima; for a codec, its stored tensors. With multi-head
        latent attention only the key counts.
        """
        if self.codec is not None:
            return stored_bytes(self.codec, self.num_kv_heads, self.head_dim, dtype)
        if not self.format.quantized:
            return self.values_per_token * dtype.itemsize
        return self.num_kv_heads * self.head_dim * sum(self._bits(dtype)) / 8

    def residual_bytes(self, dtype: torch.dtype) -> int:
        """Return the maximum number of bytes that a quantized layer stores for one sequence in full precision: residual
        tokens and sinks.
        """
        rule = self.quantization_rule
        tokens = rule.residual_length + rule.quant_group - 1 + rule.num_sink_tokens if self.keeps_residual else 0
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize * tokens

    def group_bytes_per_token(self, group: int, dtype: torch.dtype) -> float:
        """Return the number of bytes that one token takes in a cache group."""
        if not self.keeps_residual or group == self.group:
            return self.bytes_per_token(dtype) if group == self.group else 0
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize if group == self.residual_group else 0

    def page_bytes(self, group: int, page_size: int, dtype: torch.dtype) -> float:
        """Return the number of bytes of one page of a cache group: all of its tokens, or one recurrent state."""
        if self.state is not None and group == self.state_group:
            return self.state.bytes(dtype)
        summaries = 0 if self.summaries is None or group != self.group else len(self.summaries.kinds)
        beside = summaries * self.num_kv_heads * self.head_dim * dtype.itemsize
        return page_size * self.group_bytes_per_token(group, dtype) + beside

    def page_formats(self, page_size: int) -> tuple[PageFormat, PageFormat]:
        """Return the page formats of quantized keys and of quantized values. Raises WorkbenchError if the head size
        does not fit.
        """
        keys, values = self.format.key_value_formats
        columns = min(self.format.columns, self.head_dim)
        for name, kind, each in (("keys", keys, codes_per_word(keys)), ("values", values, columns)):
            if kind != "dense" and self.head_dim % each:
                raise WorkbenchError(
                    f"cache: {kind} {name} are quantized {each} columns at a time; heads have {self.head_dim}"
                )
        if self.format.rotate and self.head_dim & (self.head_dim - 1):
            message = f"rotate needs a head_dim that is a power of two, not {self.head_dim}"
            raise WorkbenchError(f"cache.rotate: {message}")
        made = self.num_kv_heads, self.head_dim, page_size
        return PageFormat(keys, True, *made, self.format.quant_group), PageFormat(values, False, *made, columns)

    def _bits(self, dtype: torch.dtype) -> tuple[float, float]:
        runs = self.format.quant_group, min(self.format.columns, self.head_dim)
        keys, values = self.format.key_value_formats
        return bits_per_number(keys, runs[0], dtype), bits_per_number(values, runs[1], dtype)


def build_cache_specs(
    layers: Iterable[tuple[int, int, int | None, int, int | None]],
    format: CacheFormat | None = None,
    states: Iterable[StateShape | None] = (),
    shared_with: Iterable[int | None] = (),
    summaries: Iterable[PageSummaries | None] = (),
) -> tuple[KVCacheSpec, ...]:
    """Build the cache specs of layers; equal layers share cache groups, and all recurrent states are in one group, the
    last.

    Each layer is given as (num_kv_heads, head_dim, sliding_window, num_sink_tokens, num_value_columns); `states` has
    its state, if any. A layer without heads has only a state. `shared_with` gives, for a layer that reads another
    layer's keys and values, the number of that layer; it then has no cache of its own. `summaries` are stored for each
    page.

    A layer whose window lies within the residual would never read quantized tokens, so it stays dense.

    Raises:
        WorkbenchError: for multi-head latent attention with a quantized format or a codec; for an invalid codec; for a
            format of states; for a format of a layer without a cache.
    """
    numbers: dict[KVCacheSpec, tuple[int, int]] = {}
    shapes, taken = [], 0
    for index, ((num_kv_heads, head_dim, window, num_sink_tokens, columns), state, source, kept) in enumerate(
        zip_longest(layers, states, shared_with, summaries)
    ):
        if source is not None:
            if format is not None and index in format.layers:
                message = f"layer {index} reads the keys and values of layer {source}; set that layer's format"
                raise WorkbenchError(f"cache.layers: {message}")
            shapes.append(KVCacheSpec(0, 0, shared_with=source))
            continue
        if not num_kv_heads:
            if format is not None and index in format.layers:
                raise WorkbenchError(f"cache.layers: layer {index} keeps a state in float32 and no keys or values")
            shapes.append(KVCacheSpec(0, 0, state=state))
            continue
        mine = DENSE if format is None else format.for_layer(index)
        codec = None if mine.codec is None else load_codec(mine.codec)
        delayed = mine.quantized or (codec is not None and codec.group is not None)
        if (codec is None and not delayed) or (delayed and window is not None and window <= mine.residual_length):
            mine, codec, delayed = DENSE, None, False
        if mine != DENSE and kept is not None:
            message = f"layer {index} chooses pages by summaries of dense keys and has no {mine} form; keep it dense"
            raise WorkbenchError(f"cache: {message}")
        if mine != DENSE and columns is not None:
            raise WorkbenchError(f"cache: layer {index} keeps latent rows, which have no {mine} form; keep it dense")
        shape = KVCacheSpec(
            num_kv_heads, head_dim, 0, window, num_sink_tokens, mine,
            num_value_columns=columns, codec=codec, summaries=kept,
        )  # fmt: skip
        if shape not in numbers:
            numbers[shape] = taken, taken + delayed
            taken += 1 + delayed
        group, residual_group = numbers[shape]
        shapes.append(replace(shape, group=group, residual_group=residual_group, state=state))
    if format is not None and (format.quantized or format.codec is not None) and not numbers:
        raise WorkbenchError(f"cache: {format} is a format of keys and values, and this model keeps only states")
    return tuple(replace(shape, state_group=taken) if shape.state is not None else shape for shape in shapes)
