"""Eviction in a runner: bounded memory, batches, backends, CPU pools, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from tests.engine import eviction_policies
from tests.engine.eviction_policies import Newest
from tests.engine.kinds import LATENT
from tests.engine.tiny import finals, layer, model_of, request, runner_of, spec_of
from tests.thorough import tries
from workbench.custom import temporarily_registered
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.executors.evicting import codes_heads_apart
from workbench.executors.select import Backends
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.codec import LoadedCodec
from workbench.kv_cache.eviction import parse_eviction
from workbench.kv_cache.format import CacheFormat
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.request import CustomPart
from workbench.testing.eviction import EvictionScenario, eviction_scenarios
from workbench.testing.eviction_oracle import evicted_logits
from workbench.trace.events import Scheduled

LONG = spec_of(layer(4, 2), layer(2, 1, qk_norm=True)).model_copy(update={"max_position_embeddings": 1024})
POLICIES = [
    {"kind": "heavy_hitters", "budget": 12},
    {"kind": "snapkv", "budget": 12, "observe": 4, "pool": 3},
    {"kind": "sinks_recent", "budget": 12, "num_sink_tokens": 2},
    {"kind": "window", "budget": 12},
]


def runner(spec: ModelSpec = LONG, backends: Backends | None = None, **settings) -> Runner:
    model = model_of(spec, dtype=settings.pop("dtype", torch.float32))
    return runner_of(model, backends=backends, **{"pages": 300, **settings})


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy["kind"] != "snapkv"])
def test_memory_is_flat_at_twenty_times_the_budget(policy: dict) -> None:
    """Each table's pool has the budget's pages and no more; prompt and output are twenty times the budget."""
    ours = runner(evict=policy, pages=3)
    ours.submit(request("long", 120, 120))
    held = []
    while ours.has_unfinished_requests:
        ours.step()
        held += [sequence.num_stored_tokens for sequence in ours.scheduler.running if sequence.num_evicted_tokens]
    assert max(held) == 12 and min(held) >= 11
    assert all(pool.num_free == pool.num_pages for pool in ours.scheduler.pools)


def test_an_output_goes_on_within_the_pages_of_a_snapshot() -> None:
    """SnapKV: what the prompt held beyond the budget is given back at its end."""
    ours = runner(evict=POLICIES[1])
    ours.submit(request("long", 100, 9))
    used = []
    while ours.has_unfinished_requests:
        ours.step()
        used.append(ours.scheduler.pools[0].num_used)
    assert max(used) == 25 and used[-3] == 5  # 12 + 8 tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_neighbours_that_lose_nothing_are_as_without_eviction(policy: dict) -> None:
    short = [request("b", 5, 6), request("c", 9, 3)]
    plain = finals(runner(), short)
    both = finals(runner(evict=policy), [request("a", 90, 8), *short])
    assert {name: both[name] for name in plain} == plain


DECODE = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "decode")


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("backend", ["mlir decodes", "mlir", "inductor", "mlir and a codec"])
def test_backends_have_the_tokens_of_eager(backend: str, policy: dict, as_written: None) -> None:
    """Prefill and decode with the queries seen, and decode by the compiled step where they need not be."""
    chosen = Backend.INDUCTOR if backend == "inductor" else Backend.MLIR
    if problem := backend_problems()[chosen]:
        pytest.skip(f"backend {chosen}: {problem}")
    asked, spec = [request("a", 50, 20), request("b", 9, 20)], LONG.model_copy(update={"layers": LONG.layers[:1] * 2})
    with temporarily_registered(Signs) as path:
        cache = CacheFormat(codec=CustomPart(path=path) if "codec" in backend else None)
        ways: dict[str, Any] = {"evict": policy, "cache": cache, "pages": 300}
        right = finals(runner_of(model_of(spec), **ways), asked)
        by_step = backend == "mlir decodes"
        model = model_of(spec, backend=Backend.EAGER if by_step else chosen)
        assert finals(runner_of(model, backends=DECODE if by_step else None, **ways), asked) == right


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_preempted_and_swapped_in_from_the_cpu_pool(policy: dict) -> None:
    asked = [request(name, 40, 30) for name in "abc"]
    undisturbed = finals(runner(evict=policy, dtype=torch.float64), asked)
    ours = runner(evict=policy, dtype=torch.float64, pages=14, offload="memory")
    ends = generate(ours, asked)
    assert {name: end.token_ids for name, end in ends.items()} == undisturbed
    assert policy["kind"] != "snapkv" or any(end.restored_tokens for end in ends.values())


def test_samples_of_one_prompt_each_keep_their_own() -> None:
    together = finals(runner(evict=POLICIES[0]), [request("a", 40, 9, n=3, temperature=1.0, seed=5)])
    alone = finals(runner(evict=POLICIES[0]), [request("a", 40, 9, temperature=1.0, seed=6)])
    assert len(together) == 3 and together["a#1"] == alone["a"]


def test_an_eviction_is_reported_and_its_tokens_no_longer_inspected() -> None:
    ours = runner(evict=POLICIES[0])
    reasons: list[str] = []
    ours.telemetry.listener = lambda event: (
        reasons.append(event.reason) if isinstance(event, Scheduled) and event.action == "evicted" else None
    )
    ours.submit(request("a", 14, 30))
    for _ in range(6):
        ours.step()
    assert reasons[0] == "1 of 12 tokens evicted"
    with pytest.raises(WorkbenchError, match="of its tokens were evicted, in each layer others"):
        ours.inspect("a")


@dataclass(frozen=True)
class Signs:
    """A codec that keeps the sign of each number, and one scale a head."""

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows > 0, rows.abs().mean(-1).half()

    def decode(self, positive: Tensor, scales: Tensor) -> Tensor:
        return torch.where(positive, 1.0, -1.0) * scales[..., None].float()


class MixedHeads(Signs):
    """The same of the sums and differences of neighbouring heads: no head can be kept without the other."""

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return super().encode(torch.stack([rows[:, 0] + rows[:, -1], rows[:, 0] - rows[:, -1]], 1))

    def decode(self, positive: Tensor, scales: Tensor) -> Tensor:
        sums, differences = super().decode(positive, scales).unbind(1)
        return torch.stack([(sums + differences) / 2, (sums - differences) / 2], 1)


@pytest.mark.parametrize("policy", POLICIES)
@given(eviction_scenarios())
@settings(max_examples=tries(4))
def test_a_codec_and_eviction_are_what_a_model_without_pages_keeps(policy: dict, scenario: EvictionScenario) -> None:
    """Head by head: the slots move together with their codes."""
    codec, given_policy = Signs(), parse_eviction(policy)
    assert given_policy is not None
    with temporarily_registered(Signs) as path:
        found = scenario.rows(given_policy, page_size=scenario.scenario.page_size, cache={"codec": {"path": path}})
    model, texts = scenario.scenario.model({}), scenario.texts()
    for name, text in texts.items():
        mine = {place: row for (text_name, place), row in found.items() if text_name == name}
        right = evicted_logits(
            model, given_policy, scenario.budget(given_policy), mine[max(mine)][0], len(text),
            stored=lambda rows: codec.decode(*codec.encode(rows)).to(rows.dtype),
        )  # fmt: skip
        for place, (_, row) in mine.items():
            assert torch.allclose(row, right[place - 1], rtol=1e-9, atol=1e-9)


def test_heads_that_a_codec_mixes_cannot_keep_tokens_of_their_own() -> None:
    with temporarily_registered(MixedHeads) as path, pytest.raises(WorkbenchError, match="encodes heads together"):
        spec = LONG.model_copy(update={"layers": LONG.layers[:1]})  # of two key/value heads
        runner(spec, evict=POLICIES[0], cache=CacheFormat(codec=CustomPart(path=path)))
    row = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    codecs: list[tuple[Any, bool]] = [(Signs(), True), (MixedHeads(), False)]
    for codec, apart in codecs:
        assert codes_heads_apart(LoadedCodec(codec, "own", None, (codec, codec)), 2, 4, row.dtype) == apart


@dataclass(frozen=True)
class Fails:
    """A user's policy that cannot choose among more than 20 tokens: it raises, or keeps too few."""

    raises: bool
    gives_up: frozenset[str] = frozenset()
    observes: int | None = 0

    def budget_for(self, page_size: int, page_bytes: int) -> EvictionBudget:
        return EvictionBudget(12, in_decode=False)

    def select(self, mass: torch.Tensor, budget: int) -> torch.Tensor:
        if len(mass) > 20 and self.raises:
            raise ValueError("too many for me")
        return torch.arange(len(mass) - budget + (len(mass) > 20), len(mass))


@pytest.mark.parametrize(("raises", "error"), [(True, "too many for me"), (False, "kept 11 of 30 tokens, not 12")])
def test_a_policy_that_fails_ends_its_request_alone(raises: bool, error: str) -> None:
    """Tokens of the others are moved as planned, though they come later in the same step."""
    others = [request("b", 18, 6), request("c", 18, 6)]
    wanted = finals(runner(evict=Fails(raises), max_num_batched_tokens=99), others)
    ends = generate(runner(evict=Fails(raises), max_num_batched_tokens=99), [request("a", 30, 6), *others])
    assert ends["a"].reason == "error" and error in ends["a"].error
    assert {name: ends[name].token_ids for name in wanted} == wanted


NEWEST = f"{eviction_policies.__name__}:Newest"


def test_a_policy_is_named_by_its_path() -> None:
    """Alone, with arguments, registered, and read back from an experiment's YAML."""
    setting = {"path": NEWEST, "arguments": {"budget": 12}}
    found = parse_eviction(setting)
    assert isinstance(found, Newest) and found.budget == 12
    asked = [request("a", 40, 9), request("b", 9, 9)]
    right = finals(runner(evict=Newest(budget=12)), asked)
    assert finals(runner(evict=setting), asked) == right
    with temporarily_registered(Newest) as name:
        assert finals(runner(evict={"path": name, "arguments": {"budget": 12}}), asked) == right


def test_latent_attention_is_evicted_where_nothing_is_merged() -> None:
    spec = spec_of(LayerSpec(attention=LATENT, intermediate_size=12))
    assert finals(runner(spec, evict=Newest(budget=12)), [request("a", 40, 9)])
