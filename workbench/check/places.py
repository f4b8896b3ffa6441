"""Map the places at which our model and transformers' model compute the same tensor: the modules of both, and the order
of columns.

Modules of transformers are named like their stored tensors, so a family's `CheckpointNames` locate them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from workbench.model.attention_spec import AttentionSpec, MLASpec
from workbench.model.checkpoint_names import CheckpointNames
from workbench.model.model_parameters import stored_parameters
from workbench.model.parameters import RowLayout, StoredParameter
from workbench.model.rotary import rotary_column_order
from workbench.model.spec import LayerSpec, ModelSpec

Side = Literal["in", "out"]


@dataclass(frozen=True)
class Place:
    """A tensor that both models compute: the input or output of a module.

    Args:
        layer: the layer's number; None outside of the layers.
        module: description of the module.
        ours: the name of our module.
        theirs: names of their modules; their outputs are joined along columns.
        side: `in` for the module's input, `out` for its output.
        columns: for each of our columns the index of theirs; None if the order is the same.
        heads: number of heads of the tensor; 0 for rows not cut into heads.
    """

    layer: int | None
    module: str
    ours: str
    theirs: tuple[str, ...]
    side: Side = "out"
    columns: tuple[int, ...] | None = None
    heads: int = 0

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}, "
        return f"{where}{self.module}, what goes {'into' if self.side == 'in' else 'out of'} {self.ours}"


def places_of(spec: ModelSpec, names: CheckpointNames, theirs: nn.Module) -> tuple[list[Place], list[Place]]:
    """Return the places of `spec` whose modules exist in `theirs`, a model of transformers, and the places whose
    modules do not."""
    known = set(dict(theirs.named_modules()))
    every = list(_all_places(spec, names))
    found = [place for place in every if known.issuperset(place.theirs)]
    mixtures = [
        Place(index, "mixture of experts", f"blocks.{index}.feedforward", (name,))
        for index, kind in enumerate(spec.layers)
        if kind.experts is not None and (name := mixture_name(names, index, known)) is not None
    ]
    return found + mixtures, [place for place in every if place not in found]


def mixture_name(names: CheckpointNames, layer: int, known: set[str]) -> str | None:
    """Return the name of transformers' module that chooses and runs the experts of a layer; None if there is none."""
    found = [name for name in known if name.startswith(f"{names.layer}.{layer}.") and name.endswith(".experts")]
    return found[0].removesuffix(".experts") if len(found) == 1 else None


def _all_places(spec: ModelSpec, names: CheckpointNames) -> Iterator[Place]:
    parameters = stored_parameters(spec, names)
    before = "embedding"
    for index, kind in enumerate(spec.layers):
        ours, theirs = f"blocks.{index}", f"{names.layer}.{index}"
        if spec.altup is None:  # theirs stacks the streams, ours concatenates them
            # The input of a layer was computed by the layer before it.
            yield Place(index - 1 if index else None, before, ours, (theirs,), "in")
        yield from _layer(index, kind, ours, f"{theirs}.", names, parameters)
        before = "sum of the layer's parts"
    last = len(spec.layers) - 1
    yield Place(last, before, "norm", (names.norm,), "in")
    yield Place(None, "last norm", "norm", (names.norm,))


def _layer(
    index: int, kind: LayerSpec, ours: str, theirs: str, names: CheckpointNames, parameters: dict[str, StoredParameter]
) -> Iterator[Place]:
    entering = "attention norm" if kind.norms != "post" else "entry of the layer"
    if kind.norms != "post":
        yield Place(index, "attention norm", f"{ours}.attention_norm", (theirs + names.attention_norm,))
    mixer = "attention"
    if isinstance(kind.attention, MLASpec):
        yield from _latent(index, f"{ours}.attention", parameters)
    elif isinstance(kind.attention, AttentionSpec):
        yield from _grouped(index, kind.attention, entering, ours, theirs, names, parameters)
    else:
        mixer = "recurrent layer"
        if f"{ours}.attention.input.weight" in parameters:
            yield from _linear(index, entering, "input projections", f"{ours}.attention.input", parameters)
    yield from _linear(index, mixer, "output projection", f"{ours}.attention.output", parameters)
    if kind.beside is not None:
        yield from _linear(index, entering, "input projections", f"{ours}.recurrent.input", parameters)
        yield from _linear(index, "recurrent layer", "its output projection", f"{ours}.recurrent.output", parameters)
    if not kind.intermediate_size:
        return
    if kind.norms != "pre":
        post = theirs + names.attention_post_norm
        yield Place(index, "norm after attention", f"{ours}.attention_post_norm", (post,))
    if kind.norms != "post" and kind.parallel != "one_norm":
        norm = f"{ours}.feedforward_norm", (theirs + names.feedforward_norm,)
        yield Place(index, "sum after attention" if kind.parallel == "no" else "entry of the layer", *norm, "in")
        yield Place(index, "feed-forward norm", *norm)
    if kind.experts is None:
        first = "gate_up" if kind.activation.gated else "up"
        words = "gate and up projections" if kind.activation.gated else "up projection"
        entering = "feed-forward norm" if kind.norms != "post" else "sum after attention"
        entering = "attention norm" if kind.parallel == "one_norm" else entering
        yield from _linear(index, entering, words, f"{ours}.feedforward.{first}", parameters)
        yield from _linear(index, "activation", "down projection", f"{ours}.feedforward.down", parameters)
    elif kind.experts.shared_intermediate_size:
        yield from _linear(index, "activation of the shared expert", "down projection of the shared expert",
                           f"{ours}.feedforward.shared.down", parameters)  # fmt: skip
    if kind.norms != "pre":
        post = theirs + names.feedforward_post_norm
        yield Place(index, "norm after the feed-forward", f"{ours}.feedforward_post_norm", (post,))


def _grouped(
    index: int, a: AttentionSpec, entering: str, ours: str, theirs: str, names: CheckpointNames,
    parameters: dict[str, StoredParameter],
) -> Iterator[Place]:  # fmt: skip
    yield from _linear(index, entering, "query, key and value projections", f"{ours}.attention.qkv", parameters)
    if a.qk_norm is None:
        return
    order = tuple(range(a.head_dim))
    if a.position == "rotary":
        order = tuple(rotary_column_order(a.head_dim, a.rotary_dim, names.interleaved))
    for name, words, stored, heads in (
        ("query_norm", "norm of queries", names.query_norm, a.num_heads),
        ("key_norm", "norm of keys", names.key_norm, a.num_own_kv_heads),
    ):
        if not heads:
            continue  # it shares another layer's keys
        yield Place(index, words, f"{ours}.attention.{name}", (theirs + stored,), "out", order, heads)


def _latent(index: int, ours: str, parameters: dict[str, StoredParameter]) -> Iterator[Place]:
    yield from _linear(index, "attention norm", "projections to the latents", f"{ours}.down", parameters)
    for name, words in (("query_norm", "norm of the queries' latent"), ("latent_norm", "norm of the latent")):
        if stored := parameters.get(f"{ours}.{name}.weight"):
            yield Place(index, words, f"{ours}.{name}", _modules(stored))
    if f"{ours}.query_up.weight" in parameters:
        yield from _linear(index, "norm of the queries' latent", "query projection", f"{ours}.query_up", parameters)


def _linear(index: int, before: str, words: str, ours: str, parameters: dict[str, StoredParameter]) -> Iterator[Place]:
    """Yield the places of a matrix product's input and output."""
    parameter = parameters[f"{ours}.weight"]
    columns: list[int] = []
    for part in parameter.parts:
        size = part.shape_here[0]
        rows = part.layout.rows if isinstance(part.layout, RowLayout) else range(size)
        start = len(columns)
        columns += [start + row for row in rows]
    same = columns == list(range(len(columns)))
    modules = _modules(parameter)
    yield Place(index, before, ours, modules[:1], "in")
    yield Place(index, words, ours, modules, "out", None if same else tuple(columns))


def _modules(parameter: StoredParameter) -> tuple[str, ...]:
    return tuple(part.name.removesuffix(".weight") for part in parameter.parts)
