"""Shard a model's parameters over ranks, and derive the architecture of each shard (Shoeybi et al., 2019).

    x -> qkv (rows of whole heads) -> attention -> output (columns) -> sum over ranks
      -> gate | up (rows) -> activation -> down (columns)           -> sum over ranks

Queries, keys, values, gate and up are sections of a fused matrix, and each is cut by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec, MLASpec
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import BESIDE, WeightFormat
from workbench.model.recurrent.spec import RecurrentSpec
from workbench.model.spec import LayerSpec, ModelSpec


class Section(NamedTuple):
    """A range of a parameter's axis that is cut into `num_shards` shards. If there are fewer shards than ranks,
    neighbouring ranks hold the same shard.
    """

    size: int
    num_shards: int

    def bounds(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return (start, end) of a rank's shard: its first index, and the index after its last."""
        shard = rank * self.num_shards // ranks
        return self.size * shard // self.num_shards, self.size * (shard + 1) // self.num_shards


@dataclass(frozen=True)
class Cut:
    """The way in which one parameter is divided over ranks: the sections of `axis` are cut one by one; with axis None,
    every rank holds the whole parameter.

    With `added_once`, rank 0 holds the parameter and other ranks hold zeros: for the bias of a product that is summed
    over ranks.
    """

    axis: int | None = None
    sections: tuple[Section, ...] = ()
    added_once: bool = False


WHOLE, ADDED_ONCE = Cut(), Cut(added_once=True)


def cuts_of(spec: ModelSpec, ranks: int) -> dict[str, Cut]:
    """Return the cut of every parameter of `parameter_shapes(spec)`. Norms, routers and positions are not divided."""
    vocabulary = Cut(0, (Section(spec.vocab_size, ranks),))
    found = dict.fromkeys(parameter_shapes(spec), WHOLE)
    found |= {name: vocabulary for name in ("embedding.weight", "head.weight", "head.bias") if name in found}
    for index, layer in enumerate(spec.layers):
        for module, cuts in (("attention", _attention(layer, ranks)), ("feedforward", _feedforward(layer, ranks))):
            for name, cut in cuts.items():
                if (path := f"blocks.{index}.{module}.{name}") in found:
                    found[path] = cut
    return found


def _attention(layer: LayerSpec, ranks: int) -> dict[str, Cut]:
    a = layer.attention
    out = {"output.weight": Cut(1, (Section(a.o_proj_inputs, ranks),)), "output.bias": ADDED_ONCE}
    if isinstance(a, MLASpec):
        queries, heads = Cut(0, (Section(a.query_columns, ranks),)), Cut(0, (Section(a.num_heads, ranks),))
        down = WHOLE if a.q_lora_rank is not None else Cut(0, (Section(a.query_columns, ranks), Section(a.head_dim, 1)))
        return out | {"down.weight": down, "down.bias": down, "query_up.weight": queries, "up": heads}
    assert isinstance(a, AttentionSpec)
    kv_shards = min(ranks, a.num_kv_heads)
    queries, keys = Section(a.num_heads * a.head_dim, ranks), Section(a.num_kv_heads * a.head_dim, kv_shards)
    qkv = Cut(0, (queries,) * (1 + a.output_gate) + (keys,) * (2 if a.kv_shared_with is None else 0))
    found = out | {"qkv.weight": qkv, "qkv.bias": qkv, "sink_logits": Cut(0, (Section(a.num_heads, ranks),))}
    if a.qk_norm is not None and a.qk_norm.over == "projection":
        found |= {"query_norm.weight": Cut(0, (queries,)), "key_norm.weight": Cut(0, (keys,))}
    elif a.qk_norm is not None and a.qk_norm.weight == "per_head":
        for kind in ("weight", "bias"):
            found[f"query_norm.{kind}"] = Cut(0, (Section(a.num_heads, ranks),))
            found[f"key_norm.{kind}"] = Cut(0, (Section(a.num_kv_heads, kv_shards),))
    return found


def _feedforward(layer: LayerSpec, ranks: int) -> dict[str, Cut]:
    intermediate = Section(layer.intermediate_size, ranks)
    if layer.experts is None:
        rows = Cut(0, (intermediate,) * (1 + layer.activation.gated))
        names = ("gate_up.weight", "gate_up.bias", "up.weight", "up.bias")
        return dict.fromkeys(names, rows) | {"down.weight": Cut(1, (intermediate,)), "down.bias": ADDED_ONCE}
    experts = Cut(0, (Section(layer.experts.num_experts, ranks),))
    shared = Section(layer.experts.shared_intermediate_size or 0, ranks)
    return dict.fromkeys(("gate_up", "down", "gate_up_bias", "down_bias"), experts) | {
        "shared.gate_up.weight": Cut(0, (shared, shared)),
        "shared.down.weight": Cut(1, (shared,)),
    }


def cut_tensor(tensor: Tensor, cut: Cut, rank: int, ranks: int) -> Tensor:
    """Return a rank's shard of a stored tensor: of a dense matrix, of quantized codes, or of their scales and minima.

    Codes and scales have fewer entries on the cut axis than the matrix has columns: a word has eight codes of four
        bits, a group has one scale. A scale for a whole row is copied to every rank.
    """
    if cut.added_once:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if cut.axis is None or cut.axis >= tensor.ndim:
        return tensor
    stored, columns = tensor.shape[cut.axis], sum(section.size for section in cut.sections)
    shards, begin = [], 0
    for section in cut.sections:
        first, end = section.bounds(rank, ranks)
        low, high = ((begin + bound) * stored for bound in (first, end))
        if low % columns or high % columns:
            raise WorkbenchError(f"columns {begin + first} to {begin + end} of {columns} are not whole groups")
        shards.append(tensor.narrow(cut.axis, low // columns, (high - low) // columns))
        begin += section.size
    if len(shards) > 1:
        return torch.cat(shards, dim=cut.axis)
    return shards[0].clone(memory_format=torch.contiguous_format)


def cut_state(state: dict[str, Tensor], spec: ModelSpec, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return a rank's shard of each parameter in `state`, which may have only some parameters; `spec` is that of the
    whole model. Quantized parameters are cut in stored form, so no value changes.
    """
    cuts = cuts_of(spec, ranks)
    cuts.setdefault("head.weight", cuts["embedding.weight"])  # a quantized tied embedding is stored as the head
    return {name: cut_tensor(tensor, cuts[_matrix_of(name)], rank, ranks) for name, tensor in state.items()}


def _matrix_of(name: str) -> str:
    """Return the parameter's name for a stored tensor: scales and minima are cut like their parameter."""
    for beside in BESIDE:
        if name.endswith(f".{beside}"):
            return name.removesuffix(beside) + "weight"
        if name.endswith(f"_{beside}"):
            return name.removesuffix(f"_{beside}")
    return name


def spec_of_rank(spec: ModelSpec, rank: int, ranks: int) -> ModelSpec:
    """Return the architecture of a rank's shard: its numbers of heads, columns, experts and vocabulary tokens."""
    first, end = Section(spec.vocab_size, ranks).bounds(rank, ranks)
    layers = tuple(_layer_of_rank(layer, rank, ranks) for layer in spec.layers)
    return ModelSpec.model_validate(dict(spec) | {"layers": layers, "vocab_size": end - first})


def _layer_of_rank(layer: LayerSpec, rank: int, ranks: int) -> LayerSpec:
    a, experts = layer.attention, layer.experts
    heads: dict[str, Any] = {"num_heads": a.num_heads // ranks} if isinstance(a, AttentionSpec | MLASpec) else {}
    if isinstance(a, AttentionSpec):
        heads["num_kv_heads"] = max(1, a.num_kv_heads // ranks)
    changes: dict[str, Any] = {"attention": type(a).model_validate(dict(a) | heads)}
    if experts is None:
        changes["intermediate_size"] = layer.intermediate_size // ranks
    else:
        shared = experts.shared_intermediate_size
        held = Section(experts.num_experts, ranks).bounds(rank, ranks)
        changes["experts"] = experts.model_validate(
            dict(experts) | {"held": held, "shared_intermediate_size": shared and shared // ranks}
        )
    return LayerSpec.model_validate(dict(layer) | changes)


def check_ranks(spec: ModelSpec, format: WeightFormat, ranks: int, setting: str = "parallel.tensor") -> None:
    """Check that a model with this weight format can be cut over `ranks` ranks, the value of `setting`.

    Raises:
        WorkbenchError: names the parameter that cannot be cut, and the possible numbers of ranks.
    """
    if (problem := problem_of_ranks(spec, format, ranks)) is None:
        return
    most = max(getattr(layer.attention, "num_heads", 1) for layer in spec.layers)
    fitting = [str(count) for count in range(2, most + 1) if problem_of_ranks(spec, format, count) is None]
    remedy = f"numbers of ranks that fit: {', '.join(fitting)}" if fitting else "no number of ranks fits; leave it out"
    raise WorkbenchError(f"{setting}: {ranks} ranks cannot share {spec.name}: {problem}; {remedy}")


def problem_of_ranks(spec: ModelSpec, format: WeightFormat, ranks: int) -> str | None:
    """Return why a model cannot be divided over `ranks` ranks; None if it can."""
    if spec.altup is not None:
        return "residual streams cannot be split"
    if stacked := next((name for name, rows in format.own if len(rows) > 1), None):
        return f"parts of {stacked} are stored in several formats; model.weights: dense widens them"
    for index, layer in enumerate(spec.layers):
        if problem := _problem_of_layer(layer, format, ranks):
            return f"layer {index}: {problem}"
    return None


def _problem_of_layer(layer: LayerSpec, format: WeightFormat, ranks: int) -> str | None:
    a, experts = layer.attention, layer.experts
    if isinstance(a, RecurrentSpec) or layer.beside is not None:
        return "recurrent layers cannot be split"
    if isinstance(a, AttentionSpec) and a.module is not None:
        return "a custom attention module cannot be split"
    if layer.activation.sparsity:
        return "an activation that reads all columns of the gate (sparsity) cannot be split"
    sizes = {"num_heads": a.num_heads}
    if experts is None:
        sizes["intermediate_size"] = layer.intermediate_size
    else:
        sizes |= {"num_experts": experts.num_experts, "shared_intermediate_size": experts.shared_intermediate_size or 0}
    for name, size in sizes.items():
        if size % ranks:
            return f"its {name} of {size} is not a multiple of {ranks}"
    kv_heads = a.num_kv_heads
    if isinstance(a, AttentionSpec) and kv_heads % ranks and ranks % kv_heads:
        return f"its num_kv_heads of {kv_heads} is neither a multiple nor a divisor of {ranks}"
    columns = {"heads x dim": a.o_proj_inputs}
    columns |= {"intermediate_size": layer.intermediate_size} if experts is None else {}
    columns |= {"shared_intermediate_size": shared} if experts and (shared := experts.shared_intermediate_size) else {}
    units = sorted(((each.unit, str(each)) for each in format.of_blocks if each.unit), reverse=True)
    for name, size in columns.items():
        if found := next(((unit, stored) for unit, stored in units if size // ranks % unit), None):
            unit, stored = found
            held = f"a rank's {size // ranks} columns of its {name}"
            return f"{held} are not whole groups of {unit} ({stored})"
    return None
