"""Products by experts: equal to float64 however rows fall on experts, on every backend and level; a row has the same
bits whichever other rows chose its expert; and an expert that no row names is not read, in the strict sense: its memory
may not even be readable."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.blocked import from_panels, to_panels
from compiled_kernels.cases import Case, CaseCost, random_normal, suite_of
from compiled_kernels.level import Level, available_levels, limited_to
from tests.thorough import tries

SUITE = suite_of("expert_linear")
problem = backend_problems()[Backend.MLIR]
mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
DTYPES = [torch.float32, torch.bfloat16]
WIDTH, OUT, EXPERTS = 352, 128, 5  # two blocks along the width, of which the second is shorter


@pytest.fixture(params=available_levels(), ids=str)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    with limited_to(request.param):
        yield request.param


def inputs(experts: list[int], dtype: torch.dtype, panels: bool = True, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that name these experts; the weights of all others are NaN."""
    generator = torch.Generator().manual_seed(seed)
    weight = random_normal(generator, dtype, (EXPERTS, OUT, WIDTH)) * WIDTH**-0.5
    weight[[each for each in range(EXPERTS) if each not in experts]] = torch.nan
    x = random_normal(generator, dtype, (len(experts), WIDTH))
    return x, torch.tensor(experts, dtype=torch.long), to_panels(weight) if panels else weight


names = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=40)
uneven = st.one_of(names, st.integers(1, 40).map(lambda rows: [3] * rows))  # one expert takes all


@mlir
@pytest.mark.parametrize("panels", [True, False])
@settings(max_examples=tries(25), deadline=None)
@given(experts=uneven, dtype=st.sampled_from(DTYPES), biased=st.booleans(), seed=st.integers(0, 99))
def test_rows_fall_on_experts_in_any_way(
    panels: bool, experts: list[int], dtype: torch.dtype, biased: bool, seed: int
) -> None:
    x, expert, weight = inputs(experts, dtype, panels, seed)
    bias = random_normal(torch.Generator().manual_seed(seed), dtype, (EXPERTS, OUT)) if biased else None
    case = Case("drawn", {"width": WIDTH}, CaseCost(0, 0))
    assert disagreement(SUITE, case, (x, expert, weight, bias), Backend.MLIR) is None


@mlir
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level(dtype: torch.dtype, level: Level) -> None:
    """Experts with 0 to 15 rows: every last tile of few rows, and many."""
    case = Case("counts", {"width": WIDTH}, CaseCost(0, 0))
    for most in (1, 2, 3, 4, 5, 6, 7, 15):
        experts = [1] * most + [4] * (most // 2)
        assert disagreement(SUITE, case, (*inputs(experts, dtype), None), Backend.MLIR) is None, most


@mlir
@pytest.mark.parametrize("panels", [True, False])
@settings(max_examples=tries(20), deadline=None)
@given(
    experts=uneven, place=st.integers(0, 39), dtype=st.sampled_from(DTYPES), threads=st.integers(1, 3),
    bad=st.sampled_from([torch.nan, torch.inf, 1e30]),
)  # fmt: skip
def test_a_row_is_the_same_whichever_rows_chose_its_expert(
    panels: bool, experts: list[int], place: int, dtype: torch.dtype, threads: int, bad: float
) -> None:
    """Alone and among any others, at every place, beside rows that are no numbers, on any number of threads."""
    x, expert, weight = inputs(experts, dtype, panels)
    place %= len(experts)
    alone = compiled_kernels.expert_linear(x[[place]], expert[[place]], weight, None, None, Backend.MLIR)
    if len(experts) > 1:
        x[place - 1] = bad
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        among = compiled_kernels.expert_linear(x, expert, weight, None, None, Backend.MLIR)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(among[[place]], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_in_panels_is_a_rearrangement(dtype: torch.dtype) -> None:
    stack = torch.arange(3 * 64 * 8).view(3, 64, 8).to(dtype)
    laid_out = to_panels(stack)
    assert torch.equal(from_panels(laid_out), stack) and laid_out.nbytes == stack.nbytes
    assert all(torch.equal(laid_out[each], to_panels(stack[each])) for each in range(3))


@mlir
@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("experts", [[0, EXPERTS], [-1, 0]])
def test_an_expert_that_there_is_not_is_refused(experts: list[int], panels: bool) -> None:
    x, _, weight = inputs([0, 0], torch.float32, panels)
    with pytest.raises(BackendError, match=f"name experts .* to .*; there are 0 to {EXPERTS - 1}"):
        compiled_kernels.expert_linear(x, torch.tensor(experts), weight, None, None, Backend.MLIR)


@mlir
def test_no_rows() -> None:
    x, _, weight = inputs([0], torch.float32)
    found = compiled_kernels.expert_linear(x[:0], torch.zeros(0, dtype=torch.long), weight, None, None, Backend.MLIR)
    assert found.shape == (0, OUT)


READ = """
import ctypes, mmap, sys
import torch
import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.expert_linear.cases import random_stack
from compiled_kernels.expert_linear.packed import stack_to_panels

backend, panels, named, read = Backend(sys.argv[1]), sys.argv[2] == "panels", [1, 4], sys.argv[3] == "read"
experts, out, width, kind = 6, 64, 4096, sys.argv[6]
group = {"dense": 0, "int8": 0, "int8 in groups": 32, "int4": 32, "mxfp4": 32}[kind]
drawn = random_stack(torch.Generator().manual_seed(0), kind.split()[0], group, (experts, out, width), torch.float32)
def mapped(given):
    memory = mmap.mmap(-1, given.nbytes)
    return torch.frombuffer(memory, dtype=given.dtype).view(given.shape).copy_(given)
weight, scales = (each if each is None else mapped(each) for each in (stack_to_panels(*drawn) if panels else drawn))
x = torch.randn(9, width)
expert = torch.tensor([1, 4, 4, 4, 4, 4, 4, 4, 4]) if not read else torch.tensor([0, 1, 4, 4, 4, 4, 4, 4, 4])
def call(x, expert):
    return compiled_kernels.expert_linear(x, expert, weight, None, scales, backend)
if sys.argv[4] == "compiled":
    call = torch.compile(call, fullgraph=True, dynamic=False)
compiled_kernels.expert_linear(x[:2], torch.tensor(named), weight, None, scales, Backend.EAGER)  # loads what is lazy
rows = int(sys.argv[5])
call(x[:rows], expert[:rows] * 0 + 1)
libc = ctypes.CDLL(None, use_errno=True)
for stack in [weight] if scales is None else [weight, scales]:
    one = stack.nbytes // experts
    if one % mmap.PAGESIZE:  # scales of whole rows: an expert's share no page
        stack[sorted(set(range(experts)) - set(named))] = torch.nan
        continue
    for number in set(range(experts)) - set(named):
        assert libc.mprotect(ctypes.c_void_p(stack.data_ptr() + number * one), ctypes.c_size_t(one), 0) == 0
assert call(x[:rows], expert[:rows]).isfinite().all()
print("not read")
"""


def run(backend: Backend, layout: str, which: str, form: str, rows: int, kind: str) -> subprocess.CompletedProcess:
    arguments = [str(backend), layout, which, form, str(rows), kind]
    return subprocess.run([sys.executable, "-c", textwrap.dedent(READ), *arguments], capture_output=True, text=True)


WAYS = [(Backend.EAGER, "rows", "written", 9), (Backend.EAGER, "panels", "written", 9),
        (Backend.INDUCTOR, "rows", "compiled", 2), (Backend.INDUCTOR, "rows", "written", 9)]  # fmt: skip
WAYS += [(Backend.MLIR, layout, "written", rows) for layout in ("rows", "panels") for rows in (2, 9) if not problem]


KINDS = ["dense", "int8", "int8 in groups", "int4", "mxfp4"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "layout", "form", "rows"), WAYS)
def test_experts_that_no_row_names_are_never_read(
    backend: Backend, layout: str, form: str, rows: int, kind: str
) -> None:
    """Their memory is taken away (mprotect), that of codes and of scales: a single read of it would end the process."""
    done = run(backend, layout, "unnamed", form, rows, kind)
    assert done.stdout == "not read\n", done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["dense", "mxfp4"])
@pytest.mark.parametrize("backend", [Backend.EAGER, *([] if problem else [Backend.MLIR])])
def test_that_check_can_fail(backend: Backend, kind: str) -> None:
    done = run(backend, "rows" if backend is Backend.EAGER else "panels", "read", "written", 9, kind)
    assert done.returncode < 0 and not done.stdout
