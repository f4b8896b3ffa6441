"""Settings for the format of keys and values: dense, or quantized to INT8, INT4 or FP8 with a residual in full
precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compiled_kernels.quantized_attention import QuantFormat
from workbench.errors import WorkbenchError, explain, nearest

FORMATS: tuple[QuantFormat, ...] = ("dense", "int8", "int4", "fp8")
Count = Annotated[int, Field(ge=1)]


class LayerFormat(BaseModel):
    """The format of one layer's keys and values.

    Quantized keys have a scale per channel of `group` tokens, quantized values one per `columns` columns of a token
    (Liu et al. 2024, KIVI). Complete groups that are at least `residual` tokens old are quantized. The others and the
    first `sinks` stay in full precision. With `rotate` heads are rotated by a Hadamard matrix first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: QuantFormat = "dense"
    keys: QuantFormat | None = None  # None is as `format`
    values: QuantFormat | None = None  # None is as `format`
    group: Annotated[int, Field(ge=8, multiple_of=8)] = 64
    columns: Annotated[int, Field(ge=8, multiple_of=8)] = 64  # the whole head where it is narrower
    residual: Count = 64
    sinks: Annotated[int, Field(ge=0)] = 0
    rotate: bool = False

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
        keys, values = self.key_value_formats
        return keys if keys == values else f"{keys} keys, {values} values"


class LayerFormatOverride(BaseModel):
    """Overrides for one layer; None is as in the other layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: QuantFormat | None = None
    keys: QuantFormat | None = None
    values: QuantFormat | None = None
    group: Annotated[int, Field(ge=8, multiple_of=8)] | None = None
    columns: Annotated[int, Field(ge=8, multiple_of=8)] | None = None
    residual: Count | None = None
    sinks: Annotated[int, Field(ge=0)] | None = None
    rotate: bool | None = None


class CacheFormat(LayerFormat):
    """The format of all layers, with overrides by layer index. `dtype` is the type of what is not quantized; `auto` is
    the model's."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    layers: dict[Annotated[int, Field(ge=0)], LayerFormatOverride] = {}

    def for_layer(self, layer: int) -> LayerFormat:
        """Return the format of one layer. An override with a `format` takes over neither `keys` nor `values`."""
        mine = {name: getattr(self, name) for name in LayerFormat.model_fields}
        change = self.layers.get(layer)
        if change is not None:
            if change.format is not None:
                mine |= {"keys": None, "values": None}
            mine |= change.model_dump(exclude_none=True)
        if mine["rotate"] and {mine["keys"] or mine["format"], mine["values"] or mine["format"]} == {"dense"}:
            mine["rotate"] = False  # a dense layer has nothing to rotate
        return LayerFormat(**mine)

    def check(self, layers: int, page_size: int) -> None:
        """Refuse layers that the model does not have, and groups that do not divide pages (WorkbenchError)."""
        if wrong := [index for index in self.layers if index >= layers]:
            raise WorkbenchError(f"cache.layers: no layer {wrong[0]}; the model has layers 0..{layers - 1}")
        for index in range(layers):
            mine = self.for_layer(index)
            if mine.quantized and page_size % mine.group:
                raise WorkbenchError(
                    f"cache.group: groups of {mine.group} tokens do not divide pages of {page_size}; "
                    f"set cache.page_size to a multiple, or a smaller cache.group"
                )


def parse_cache_format(given: str | Mapping[str, Any] | CacheFormat) -> CacheFormat:
    """Parse a format's name, settings, or a CacheFormat, as given to `load(cache=...)`."""
    if isinstance(given, CacheFormat):
        return given
    if isinstance(given, str):
        if given not in FORMATS:
            known = ", ".join(FORMATS)
            raise WorkbenchError(f"unknown cache format {given!r}{nearest(given, FORMATS)}; known: {known}")
        return CacheFormat(format=given)
    try:
        return CacheFormat.model_validate(dict(given))
    except ValidationError as error:
        raise explain(error, "cache", CacheFormat) from None
