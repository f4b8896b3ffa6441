"""torch.compile(backend="workbench_mlir"): right whatever it takes, and it says what it took."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.level import Level, limited_to
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_executed_levels

pytestmark = needs_mlir


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def backend():
    from compiled_kernels.mlir.backend import DynamoBackend

    return DynamoBackend()


def report_of(function: Callable, *inputs: Tensor, **options: Any):
    """Compile a function, hold it to itself, and return what the backend says of it."""
    own = backend()
    torch.testing.assert_close(torch.compile(function, backend=own, **options)(*inputs), function(*inputs))
    return own.report()


class Block(torch.nn.Module):
    """A norm, two products, a gate, a residual; it writes to `cache` in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(128, 64)
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight
        gate, up = self.up(normed).chunk(2, -1)
        y = x + self.down(F.silu(gate) * up)
        before = cache.sum()
        cache.mul_(0.5).add_(y)
        cache[1] = y[0] * 2
        return torch.softmax(y, -1), before, cache.amax()


@at_executed_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_chain_of_operations_is_taken_at_executed_levels(dtype: torch.dtype, level: Level) -> None:
    """In whatever type: nothing is left to Inductor because LLVM has no instruction for it."""

    def chain(a: Tensor, b: Tensor) -> Tensor:
        return (F.silu(a + b) * b - a.float().to(torch.bfloat16)).to(torch.bfloat16)

    own, a, b = backend(), torch.randn(8, 48).to(dtype), torch.randn(8, 48).to(dtype)
    with limited_to(level), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = torch.compile(chain, backend=own)(a, b)
    torch.testing.assert_close(found, chain(a, b), rtol=2e-2, atol=2e-2)
    assert own.report().taken and not own.report().left


def test_a_block_that_mutates_an_input_is_right() -> None:
    block, own = Block(), backend()
    compiled = torch.compile(block, backend=own, fullgraph=True)
    for _ in range(2):
        x, ours = torch.randn(5, 64), torch.randn(5, 64)
        theirs = ours.clone()
        torch.testing.assert_close(compiled(x, ours), block(x, theirs))
        torch.testing.assert_close(ours, theirs)
    report = own.report()
    assert {"_softmax.default", "rsqrt.default", "sigmoid.default"} <= {
        name for each in report.taken for name in each.operations
    }
    products = [each for each in report.left if "mm.default" in " ".join(each.operations)]
    assert products and products[0].fallback == "eager" and "a library computes products" in products[0].reason
    assert all(len(each.digest) == 64 for each in report.taken)
    assert len(report.data()) == len(report.subgraphs) == len(str(report).splitlines())


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum over the first axis": lambda a, b: (a - a.sum(0)) * b,
    "sums of columns for every row": lambda a, b: (a - a.t().sum(1)) * b,
    "a transposed softmax": lambda a, b: a + b.t().softmax(-1).t(),
    "softmax over the first axis": lambda a, b: torch.softmax(a, 0) + b,
    "transposed results": lambda a, b: (a.t() @ b, (a + b).t() * 2),
    "norm of a layer": lambda a, b: F.layer_norm(a, (6,)) + b,
    # Means keep the exponents small: beyond 30, e to the x makes a last bit of x into a millionth of itself.
    "numbers from rows and columns": lambda a, b: (a.mean(1)[:, None] * b.mean(0)[None]).exp().sum(),
    "masked softmax": lambda a, b: torch.where(a > b, a.exp(), -torch.inf).softmax(-1),
    "concatenation": lambda a, b: torch.cat([a.exp(), b * 2], 0) + torch.cat([b, a], 0),
    "two results of one": lambda a, b: (a.argmax(-1), a.amax(-1, keepdim=True) - b),
    "integers and truth": lambda a, b: ((a * 10).to(torch.int64) + 3, (a > 0) & (b > 0)),
    "sixteen bits": lambda a, b: (a.bfloat16() * b.bfloat16()).float().sum(),
    "the input itself": lambda a, b: (a, a + b, b.view(36)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_eager(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 6, generator=draw) * 3, torch.randn(6, 6, generator=draw)
    report = report_of(FUNCTIONS[name], a, b)
    assert report.taken and not [each for each in report.left if "transform" in each.reason or "LLVM" in each.reason]


def test_inputs_of_any_layout() -> None:
    report_of(lambda a, b: (a.exp() + b).sum(1), torch.randn(6, 4).t(), torch.randn(8, 6)[::2], dynamic=False)


@pytest.mark.parametrize(
    ("function", "options", "runs_on", "reason"),
    [
        (lambda a: torch.linalg.svdvals(a), {}, "inductor", "not among the operations this backend lowers"),
        (lambda a: a.exp(), {"dynamic": True}, "inductor", "a size is symbolic"),
        (lambda a: a.cumsum(0).exp(), {}, "eager", "not among the operations this backend lowers"),
    ],
)
def test_what_is_left_is_right_and_reported(function: Callable, options: dict, runs_on: str, reason: str) -> None:
    (left,) = report_of(function, torch.randn(4, 4), **options).left
    assert left.fallback == runs_on and reason in left.reason


def test_what_does_not_lower_at_all_is_inductors_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_kernels.backends import BackendError

    def refuses(*_: object, **__: object) -> None:
        raise BackendError("mlir: not today")

    monkeypatch.setattr("compiled_kernels.mlir.subgraphs.compile_text", refuses)
    own = backend()
    a, cache = torch.randn(4, 4), torch.zeros(4, 4)

    def function(a: Tensor, cache: Tensor) -> Tensor:
        cache.add_(a)
        return (a.exp() @ a).tanh()

    with pytest.warns(UserWarning, match="workbench_mlir: supported operations were left .*: mlir: not today"):
        found = torch.compile(function, backend=own)(a, cache)
    torch.testing.assert_close(found, (a.exp() @ a).tanh())
    assert torch.equal(cache, a)
    assert [(each.fallback, each.reason) for each in own.report().subgraphs] == [("inductor", "mlir: not today")]


def test_parts_that_read_one_another_are_placed_right() -> None:
    """A product and a second kernel read the output of a first kernel."""
    assert len(report_of(lambda a: ((a.exp() @ a).sigmoid() + a.exp()) @ (a + 1), torch.randn(6, 6)).taken) >= 2


def test_views_by_strides_are_the_stated_reason() -> None:
    left = report_of(lambda a: (a @ a).exp() + torch.as_strided(a, (4, 4), (1, 4)).exp(), torch.randn(4, 4)).left
    assert [each.reason for each in left] == ["as_strided: whose memory it reads cannot be seen"]


@pytest.mark.parametrize("given", [{"options": {"lanes": 8}}, {"mode": "max-autotune"}])
def test_options_are_refused(given: dict) -> None:
    with pytest.raises(Exception, match="workbench_mlir takes no options; (options|mode)=.* given"):
        torch.compile(lambda a: a.exp(), backend="workbench_mlir", **given)(torch.randn(3))


def test_graphs_for_training_are_left_to_inductor() -> None:
    own = backend()
    with torch.enable_grad():
        a = torch.randn(4, 4, requires_grad=True)
        torch.compile(lambda a: (a.sin() * a).sum(), backend=own)(a).backward()
    torch.testing.assert_close(a.grad, a.detach().cos() * a.detach() + a.detach().sin())
    assert {each.fallback for each in own.report().subgraphs} == {"inductor"}
    assert "gradients are required" in str(own.report())


def test_it_is_known_to_torch_by_name() -> None:
    from compiled_kernels.mlir.backend import report

    before = len(report().subgraphs)
    a = torch.randn(3)
    torch.testing.assert_close(torch.compile(lambda a: a.exp() * 2, backend="workbench_mlir")(a), a.exp() * 2)
    assert "workbench_mlir" in torch._dynamo.list_backends(exclude_tags=())
    assert len(report().subgraphs) == before + 1 and report().subgraphs[-1].taken
