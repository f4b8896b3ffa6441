"""Changes to a model's attention as a value: for all layers, by a pattern, or for single ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from workbench.errors import WorkbenchError, explain
from workbench.model.attention_spec import QueryTemperature, RotaryConfig
from workbench.request import CustomPart
from workbench.settings import Count, Settings

HeadSharing = Literal["multi_head", "multi_query"]  # as many key/value heads as query heads; one for all
WINDOW, FULL = "window", "full"


class AttentionChange(Settings):
    """Slots of one layer's attention (see `AttentionSpec`); null leaves the model's own."""

    num_kv_heads: Count | HeadSharing | None = (
        None  # key/value heads; a trained model's are pooled or repeated, see `regroup`
    )
    num_heads: Count | None = None  # of random weights only: a trained model's are what they are
    head_dim: Annotated[int, Field(ge=2)] | None = None  # numbers a head; of random weights only
    sliding_window: Count | Literal["full"] | None = None  # tokens that a query sees, itself included; full: all
    # first tokens of a text that every query sees, beside its window
    num_sink_tokens: Annotated[int, Field(ge=0)] | None = None
    chunk_size: Count | None = None  # a query sees its own chunk of so many tokens alone
    temperature: QueryTemperature | None = None  # queries are scaled by their position, for long contexts
    # scores stay within +- this: cap * tanh(score / cap); 0 is off
    softcap: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    # scores are multiplied by it; usually 1 / sqrt(head_dim)
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    qk_norm: bool | None = None  # queries and keys are normalized head by head
    position: Literal["rotary", "alibi", "none"] | None = None  # how attention knows where tokens stand
    rotary: RotaryConfig | None = None  # frequencies by which heads are rotated, and how they are stretched
    sink_logits: bool | None = None  # a learned logit for each head that takes probability from all tokens
    # The layer whose keys and values are read; previous: the last one before it that has its own.
    kv_shared_with: Annotated[int, Field(ge=0)] | Literal["previous"] | None = None
    mask: CustomPart | None = None  # user-defined: which keys a query sees
    score: CustomPart | None = None  # user-defined: changes the scores before softmax
    pages: CustomPart | None = None  # user-defined: which pages of the cache a decode reads
    module: CustomPart | None = None  # user-defined, in place of the layer's attention

    @field_validator("mask", "score", "pages", "module", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _nothing_is_idle(self) -> AttentionChange:
        if self.sliding_window == FULL and self.num_sink_tokens:
            message = f"num_sink_tokens: {self.num_sink_tokens} with sliding_window: full keeps nothing in sight"
            raise ValueError(f"{message} that is not; give one only")
        if self.rotary is not None and self.position in ("alibi", "none"):
            raise ValueError(f"rotary: rotates no heads with position: {self.position}; give one only")
        return self

    def on_top_of(self, other: AttentionChange) -> AttentionChange:
        """Return this change on top of `other`, without those of its values that would have no effect."""
        below, mine = _given(other), _given(self)
        if self.sliding_window == FULL:
            below = {name: value for name, value in below.items() if name not in ("num_sink_tokens", "chunk_size")}
        if self.position in ("alibi", "none"):
            below.pop("rotary", None)
        return AttentionChange(**{**below, **mine})


class AttentionConfig(AttentionChange):
    """The slots for all layers, and where they differ:

    `pattern` is repeated over the layers, from the first on: `window` takes the change as it is, `full` without its
    window or chunks, any other word the kind of that name on top of it. `layers` changes single ones, by number, last
    of all.
    """

    regroup: Literal["mean_pool", "first"] = "mean_pool"  # how fewer key/value heads come from a trained model's
    pattern: tuple[str, ...] = ()  # kinds of the layers, from the first on, repeated: window, full or a name in kinds
    kinds: dict[str, AttentionChange] = {}  # changes by name, for the pattern
    layers: dict[int, AttentionChange] = {}  # changes of single layers, by number

    @model_validator(mode="after")
    def _pattern_is_known(self) -> AttentionConfig:
        known = (WINDOW, FULL, *self.kinds)
        for word in self.pattern:
            if word not in known:
                raise ValueError(f"pattern: {word!r} is no kind of layer; known: {', '.join(known)}")
        if WINDOW in self.pattern and WINDOW not in self.kinds and not isinstance(self.sliding_window, int):
            raise ValueError("pattern: `window` needs a window in tokens, for example sliding_window: 128")
        if unused := [name for name in self.kinds if name not in self.pattern]:
            raise ValueError(f"kinds: {unused[0]!r} does not occur in the pattern")
        return self

    @classmethod
    def parse(cls, value: AttentionConfig | dict[str, Any] | None) -> AttentionConfig:
        """Parse a setting. Raises WorkbenchError for an invalid one, by its path."""
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
        plain = AttentionChange(**{name: value for name, value in _given(self).items() if name in CHANGEABLE})
        full = AttentionChange(sliding_window=FULL, num_sink_tokens=0).on_top_of(plain)
        kinds = {WINDOW: plain, FULL: full} | {name: kind.on_top_of(plain) for name, kind in self.kinds.items()}
        for index in range(count):
            change = kinds[self.pattern[index % len(self.pattern)]] if self.pattern else plain
            yield self.layers[index].on_top_of(change) if index in self.layers else change

    @property
    def is_unchanged(self) -> bool:
        return not (any(name in CHANGEABLE for name in _given(self)) or self.pattern or self.layers)


CHANGEABLE = tuple(AttentionChange.model_fields)


def _given(change: AttentionChange) -> dict[str, Any]:
    return {name: value for name in type(change).model_fields if (value := getattr(change, name)) is not None}
