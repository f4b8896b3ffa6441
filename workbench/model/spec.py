"""A model's architecture as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
    """One layer's attention: `heads` query heads read `groups` key/value heads of width `dim`."""

    heads: Annotated[int, Field(ge=1)]
    groups: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=2)]
    window: Annotated[int, Field(ge=1)] | None = None  # in tokens; None sees the whole context
    input_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False

    @model_validator(mode="after")
    def _grouped(self) -> Attention:
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} query heads cannot share {self.groups} key/value heads evenly")
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
        """Layer indices that share a page table: same window, heads and width of the cache."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            groups.setdefault((attention.window, attention.groups, attention.dim), []).append(index)
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
