"""The shares of ranks are the model when put together, and their products add up to the model's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels.linear.matrix_format import MatrixFormat
from tests.tensor_parallel.bound import allowed
from tests.tensor_parallel.in_threads import logits_of_ranks
from tests.tensor_parallel.specs import DENSE, SHARED, TEXT, weights
from workbench.errors import WorkbenchError
from workbench.model.attention_spec import AttentionSpec
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import WeightFormat, quantize
from workbench.model.recurrent.spec import ShortConvSpec
from workbench.model.shapes import named_shape
from workbench.model.spec import ActivationSpec, ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import CustomPart
from workbench.tensor_parallel.cut import Cut, Section, check_ranks, cut_state, cut_tensor, cuts_of, spec_of_rank

OWN_MODULE = CustomPart(path="workbench.model.layers:Attention")


def put_together(parts: list[Tensor], cut: Cut) -> Tensor:
    """Return the parameter that ranks hold parts of, section by section; what several hold must be equal."""
    if cut.added_once:
        return torch.stack(parts).sum(0)
    if cut.axis is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    widths = [section.size // section.num_shards for section in cut.sections]
    whole = []
    for place, section in enumerate(cut.sections):
        copies = len(parts) // section.num_shards
        own = [part.split(widths, cut.axis)[place] if len(widths) > 1 else part for part in parts]
        for held in (own[first : first + copies] for first in range(0, len(own), copies)):
            assert all(torch.equal(copy, held[0]) for copy in held)
            whole.append(held[0])
    return torch.cat(whole, cut.axis)


@given(SHARED)
def test_the_parts_of_all_ranks_are_the_parameter_and_what_their_specs_describe(shared: tuple[int, ModelSpec]) -> None:
    size, spec = shared
    state = weights(spec, torch.float32)
    parts = [cut_state(state, spec, rank, size) for rank in range(size)]
    for name, cut in cuts_of(spec, size).items():
        assert torch.equal(put_together([part[name] for part in parts], cut), state[name]), name
    for rank, part in enumerate(parts):
        described = spec_of_rank(spec, rank, size)
        assert {name: tuple(tensor.shape) for name, tensor in part.items()} == parameter_shapes(described)
        assert described == ModelSpec.model_validate(described.model_dump())
        assert sum(tensor.numel() for tensor in part.values()) == described.num_parameters


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_partial_products_add_up_within_the_bound_of_rounding(size: int, columns: int, rows: int, seed: int) -> None:
    """A sum of n products in any order is within n u / (1 - n u) of |x| |w| (Higham, 2002), u half of eps."""
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(count, size * columns, generator=draw) for count in (3, rows))
    cut = Cut(1, (Section(size * columns, size),))
    parts = [cut_tensor(x, cut, rank, size) @ cut_tensor(w, cut, rank, size).T for rank in range(size)]
    exact = x.double() @ w.double().T
    unit = torch.finfo(torch.float32).eps / 2 * (size * columns + size)
    assert ((sum(parts) - exact).abs() <= unit / (1 - unit) * (x.double().abs() @ w.double().abs().T)).all()


@given(SHARED)
def test_ranks_give_the_logits_of_one_process(shared: tuple[int, ModelSpec]) -> None:
    """In float64, where a mistake is far larger than rounding: errors grow with the unit of rounding, so what float32
    errs against float64, times the ratio of both units, is what float64 errs, on both sides. And in float32, within the
    bound of one process, with its choices where the margin exceeds that."""
    size, spec = shared
    state = weights(spec, torch.float64)
    single = {name: tensor.float() for name, tensor in state.items()}
    exact = Transformer.from_state(spec, dict(state)).logits(TEXT)
    alone = Transformer.from_state(spec, dict(single)).logits(TEXT)
    bound = allowed(alone, exact)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert (logits_of_ranks(spec, state, DENSE, size, TEXT) - exact).abs().max() <= 2 * ratio * bound
    together = logits_of_ranks(spec, single, DENSE, size, TEXT)
    exact = Transformer.from_state(spec, {name: tensor.double() for name, tensor in single.items()}).logits(TEXT)
    bound = allowed(alone, exact)
    assert (together - exact).abs().max() <= bound
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 2 * bound
    assert torch.equal(together.argmax(-1)[clear], alone.argmax(-1)[clear])


WORDS, OTHERS = MatrixFormat.named("q5_1"), MatrixFormat.named("q8_0")
IN_WORDS = WeightFormat(WORDS, OTHERS, own=(("blocks.1.feedforward.gate_up.weight", ((256, OTHERS),)),))


BY_16 = [WeightFormat.parse(kind, quant_group=16) for kind in ("int8", "int4")]


@pytest.mark.parametrize(("format", "size"), [*((each, size) for each in BY_16 for size in (2, 4)), (IN_WORDS, 2)])
def test_quantized_weights_are_cut_as_they_are_stored(format: WeightFormat, size: int) -> None:
    spec = named_shape("tiny")
    state = quantize(weights(spec, torch.float32), spec, format)
    model = Transformer.from_state(spec, dict(state), format=format)
    alone = model.logits(TEXT)
    exact = Transformer.from_state(spec, model.dense_state(torch.float64)).logits(TEXT)
    together = logits_of_ranks(spec, state, format, size, TEXT)
    assert (together - exact).abs().max() <= allowed(alone, exact)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, r"3 ranks cannot share tiny: layer 0: its num_heads of 4 is not a multiple of 3; .* fit: 2, 4"),
        ({"intermediate_size": 126}, 4, r"its intermediate_size of 126 is not a multiple of 4; .* fit: 2$"),
        ({"attention": AttentionSpec(num_heads=12, num_kv_heads=3, head_dim=8)}, 2, "its num_kv_heads of 3 is neither"),
        (
            {"attention": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, module=OWN_MODULE)},
            2,
            "custom attention module",
        ),
        ({"attention": ShortConvSpec(channels=64)}, 2, "recurrent layers cannot be split; no number of ranks fits"),
        ({"activation": ActivationSpec(kind="gelu_tanh", sparsity=0.5)}, 2, r"all columns of the gate \(sparsity\)"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(change: dict, size: int, message: str) -> None:
    spec = named_shape("tiny")
    spec = spec.model_copy(update={"layers": tuple(layer.model_copy(update=change) for layer in spec.layers)})
    with pytest.raises(WorkbenchError, match=message):
        check_ranks(spec, DENSE, size)


def test_a_group_of_quantized_weights_is_never_cut() -> None:
    spec, format = named_shape("tiny"), WeightFormat.parse("int4", quant_group=32)
    check_ranks(spec, format, 2)
    with pytest.raises(WorkbenchError, match=r"16 columns of its heads x dim are not whole groups of 32 .* fit: 2$"):
        check_ranks(spec, format, 4)
    with pytest.raises(WorkbenchError, match=r"16 columns of its heads x dim are not whole groups of 32 \(q8_0\)"):
        check_ranks(spec, IN_WORDS, 4)
    several = WeightFormat(own=(("blocks.0.attention.qkv.weight", ((64, WORDS), (64, OTHERS))),))
    with pytest.raises(WorkbenchError, match="parts of blocks.0.attention.qkv.weight are stored in several formats"):
        check_ranks(spec, several, 2)
    state = quantize(weights(spec, torch.float32), spec, format)
    with pytest.raises(WorkbenchError, match="not whole groups"):
        cut_state(state, spec, 1, 4)
