"""Settings that change a model's attention: for all layers, by a pattern, or for single layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from workbench.errors import WorkbenchError, explain
from workbench.model.attention_spec import AttentionSpec
from workbench.settings import Count, NonNegative, optional_fields

HeadSharing = Literal["multi_head", "multi_query"]  # as many key/value heads as query heads; one for all
WINDOW, FULL = "window", "full"


# Slots of a spec that are fixed by its weights.
FIXED_SLOTS = ("kind", "value_norm", "qkv_clip", "rotated_columns", "qkv_bias", "o_proj_bias", "output_gate")


class AttentionChange(optional_fields(AttentionSpec, without=FIXED_SLOTS)):
    """A change of one layer's attention settings (see `AttentionSpec`); null leaves the model's own value."""

    # key/value heads; a trained model's are pooled or repeated, see `regroup`
    num_kv_heads: Count | HeadSharing | None = None
    sliding_window: Count | Literal["full"] | None = None  # tokens that a query sees, itself included; full: all
    qk_norm: bool | None = None  # normalize queries and keys head by head
    # The layer with the keys and values to read; previous: the last earlier layer that has its own.
    kv_shared_with: NonNegative | Literal["previous"] | None = None

    @model_validator(mode="after")
    def _nothing_is_idle(self) -> AttentionChange:
        given = self.given
        if self.sliding_window == FULL and (sinks := given.get("num_sink_tokens")):
            raise ValueError(f"num_sink_tokens: {sinks} has no effect with sliding_window: full; give one only")
        if "rotary" in given and (position := given.get("position")) in ("alibi", "none"):
            raise ValueError(f"rotary: has no effect with position: {position}; give one only")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """Return the changed settings by name."""
        values = {name: getattr(self, name) for name in AttentionChange.model_fields}
        return {name: value for name, value in values.items() if value is not None}

    def on_top_of(self, other: AttentionChange) -> AttentionChange:
        """Return this change merged over `other`: its values take precedence, and values of `other` that would then
        have no effect are left out.
        """
        below, mine = other.given, self.given
        if self.sliding_window == FULL:
            below = {name: value for name, value in below.items() if name not in ("num_sink_tokens", "chunk_size")}
        if mine.get("position") in ("alibi", "none"):
            below.pop("rotary", None)
        return AttentionChange(**{**below, **mine})


class AttentionConfig(AttentionChange):
    """Changes of attention settings for all layers, and exceptions for some layers.

    `pattern` is repeated over the layers, from the first on: `window` applies the change, `full` applies it without its
    window or chunks, any other word adds the kind of that name. `layers` changes single layers, by number, last of all.
    """

    regroup: Literal["mean_pool", "first"] = "mean_pool"  # how a trained model's key/value heads are reduced
    pattern: tuple[str, ...] = ()  # kinds of layers from the first on, repeated: window, full or a name in `kinds`
    kinds: dict[str, AttentionChange] = {}  # changes by name, for the pattern
    layers: dict[int, AttentionChange] = {}  # changes of single layers, by number

    @model_validator(mode="after")
    def _pattern_is_known(self) -> AttentionConfig:
        known = (WINDOW, FULL, *self.kinds)
        for word in self.pattern:
            if word not in known:
                raise ValueError(f"pattern: {word!r} is not a kind of layer; known: {', '.join(known)}")
        if WINDOW in self.pattern and WINDOW not in self.kinds and not isinstance(self.sliding_window, int):
            raise ValueError("pattern: `window` needs a window in tokens, for example sliding_window: 128")
        if unused := [name for name in self.kinds if name not in self.pattern]:
            raise ValueError(f"kinds: {unused[0]!r} does not occur in the pattern")
        return self

    @classmethod
    def parse(cls, value: AttentionConfig | dict[str, Any] | None) -> AttentionConfig:
        """Parse the setting `attention`; an invalid value raises WorkbenchError with the value's path."""
        if value is None or isinstance(value, AttentionConfig):
            return value or cls()
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise explain(error, "attention", cls) from None

    def layer_changes(self, count: int) -> Iterator[AttentionChange]:
        """Yield the change of each of `count` layers."""
        if beyond := [index for index in self.layers if not 0 <= index < count]:
            raise WorkbenchError(f"attention.layers: there is no layer {beyond[0]}; the model has 0 to {count - 1}")
        plain = AttentionChange(**self.given)
        full = AttentionChange(**{"sliding_window": FULL, "num_sink_tokens": 0}).on_top_of(plain)
        kinds = {WINDOW: plain, FULL: full} | {name: kind.on_top_of(plain) for name, kind in self.kinds.items()}
        for index in range(count):
            change = kinds[self.pattern[index % len(self.pattern)]] if self.pattern else plain
            yield self.layers[index].on_top_of(change) if index in self.layers else change

    @property
    def is_unchanged(self) -> bool:
        return not (self.given or self.pattern or self.layers)
