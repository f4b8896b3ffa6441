"""Whole decode steps through IREE: the eager model's logits, its cache written in place, PTX ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compiled_kernels import Backend, BackendError
from compiled_kernels.mlir import iree, iree_export
from compiled_kernels.mlir.iree_export import iree_problem
from workbench.batch import TokenBatch
from workbench.kv_cache.store import DenseLayer, KVCacheSpec, KVStore
from workbench.model.hf.weights import random_weights
from workbench.model.shapes import named_shape
from workbench.model.transformer import Transformer

pytestmark = pytest.mark.skipif(iree_problem() is not None, reason=iree_problem() or "")
PAGES, SIZE = 2, 8


class DecodeStep(nn.Module):
    """The model for one token of one sequence; the pages are inputs, and are written."""

    def __init__(self, backend: Backend):
        super().__init__()
        spec = named_shape("tiny")
        self.model = Transformer.from_state(spec, random_weights(spec, torch.float32), backend)

    def forward(self, ids: Tensor, positions: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, *pages: Tensor):
        layers = zip(self.model.cache_shapes(), pages[::2], pages[1::2], strict=True)
        store = KVStore((), (), SIZE, torch.float32)
        store.layers = tuple(layer_over(*each) for each in layers)
        starts, rows = torch.arange(2), torch.zeros(1, dtype=torch.long)
        batch = TokenBatch(ids, positions, starts, lengths, (table,), (slots,), rows, True)
        return self.model.compute_logits(self.model.hidden_states(batch, store))


def layer_over(shape: KVCacheSpec, keys: Tensor, values: Tensor) -> DenseLayer:
    layer = DenseLayer(shape, 0, 1, keys.dtype, "cpu")
    layer.keys, layer.values = keys, values
    return layer


def pages() -> list[Tensor]:
    shapes = Transformer.from_state(
        named_shape("tiny"), random_weights(named_shape("tiny"), torch.float32)
    ).cache_shapes()
    return [
        torch.full((PAGES + 1, each.num_kv_heads, SIZE, each.head_dim), torch.nan) for each in shapes for _ in range(2)
    ]


def inputs(token: int, position: int) -> tuple[Tensor, ...]:
    """The pages stand in the other order than their numbers."""
    table = torch.arange(PAGES, 0, -1, dtype=torch.int32)[None]
    slot = int(table[0, position // SIZE]) * SIZE + position % SIZE
    length = torch.tensor([position + 1], dtype=torch.int32)
    return torch.tensor([token]), torch.tensor([position]), table, torch.tensor([slot]), length


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WORKBENCH_CACHE_DIR", str(folder))
        yield folder / "mlir"


@pytest.fixture(scope="module")
def module() -> DecodeStep:
    return DecodeStep(Backend.INDUCTOR)


@pytest.fixture(scope="module")
def step(module: DecodeStep) -> iree.IreeStep:
    return iree.compile_step(module, (*inputs(0, 0), *pages()), "decode")


@torch.inference_mode()
def test_steps_agree_with_the_eager_model_and_write_its_cache(step: iree.IreeStep) -> None:
    eager, theirs, ours = DecodeStep(Backend.EAGER), pages(), pages()
    addresses = [each.data_ptr() for each in ours]
    tokens = torch.randint(0, 257, (PAGES * SIZE,), generator=torch.Generator().manual_seed(0)).tolist()
    for position, token in enumerate(tokens):
        expected = eager(*inputs(token, position), *theirs)
        got = step(*inputs(token, position), *ours)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert [each.data_ptr() for each in ours] == addresses
    theirs_too, ours_too = pages(), pages()  # other caches, after those
    again = step(*inputs(tokens[3], 0), *ours_too)
    torch.testing.assert_close(again, eager(*inputs(tokens[3], 0), *theirs_too), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_too, theirs_too, rtol=1e-5, atol=1e-5, equal_nan=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert mine[1:].isfinite().all() and mine[0].isnan().all()  # every slot but the null page's


def test_weights_are_parameters_in_the_memory_of_the_module(module: DecodeStep, step: iree.IreeStep) -> None:
    assert step.written == {5, 6, 7, 8} and step.results == 1
    for name, weight in module.named_parameters():
        assert f'"model"::"{name}"' in step.stages["torch"]
        assert step.program.arrays[name].ctypes.data == weight.data_ptr()


def test_stages_are_those_of_the_artifact(step: iree.IreeStep, directory: Path) -> None:
    assert (directory / f"{step.digest}.json").exists()
    assert list(step.stages) == ["torch", "linalg", "flow", "stream"]
    assert "torch.aten.index_put" in step.stages["torch"] and "linalg.generic" in step.stages["linalg"]
    assert "flow.dispatch" in step.stages["flow"] and "stream.cmd" in step.stages["stream"]


def test_a_step_compiled_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, step: iree.IreeStep) -> None:
    monkeypatch.setattr(iree, "iree_compile", None)
    digest, _ = iree._built(step.stages["torch"], (*iree.CPU, *iree.FLAGS), "decode", None)
    assert digest == step.digest


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda x: x.int(), r"decode: input 0 is \[1\] torch.int32; compiled for \[1\] torch.int64"),
        (2, lambda x: x[:, :1], r"decode: input 2 is \[1, 1\] torch.int32; compiled for \[1, 2\]"),
        (5, lambda x: x.mT.contiguous().mT, "input 5 is written in place and must be contiguous"),
    ],
)
def test_other_tensors_are_refused(step: iree.IreeStep, place: int, change, message: str) -> None:
    given = [*inputs(0, 0), *pages()]
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=message):
        step(*given)


@pytest.mark.parametrize("accumulate", [False, True])
def test_indices_that_stand_apart_are_written_out_right(accumulate: bool) -> None:
    pages, rows = torch.randn(4, 3, 5, 2), torch.randn(6, 3, 2)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:6]
    indices = (slots // 5, None, slots % 5)
    expected = torch.ops.aten.index_put(pages, indices, rows, accumulate)
    assert torch.equal(iree_export._index_put(pages, indices, rows, accumulate), expected)
    assert iree_export._index_put(pages, (slots % 4,), pages[:1], accumulate) is NotImplemented


@pytest.mark.parametrize("turns", [0.0, 1e3, 1e5])
def test_angles_of_float64_keep_float32s_precision(turns: float) -> None:
    angle = torch.linspace(-7, 7, 1001, dtype=torch.float64) + turns
    for ours, theirs in ((iree_export._cos, torch.cos), (iree_export._sin, torch.sin)):
        assert (ours(angle) - theirs(angle)).abs().max() < 1.3e-7


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_ptx_ahead_of_time(step: iree.IreeStep, architecture: str) -> None:
    ptx = iree.cuda_text(step.stages["torch"], "decode", architecture)
    assert f".target {architecture}" in ptx and ptx.count(".visible .entry") > 10


def test_what_the_compiler_refuses_is_said_in_its_words() -> None:
    class Svd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    with pytest.raises(BackendError, match="svd: iree-compile: .*error: failed to legalize"):
        iree.compile_step(Svd(), (torch.randn(3, 3),), "svd")
