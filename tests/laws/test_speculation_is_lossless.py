"""Speculation is lossless: whatever proposes, and however often it is right, text and rows are those without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from tests.engine.guesses import Guesses, drafts, plain, run_checked, tokens
from tests.engine.tiny import Oracle, model_of, request, runner_of, spec_of, specs
from tests.helpers.rows import rows
from tests.thorough import THOROUGH, tries
from workbench.claims.comparison import TECHNIQUE
from workbench.claims.technique import experiment_of, load_zoo
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.kv_cache.format import CacheFormat
from workbench.kv_cache.pages import pages_for
from workbench.model.spec import ModelSpec
from workbench.request import Request
from workbench.sampling.filters import History
from workbench.scheduler.policies import BUILT_IN_POLICIES, BatchingMode, parse_policy
from workbench.speculative.config import Speculation, parse_speculation, proposes_trees
from workbench.trace.events import Finished

CODE = "import os\nimport sys\n\n\ndef first(items):\n    return items[0]\n\n\ndef second(items):\n"
BUILT_IN: dict[str, Any] = {
    "built-in lookup": "prompt_lookup",
    "draft model": "draft",
    "sure draft model": {"kind": "draft", "confidence_threshold": 0.5},
    "layers of the target": {"kind": "draft", "model": "target", "layers": [0, 2, 5]},
}
PROPOSERS: dict[str, Speculation] = {
    **{name: parse_speculation(setting) for name, setting in BUILT_IN.items()},
    **{
        name: experiment_of(entry).variant(TECHNIQUE).speculate
        for name, entry in load_zoo().items()
        if entry.settings.kind == "draft"
    },
}
COMPILED = ("built-in lookup", "sure draft model", "layer_skip")  # a mechanism of the compiled step each
GREEDY, DRAWN = {"temperature": 0}, {"temperature": 0.9, "seed": 3}  # what is drawn stands by `match`
WAYS: list[dict[str, Any]] = [
    {"sampling": GREEDY},
    {"sampling": DRAWN, "accept": "match"},
    {"sampling": GREEDY, "prefix": "radix", "length": "adaptive"},
]


def runs(proposer: str, backend: str, way: dict[str, Any]) -> bool:
    """Each proposer meets one way on backend eager; some, one of each mechanism, meet the compiled step. All meet all
    in `make test-thorough`. Trees are of one length, and verified on backend eager (speculative/test_trees.py)."""
    tree = proposes_trees(PROPOSERS[proposer])
    if backend_problems()[Backend(backend)] or tree and (backend != "eager" or "length" in way):
        return False
    place = list(PROPOSERS).index(proposer)
    chosen = WAYS[place % 2] if tree else WAYS[place % len(WAYS)]
    return THOROUGH or way is chosen and (backend == "eager" or proposer in COMPILED)


@rows({"proposer": [*PROPOSERS], "backend": ["eager", "mlir"], "way": WAYS}, valid=runs)
def test_text_equals_text_without_drafts(proposer: str, backend: str, way: dict[str, Any]) -> None:
    """Every registered proposer, built in or of the zoo."""
    more = {name: way[name] for name in ("accept", "length") if name in way}
    if not proposes_trees(PROPOSERS[proposer]):
        more["num_speculative_tokens"] = 4  # one compiled step for all
    speculate = PROPOSERS[proposer].model_copy(update=more)
    drawn = way["sampling"] is DRAWN
    assert text_of(speculate, backend, drawn, way.get("prefix", "off")) == plain_text(backend, drawn)


@cache
def plain_text(backend: str, drawn: bool) -> list[tuple[str, str]]:
    return text_of(parse_speculation("none"), backend, drawn)


def text_of(speculate: Speculation, backend: str, drawn: bool, prefix: str = "off") -> list[tuple[str, str]]:
    runner = Runner(
        EngineConfig.build("demo", dtype="float32", backend=backend, pages=64, prefix=prefix, speculate=speculate)
    )
    events = runner.stream(CODE, max_tokens=16, **(DRAWN if drawn else GREEDY))
    return [(event.reason, event.output_text) for event in events if isinstance(event, Finished)]


def minus_embedded(logits: Tensor, histories: Sequence[History], early: Tensor) -> Tensor:
    return logits - 0.5 * early[0]


minus_embedded.layers = (0,)  # type: ignore[attr-defined] (what makes it a filter of early layers)
PACKED = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=8)


@settings(max_examples=tries(60), deadline=None)
@given(
    specs, st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([None, PACKED]), st.sampled_from(["off", "radix"]),
    st.integers(5, 40), st.floats(0, 1), st.sampled_from([*BUILT_IN_POLICIES]),
    st.sampled_from(["continuous", "static"]), st.integers(5, 20), st.sampled_from(["fixed", "adaptive"]),
    st.sampled_from([{}, {}, {"filters": [{"path": f"{__name__}:minus_embedded"}]}]),
)  # fmt: skip
def test_every_row_equals_oracle_whatever_is_proposed(
    spec: ModelSpec, seed, most, cache, prefix, pages, right, policy, mode, budget, length, own
) -> None:
    """Windows, packed caches, reuse of prefixes, pages that run out, every policy with little patience, budgets that
    cut prompts and drafts, filters of early layers: every row is the oracle's, or every token that of a run without
    drafts where the cache is packed or a filter looks within, and no page is left over."""
    if cache is not None and any(kind.attention.head_dim % 8 for kind in spec.layers):
        cache = None
    size = 8 if cache else 4
    pages = max(pages, 2 * pages_for(30, size) + 4)
    model = model_of(spec, seed)
    asked = [request(f"{seed}-{i}", 3 + 4 * i, 5 + 3 * i, presence_penalty=0.3 * (i % 2), **own) for i in range(3)]
    asked.append(Request("again", asked[2].prompt_ids, asked[2].sampling))
    shared = {"cache": cache, "prefix": prefix, "pages": pages, "page_size": size, "max_num_seqs": 3}
    wanted = plain(model, asked, **{**shared, "pages": 60})
    proposer = Guesses({name: end.token_ids for name, end in wanted.items()}, seed, right)
    patience = {"starvation_limit": 6} if "starvation_limit" in BUILT_IN_POLICIES[policy].model_fields else {}
    runner = runner_of(
        model, **shared, speculator=drafts(proposer, most, length=length),
        policy=parse_policy({"kind": policy, **patience}, cast(BatchingMode, mode)),
        max_num_batched_tokens=16 if cache else budget,
    )  # fmt: skip
    if cache is None and not own:  # the taps of early layers stand beside the rows that the oracle looks at
        Oracle(runner)
    assert tokens(run_checked(runner, asked)) == tokens(wanted)
    runner.reset_prefix_cache()
    assert all(pool.num_used == 0 and pool.num_free == pool.num_pages for pool in runner.scheduler.pools)


TINY, ASKED = model_of(spec_of()), [request(f"r{i}", 3 + 4 * i, 9) for i in range(3)]


@settings(max_examples=tries(40), deadline=None)
@given(st.integers(0, 60), st.integers(0, 2), st.integers(0, 9), st.sampled_from([*BUILT_IN_POLICIES]))
def test_cancelling_at_any_event_frees_its_pages_and_changes_no_other(
    moment: int, which: int, seed: int, policy: str
) -> None:
    proposer = Guesses({name: end.token_ids for name, end in uncut().items()}, seed)
    runner = runner_of(TINY, policy=policy, pages=12, speculator=drafts(proposer))
    ends = {}
    for number, event in enumerate(runner.stream(ASKED)):
        if number == moment:
            runner.cancel(f"r{which}")
        if isinstance(event, Finished):
            ends[event.request_id] = event
    assert all(pool.num_free == pool.num_pages for pool in runner.scheduler.pools)
    for name, end in ends.items():
        cut = end.reason == "cancelled"
        assert end.token_ids == uncut()[name].token_ids[: len(end.token_ids) if cut else None]
        assert not cut or name == f"r{which}"
    assert run_checked(runner, [request("r0", 3, 2)])["r0"].reason == "length"
    assert proposer.kept <= {"r0"}, "what has ended is forgotten"


@cache
def uncut() -> dict[str, Finished]:
    return plain(TINY, ASKED)
