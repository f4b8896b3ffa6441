"""Pages shared, found again, given back and carried out of the cache: every row is the oracle's all the same.

Whatever nobody holds is NaN before each step, and so is the null page.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import VOCAB, Oracle, finals, layer, model_of, request, runner_of, spec_of, specs
from workbench.cache import host
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.model.spec import Attention, LayerKind, ModelSpec
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Finished, Planned, SetBack, Stepped
from workbench.trace.recorder import Recorder

WINDOW = 5
MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, window=WINDOW)))
SINKS = LayerKind(attention=Attention(heads=2, groups=1, dim=4, window=6, sinks=3), hidden=12)


class Poison:
    """Stands in for a runner's executor: before each step every page that nobody holds becomes NaN."""

    compiles, kernel_seconds, artifacts = 0, None, {}

    def __init__(self, runner: Runner):
        self.inner, self.runner = runner.executor, runner
        runner.executor = self

    def forward(self, plan):
        for table, pool in enumerate(self.runner.scheduler.pools):
            free = [page for page in range(pool.pages + 1) if page == 0 or pool.holders(page) == 0]
            for tensor in self.runner.store.paged(table):
                tensor.view(torch.uint8)[free] = 255  # NaN in every type of float
        return self.inner.forward(plan)


def poisoned(runner: Runner) -> Oracle:
    """The oracle over a poisoned cache."""
    Poison(runner)
    return Oracle(runner)


def asked(name: str, shared: int, own: int, most: int, beginning: int = 0, **more) -> Request:
    """A prompt of `shared` tokens that others may have too, and `own` of its own."""
    draw = random.Random(beginning)
    first = tuple(draw.randrange(VOCAB) for _ in range(shared))
    salt = more.pop("cache_salt", "")
    alone = request(name, own, most, **more)
    return replace(alone, prompt_ids=first + alone.prompt_ids, cache_salt=salt)


jobs = st.lists(
    st.tuples(
        st.integers(0, 18), st.integers(1, 6), st.integers(1, 8), st.integers(0, 1), st.sampled_from([1, 1, 2, 3])
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=30)
@given(specs, jobs, st.booleans(), st.booleans(), st.randoms())
def test_every_row_is_the_oracles(
    spec: ModelSpec, sizes: list, prefix: bool, offload: bool, shuffle: random.Random
) -> None:
    """Warm is cold, a sample is alone, a page that came back is the one that went."""
    budget, seqs, size = shuffle.randint(1, 24), shuffle.randint(1, 4), shuffle.randint(1, 7)
    pages = -(-32 // size) + shuffle.randrange(12)
    runner = runner_of(
        model_of(spec, shuffle.randrange(99)), max_num_seqs=seqs, max_num_batched_tokens=budget, page_size=size,
        pages=pages, prefix="radix" if prefix else "off",
        offload={"kind": "memory", "bytes": 2**16} if offload else "none",
    )  # fmt: skip
    oracle = poisoned(runner)
    requests = [
        asked(f"r{i}", shared, own, most, beginning, n=n, temperature=0.7 if n > 1 else 0)
        for i, (shared, own, most, beginning, n) in enumerate(sizes)
    ]
    done: dict[str, Finished] = {}
    for wave in (requests[::2], requests[1::2], [replace(r, request_id=f"again {r.request_id}") for r in requests]):
        done |= generate(runner, wave)
    assert {event.reason for event in done.values()} == {"length"}, {e.error for e in done.values()}
    assert len(done) == 2 * sum(r.sampling.n for r in requests)
    assert oracle.clear and runner.scheduler.pages_used == 0
    for event in done.values():
        needed = event.prompt_tokens + len(event.token_ids) - 1
        assert event.computed_tokens + event.cached_tokens + event.restored_tokens >= needed


def test_a_prefix_is_computed_once() -> None:
    cold, warm = runner_of(MODEL), runner_of(MODEL, prefix="radix")
    first, second = asked("a", 17, 3, 5), asked("b", 17, 4, 5)
    generate(warm, [first])
    found = generate(warm, [second])["b"]
    assert found.token_ids == generate(cold, [second])["b"].token_ids
    assert (found.cached_tokens, found.computed_tokens) == (16, 21 - 16 + 4)
    assert found.shared_pages == 4 + 1  # all of the full layer's pages; of the window's that of positions 12 to 15
    again = generate(warm, [replace(second, request_id="c")])["c"]
    assert again.cached_tokens == 20  # the last prompt token is always computed
    assert generate(warm, [asked("d", 17, 4, 5, cache_salt="other")])["d"].cached_tokens == 0
    warm.forget_prefixes()
    assert generate(warm, [replace(second, request_id="e")])["e"].cached_tokens == 0
    assert warm.scheduler.pages_used == 0


def test_a_conversation_goes_on_where_it_ended() -> None:
    """The output, too, is found again, after a stop as after a limit; a cancelled request leaves what it computed."""
    runner = runner_of(MODEL, prefix="radix")
    tokens = generate(runner, [asked("a", 0, 9, 12)])["a"].token_ids
    stopped = replace(asked("b", 0, 9, 12), prompt_ids=asked("a", 0, 9, 12).prompt_ids)
    stopped = replace(stopped, sampling=stopped.sampling.model_copy(update={"stop_token_ids": (tokens[7],)}))
    runner.forget_prefixes()
    end = generate(runner, [stopped])["b"]
    assert end.reason == "stop"
    computed = 9 + len(end.token_ids) - 1
    turn = replace(stopped, request_id="c", prompt_ids=(*stopped.prompt_ids, *end.token_ids, 1, 2))
    assert generate(runner, [turn])["c"].cached_tokens == computed // 4 * 4
    runner.forget_prefixes()
    for event in runner.stream([asked("long", 18, 1, 20)]):
        if isinstance(event, Decoded) and event.index == 3:
            runner.cancel("long")
    assert generate(runner, [asked("next", 18, 2, 1)])["next"].cached_tokens == 16


def test_time_to_live() -> None:
    now = [0.0]
    runner = runner_of(MODEL, prefix={"kind": "radix", "ttl": 10}, clock=lambda: now[0], sleep=lambda _: None)
    generate(runner, [asked("a", 17, 3, 5)])
    for seconds, found in ((9.0, 16), (9.0, 16), (10.5, 0)):  # each use begins it anew
        now[0] += seconds
        assert generate(runner, [asked("b", 17, 3, 5)])["b"].cached_tokens == found


def test_what_broke_is_not_offered() -> None:
    runner = runner_of(MODEL, prefix="radix")
    forward = runner.executor.forward
    runner.executor.forward = lambda plan: forward(plan) * torch.nan  # type: ignore[method-assign]
    assert generate(runner, [asked("a", 17, 3, 5)])["a"].reason == "error"
    runner.executor.forward = forward  # type: ignore[method-assign]
    assert all(pool.free == pool.pages for pool in runner.scheduler.pools)
    for layer_ in runner.store.layers:
        layer_.keys[0] = 0  # scrubbing cleaned the pages that were held, and nothing was offered
    assert generate(runner, [asked("b", 17, 3, 5)])["b"].cached_tokens == 0


def test_samples_are_the_requests_of_their_seeds() -> None:
    for prefix in ("off", "radix"):
        for prompt in (1, 7, 8, 9):
            runner = runner_of(MODEL, prefix=prefix, max_num_seqs=3)
            poisoned(runner)
            one = request("a", prompt, 9, temperature=0.9, seed=5, n=4)
            alone = {
                f"a#{k}" if k else "a": finals(
                    runner_of(MODEL), [replace(one, sampling=one.sampling.model_copy(update={"n": 1, "seed": 5 + k}))]
                )["a"]
                for k in range(4)
            }
            done = generate(runner, [one])
            assert {name: event.token_ids for name, event in done.items()} == alone
            assert [event.sample for event in done.values()] == [int(name[2:] or 0) for name in done]
            assert len(set(alone.values())) > 1 and runner.scheduler.pages_used == 0


def test_samples_share_the_prompt_and_copy_its_last_page() -> None:
    runner = runner_of(MODEL, max_num_batched_tokens=64)
    steps, held = [], []
    for event in runner.stream([request("a", 10, 4, temperature=0.9, n=3), request("b", 3, 2)]):
        if isinstance(event, Stepped):
            steps.append(event)
            held.append(len({page for s in runner.scheduler.running for page in s.pages[0] if page}))
        if isinstance(event, Planned) and event.request_id == "a" and event.sample == 1:
            assert event.reason == "admitted: shares 5 pages with a"
    # Nine tokens of the prompt are computed once, the tenth by each sample.
    assert [step.prefill_tokens for step in steps][:2] == [9 + 3, 3]
    done = generate(runner, [request("a", 10, 4, temperature=0.9, n=3)])
    assert [event.computed_tokens for event in done.values()] == [13, 4, 4]
    assert [event.cached_tokens for event in done.values()] == [0, 9, 9]
    # In the table that reads everything, between steps: two pages of eight tokens together, and a third of each.
    assert max(held) == 2 + 3


def test_cancelling_a_request_ends_all_its_samples() -> None:
    for moment in (2, 5, 9, 14):
        runner = runner_of(MODEL, max_num_batched_tokens=4)
        ends = []
        for number, event in enumerate(runner.stream([request("a", 10, 6, n=3), request("b", 3, 3)])):
            if number == moment:
                runner.cancel("a")
            ends += [event] if isinstance(event, Finished) else []
        assert sorted((e.request_id, e.sample, e.reason) for e in ends) == [
            ("a", 0, "cancelled"), ("a", 1, "cancelled"), ("a", 2, "cancelled"), ("b", 0, "length"),
        ]  # fmt: skip
        assert runner.scheduler.pages_used == 0


def test_rows_of_samples() -> None:
    recorder = Recorder()
    runner = runner_of(MODEL, note=recorder.note)
    generate(runner, [request("a", 6, 3, temperature=0.9, n=2), request("b", 6, 3)])
    names = ("request_id", "sample", "output_tokens", "cached_tokens")
    rows = [tuple(row[name] for name in names) for row in recorder.requests()]
    assert rows == [("a", 0, 3, 0), ("a", 1, 3, 5), ("b", 0, 3, 0)]
    assert {(row["request_id"], row["sample"]) for row in recorder.tokens()} == {("a", 0), ("a", 1), ("b", 0)}


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_set_back_comes_back_by_copying(kind: str, tmp_path: Path) -> None:
    requests = [request(f"r{i}", 9, 14, temperature=0.9, seed=i) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    place = {"kind": kind, "bytes": 2**16} | ({"path": str(tmp_path / "pages")} if kind == "file" else {})
    runner = runner_of(MODEL, pages=9, offload=place)
    poisoned(runner)
    events = list(runner.stream(requests))
    backs = [event for event in events if isinstance(event, SetBack)]
    assert backs and all("pages saved on the host" in event.reason for event in backs)
    assert any("tokens come back from the host" in e.reason for e in events if isinstance(e, Planned))
    ends = {e.request_id: e for e in events if isinstance(e, Finished)}
    assert {name: end.token_ids for name, end in ends.items()} == roomy
    assert all(end.computed_tokens == 9 + 14 - 1 for end in ends.values()), "nothing was computed twice"
    assert sum(end.restored_tokens for end in ends.values()) > 0
    runner.scheduler.holdings.carried_out()
    assert runner.cache.host is not None and all(room.used == 0 for room in runner.cache.host.rooms)
    path = tmp_path / "pages"
    assert path.exists() == (kind == "file")
    del runner
    gc.collect()  # the oracle and the runner hold each other
    assert not path.exists()


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096:] = bytes(byte ^ 1 for byte in raw[4096:])
    with path.open("r+b") as file:
        file.write(raw)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage, "is not what was saved there"),
        (Path.unlink, "is gone"),
        (lambda path: path.open("r+b").truncate(5000), "has 5000 bytes where"),
    ],
)
def test_a_damaged_file_ends_one_request(harm, words: str, tmp_path: Path) -> None:
    requests = [request(f"r{i}", 9, 14) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    path = tmp_path / "pages"
    runner = runner_of(MODEL, pages=9, offload={"kind": "file", "path": str(path), "bytes": 2**16})
    poisoned(runner)
    ends, hurt = {}, ""
    for event in runner.stream(requests):
        if isinstance(event, SetBack) and not hurt:
            hurt = event.request_id
        elif hurt and path.exists() and not ends and isinstance(event, Stepped):
            harm(path)
            harm = lambda path: None  # noqa: E731
        if isinstance(event, Finished):
            ends[event.request_id] = event
    broken = {name for name, end in ends.items() if end.reason == "error"}
    assert hurt in broken and all(words in ends[name].error for name in broken)
    assert {name: end.token_ids for name, end in ends.items() if name not in broken} == {
        name: tokens for name, tokens in roomy.items() if name not in broken
    }
    assert len(broken) < 4 and runner.scheduler.pages_used == 0


def test_offload_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="give at least"):
        runner_of(MODEL, offload={"kind": "memory", "bytes": 10})
    with pytest.raises(WorkbenchError, match="cannot write .*No such file"):
        runner_of(MODEL, offload={"kind": "file", "path": str(tmp_path / "no" / "pages")})
    mine = tmp_path / "thesis.txt"
    mine.write_text("three years of work")
    with pytest.raises(WorkbenchError, match="holds something else"):
        runner_of(MODEL, offload={"kind": "file", "path": str(mine)})
    assert mine.read_text() == "three years of work"
    with pytest.raises(WorkbenchError, match="offload: .*give none or memory"):
        runner_of(MODEL, offload="disk")
    with pytest.raises(WorkbenchError, match="prefix: .*give off or radix"):
        runner_of(MODEL, prefix={"kind": "radix", "ttl": -1})
    first = runner_of(MODEL, offload={"kind": "file", "path": str(tmp_path / "p"), "bytes": 2**16})
    with pytest.raises(WorkbenchError, match="in use by another runner"):
        runner_of(MODEL, offload={"kind": "file", "path": str(tmp_path / "p"), "bytes": 2**16})
    assert not first.busy


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("kind", [layer(4, 2, window=WINDOW), SINKS])
def test_a_window_bounds_memory(length: int, kind: LayerKind) -> None:
    """Twenty times the window: no more pages at the end than soon after its beginning."""
    model = model_of(spec_of(kind, kind).model_copy(update={"context": 160}))
    runner = runner_of(model, pages=8, page_size=2, max_num_batched_tokens=4)
    (poisoned if kind is not SINKS else Poison)(runner)
    used, ids = [], list(request("a", length, 1).prompt_ids)
    for event in runner.stream([request("a", length, 20 * WINDOW + 10)]):
        used += [event.pages_used] if isinstance(event, Stepped) else []
        if isinstance(event, Decoded):
            assert event.token_id == int(model.logits(ids)[-1].argmax())
            ids.append(event.token_id)
    assert len(used) >= 20 * WINDOW
    assert max(used[-WINDOW:]) <= max(used[: 2 * WINDOW]) <= (6 if kind is SINKS else 4)
    end = generate(runner, [request("b", 20 * WINDOW, 3)])["b"]
    assert end.token_ids == generate(runner_of(model, page_size=50), [request("b", 20 * WINDOW, 3)])["b"].token_ids


def test_a_refusal_counts_what_is_needed_at_once() -> None:
    spec = spec_of(layer(4, 2, window=WINDOW)).model_copy(update={"context": 400})
    runner = runner_of(model_of(spec), pages=4, page_size=2, max_num_batched_tokens=4)
    refused = generate(runner, [request("a", 100, 100)])["a"]
    # Positions t - 4 .. t + 3 are touched at once: eight, which meet five pages of two.
    assert refused.reason == "refused" and "need 5 pages of 2 tokens at once in layers that see 5" in refused.error
    enough = runner_of(model_of(spec), pages=5, page_size=2, max_num_batched_tokens=4)
    assert generate(enough, [request("a", 100, 9)])["a"].reason == "length"


def test_n_is_a_count() -> None:
    with pytest.raises(ValueError, match="n"):
        SamplingParameters(n=0)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_idle_conversation_waits_on_the_host(kind: str, tmp_path: Path) -> None:
    """Its pages leave the cache when others need the room, and come back when it goes on."""
    place = {"kind": kind, "bytes": 2**16} | ({"path": str(tmp_path / "pages")} if kind == "file" else {})
    runner = runner_of(MODEL, pages=7, prefix="radix", offload=place)
    poisoned(runner)
    generate(runner, [asked("a", 17, 3, 5)])
    generate(runner, [asked("b", 17, 9, 2, beginning=1)])  # seven pages: the cache is full of them
    found = generate(runner, [asked("again", 17, 3, 5)])["again"]
    assert (found.cached_tokens, found.computed_tokens) == (16, 4 + 4)
    assert found.token_ids == generate(runner_of(MODEL), [asked("again", 17, 3, 5)])["again"].token_ids
    if kind == "file":
        generate(runner, [asked("c", 17, 9, 2, beginning=2)])
        damage(tmp_path / "pages")
        broken, well = generate(runner, [asked("broken", 17, 3, 5), asked("well", 2, 3, 5, beginning=3)]).values()
        assert broken.reason == "error" and "is not what was saved there" in broken.error
        assert well.reason == "length"
        assert generate(runner, [asked("once more", 17, 3, 5)])["once more"].reason == "length", "it is forgotten"
    runner.forget_prefixes()
    runner.scheduler.holdings.carried_out()
    assert all(pool.free == pool.pages for pool in runner.scheduler.pools)
    assert runner.cache.host is not None and all(room.used == 0 for room in runner.cache.host.rooms)


@pytest.mark.parametrize("lacks", ["fcntl", "posix_fallocate"])
def test_where_files_cannot_hold_pages_only_they_are_refused(tmp_path: Path, lacks: str, monkeypatch) -> None:
    if lacks == "fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    runpy.run_path(str(Path(host.__file__)))  # it can be imported there
    assert runner_of(MODEL, offload="memory").cache.host is not None
    with pytest.raises(WorkbenchError, match="on Linux only; set offload: memory"):
        runner_of(MODEL, offload={"kind": "file", "path": str(tmp_path / "pages")})
    assert not (tmp_path / "pages").exists()
