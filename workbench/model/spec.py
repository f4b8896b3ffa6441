"""A model's architecture as data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.model.latent_spec import LatentAttention
from workbench.model.rotary_spec import Rotary, Value
from workbench.model.rotary_spec import RotaryScaling as RotaryScaling
from workbench.request import UserPart
from workbench.shown import Shown, Table, differing, ranges, short


class Attention(Value):
    """One layer's attention as slots: `num_heads` query heads read `num_kv_heads` key/value heads of width `head_dim`.

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
    qk_norm: bool = False  # root-mean-square norm of each query and key head before rotary (Qwen 3, Gemma 3)
    position: Literal["rotary", "alibi", "none"] = "rotary"
    rotary: Rotary | None = None  # None is the model's
    sink_logits: bool = False
    mask: UserPart | None = None  # custom: (query, key) positions -> seen
    score: UserPart | None = None  # custom: (score, head, query, key) -> score
    module: UserPart | None = None  # custom attention module
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

    @property
    def cached(self) -> int:
        """Return how many numbers a token leaves in the cache."""
        return 2 * self.groups * self.dim

    @property
    def turned(self) -> int:
        """Return the columns of a head that rotary rotates."""
        return self.dim if self.position == "rotary" else 0

    @property
    def mixed(self) -> int:
        """Return the columns that the output projection reads."""
        return self.heads * self.dim

    def matrices(self, width: int) -> int:
        """Return the number of parameters in its matrices, in a model of that width."""
        return width * (2 * self.heads + 2 * self.groups) * self.dim

    def vectors(self, width: int) -> int:
        """Return the number of its other parameters: biases, norms, sink logits."""
        biases = (self.heads + 2 * self.groups) * self.dim * self.input_bias + width * self.output_bias
        return biases + 2 * self.dim * self.qk_norm + self.heads * self.sink_logits


AnyAttention = Annotated[Attention | LatentAttention, Field(discriminator="kind")]


class Gate(Value):
    """The function that joins the two halves of a gated feed-forward: silu(gate) up (Shazeer, 2020), gelu(gate) up
    with the tanh form (Gemma), or `clamped`: g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within ±limit
    (gpt-oss, 2025)."""

    kind: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.702
    limit: Annotated[float, Field(gt=0)] = 7.0


class Experts(Value):
    """A mixture of `num_experts` feed-forwards: each token takes the `num_experts_per_tok` of highest score, by the
    softmax of these."""

    count: Annotated[int, Field(ge=1)]
    used: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _enough(self) -> Experts:
        if self.used > self.count:
            raise ValueError(f"a token cannot use {self.used} experts of {self.count}")
        return self


class LayerKind(Value):
    """One layer: attention, then a gated feed-forward of width `intermediate_size`, or a mixture of such."""

    attention: AnyAttention
    hidden: Annotated[int, Field(ge=1)]
    feedforward_bias: bool = False
    gate: Gate = Gate()
    experts: Experts | None = None
    post_norms: bool = False  # what attention and feed-forward give is normed before it is added (Gemma 2)

    @property
    def feedforward_matrices(self) -> tuple[int, int]:
        """Return the parameters of feed-forward matrices for each column of the hidden size: of all experts, and of
        those a token uses."""
        one = 3 * self.hidden
        if self.experts is None:
            return one, one
        router = self.experts.count
        return self.experts.count * one + router, self.experts.used * one + router


class ModelSpec(Shown, Value):
    """A model's architecture as data. Two specs that are equal are the same architecture."""

    name: str
    vocab: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    layers: tuple[LayerKind, ...]
    context: Annotated[int, Field(ge=1)]  # positions the model was made for
    rotary: Rotary = Rotary()
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the norms' weights (Gemma: 1)
    embedding_scale: float = 1.0  # Gemma: the square root of the width
    final_softcap: Annotated[float, Field(ge=0)] = 0.0  # of the logits; 0 is none
    tied: bool = False  # the output head is the embedding
    end_ids: tuple[int, ...] = ()  # tokens that end a text

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return layer indices that share a page table: same window and sinks, heads and width of the cache."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            latent = getattr(attention, "latent", None)  # two may be as wide and be parted otherwise
            kind = attention.window, attention.sinks, attention.groups, attention.dim, attention.cached, latent
            groups.setdefault(kind, []).append(index)
        return tuple(tuple(indices) for indices in groups.values())

    @property
    def parameters(self) -> int:
        """Return the number of parameters, from the shapes alone."""
        total = self.vocab * self.width * (1 if self.tied else 2) + self.width
        for layer in self.layers:
            experts = 1 if layer.experts is None else layer.experts.count
            total += layer.attention.matrices(self.width) + self.width * layer.feedforward_matrices[0]
            total += layer.attention.vectors(self.width) + self.width * (4 if layer.post_norms else 2)
            router = 0 if layer.experts is None else experts
            total += (experts * (2 * layer.hidden + self.width) + router) * layer.feedforward_bias
        return total

    def _shown(self) -> Table:
        kinds: list[tuple[LayerKind, list[int]]] = []
        for index, layer in enumerate(self.layers):
            like = next((indices for kind, indices in kinds if kind == layer), None)
            if like is None:
                kinds.append((layer, [index]))
            else:
                like.append(index)
        rows: list[tuple[str, object]] = [("parameters", self.parameters), ("layers", len(self.layers))]
        for kind, indices in kinds:
            where = "each layer" if len(kinds) == 1 else f"layers {ranges(indices)}"
            attention = [f"{name} {short(value)}" for name, value in differing(kind.attention)]
            others = [f"{k} {short(v)}" for k, v in differing(kind) if not k.startswith("attention.")]
            rows.append((where, f"{kind.attention.kind} attention: {', '.join(attention)}; {', '.join(others)}"))
        rows += [(name, value) for name, value in differing(self) if name not in ("name", "layers")]
        return Table(self.name, rows)
