"""A model's architecture as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.request import UserPart


class Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RotaryScaling(Value):
    """How rotary frequencies are changed for contexts longer than the trained one.

    `linear` divides all of them by `factor`; `llama3` (Llama 3.1) divides only the slow ones, with a smooth
    passage between the wavelengths `original_context / high_factor` and `original_context / low_factor`.
    """

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: Annotated[float, Field(gt=0)] = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_context: int = 8192


class Rotary(Value):
    base: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling = RotaryScaling()


class Attention(Value):
    """One layer's attention as slots: `heads` query heads read `groups` key/value heads of width `dim`.

    scores = scale q k, capped, changed by `score`; keys outside `mask` and the window are not seen; `sink_logits` adds
    one learned logit a head to the softmax's sum (gpt-oss, 2025).
    """

    kind: Literal["grouped"] = "grouped"
    heads: Annotated[int, Field(ge=1)]
    groups: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=2)]
    window: Annotated[int, Field(ge=1)] | None = None  # in tokens; None sees the whole context
    sinks: Annotated[int, Field(ge=0)] = 0  # first tokens that a window keeps in sight (StreamingLLM, 2023)
    softcap: Annotated[float, Field(ge=0)] = 0.0  # c tanh(score / c) (Gemma 2, 2024); 0 is none
    scale: Annotated[float, Field(gt=0)] | None = None  # of the scores; None is dim ** -0.5
    qk_norm: bool = False  # root-mean-square norm of each query and key head before it is turned (Qwen 3, Gemma 3)
    position: Literal["rotary", "alibi", "none"] = "rotary"
    rotary: Rotary | None = None  # None is the model's
    sink_logits: bool = False
    mask: UserPart | None = None  # the user's own: (query, key) positions -> seen
    score: UserPart | None = None  # the user's own: (score, head, query, key) -> score
    module: UserPart | None = None  # the user's own attention module in place of ours
    input_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False

    @model_validator(mode="after")
    def _grouped(self) -> Attention:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} query heads cannot share {self.groups} key/value heads evenly")
        if self.sinks and self.window is None:
            raise ValueError(f"sinks {self.sinks} without a window: the whole context is in sight already")
        return self

    @property
    def share(self) -> int:
        return self.heads // self.groups


class LayerKind(Value):
    """One layer: attention, then a gated feed-forward of width `hidden`."""

    attention: Attention
    hidden: Annotated[int, Field(ge=1)]
    feedforward_bias: bool = False


class ModelSpec(Value):
    """The whole model. Two specs that are equal are the same architecture."""

    name: str
    vocab: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    layers: tuple[LayerKind, ...]
    context: Annotated[int, Field(ge=1)]  # positions the model was made for
    rotary: Rotary = Rotary()
    norm_eps: float = 1e-5
    tied: bool = False  # the output head is the embedding
    end_ids: tuple[int, ...] = ()  # tokens that end a text

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer indices that share a page table: same window and sinks, heads and width of the cache."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            kind = attention.window, attention.sinks, attention.groups, attention.dim
            groups.setdefault(kind, []).append(index)
        return tuple(tuple(indices) for indices in groups.values())

    @property
    def parameters(self) -> int:
        """Parameter count, from the shapes alone."""
        total = self.vocab * self.width * (1 if self.tied else 2) + self.width
        for layer in self.layers:
            a, hidden = layer.attention, layer.hidden
            query, key = a.heads * a.dim, a.groups * a.dim
            total += self.width * (2 * query + 2 * key) + 3 * self.width * hidden + 2 * self.width
            total += (query + 2 * key) * a.input_bias + self.width * a.output_bias
            total += (2 * hidden + self.width) * layer.feedforward_bias
            total += 2 * a.dim * a.qk_norm + a.heads * a.sink_logits
        return total

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{k}</td><td>{v}</td></tr>" for k, v in self.summary().items())
        return f"<table>{rows}</table>"

    def summary(self) -> dict[str, object]:
        """The figures a reader wants first."""
        first = self.layers[0]
        return {
            "name": self.name,
            "parameters": f"{self.parameters:,}",
            "layers": len(self.layers),
            "width": self.width,
            "heads / groups x dim": f"{first.attention.heads} / {first.attention.groups} x {first.attention.dim}",
            "hidden": first.hidden,
            "vocab": self.vocab,
            "context": self.context,
        }
