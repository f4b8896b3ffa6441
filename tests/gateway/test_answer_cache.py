"""Kept answers: for the very same call, never a cut one, and for similar questions only where their facts agree."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from tests.event_loop import run_async
from tests.gateway.calls import Json, answer, chat
from tests.gateway.redis_server import RedisServer
from tests.patience import limit
from tests.thorough import tries
from workbench.custom import load_custom
from workbench.gateway.answer_cache import (
    AnswerCache,
    AnswerCacheConfig,
    SemanticConfig,
    exact_key,
    is_whole,
    read_pieces,
    replayed,
    write_pieces,
)
from workbench.gateway.answer_store import MemoryAnswers, RedisAnswers
from workbench.gateway.similarity import cosine, facts_differ, unit
from workbench.request import CustomPart
from workbench.serve.answers.pieces import (
    Ended,
    Failed,
    Piece,
    PromptRead,
    Text,
    Thought,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.call import Breakpoint, Call, Caller

IDS = ((1, 2, 3),)
LOGPROBS = st.floats(-50, 0) | st.just(-math.inf) | st.none()
TOKENS = st.lists(
    st.builds(TokenLogprob, st.integers(0, 9), LOGPROBS, st.just(((3, -1.5), (4, -2.0)))), max_size=2
).map(tuple)
TEXTS = st.text(max_size=5) | st.just("\ud800")
ID_TUPLES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
PIECES = st.one_of(
    st.builds(
        PromptRead, st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), ID_TUPLES, TOKENS
    ),
    st.builds(Text, st.integers(0, 3), TEXTS, ID_TUPLES, TOKENS),
    st.builds(Thought, st.integers(0, 3), TEXTS, ID_TUPLES),
    st.builds(ToolCallBegun, st.integers(0, 3), st.integers(0, 3), TEXTS, TEXTS),
    st.builds(ToolArguments, st.integers(0, 3), st.integers(0, 3), TEXTS),
    st.builds(Ended, st.integers(0, 3), st.just("stop"), st.none() | TEXTS | st.integers(0, 9), ID_TUPLES),
    st.builds(Used, st.just(0), *[st.integers(0, 9)] * 7, cache_written_by_ttl=st.just(((300.0, 4), (3600.0, 5)))),
)


@settings(max_examples=tries(60))
@given(st.lists(PIECES, max_size=8))
def test_what_is_read_back_is_what_was_written(pieces: list[Piece]) -> None:
    assert list(read_pieces(write_pieces(pieces))) == pieces


def cache(**values: Any) -> AnswerCache:
    return AnswerCache(AnswerCacheConfig(**values))


async def found(cache: AnswerCache, call: Call, ids: Any = IDS, fingerprint: str = "demo@1") -> Any:
    return await cache.find(call, fingerprint, ids)


SAME = {"temperature": 0, "max_tokens": 16}
OTHERS: list[Json] = [
    {"sampling": SAME | {"max_tokens": 17}},
    {"sampling": SAME | {"n": 2}},
    {"sampling": SAME | {"stop": ("x",)}},
    {"sampling": SAME | {"logprobs": 1}},
    {"sampling": SAME | {"repetition_penalty": 1.5}},
    {"sampling": SAME | {"response_format": {"kind": "regex", "regex": "a+"}}},
    {"sampling": {"temperature": 0.5, "seed": 0, "max_tokens": 16}},
    {"caller": Caller("key", "bob", "other salt")},
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"echo": True},
    {"prompt_logprobs": 0},
]


@pytest.mark.parametrize("other", OTHERS, ids=[str(each)[:60] for each in OTHERS])
def test_a_call_that_may_be_answered_otherwise_does_not_hit(other: Json) -> None:
    async def run() -> None:
        kept = cache()
        assert await kept.keep(chat(sampling=SAME), "demo@1", IDS, answer())
        hit, why = await found(kept, chat(sampling=SAME, dialect="anthropic.messages", stream=True))
        assert hit is not None and why == "exact"
        assert (await found(kept, chat("What is 2 + 3?", "demo", **({"sampling": SAME} | other))))[0] is None
        assert (await found(kept, chat(sampling=SAME), ids=((1, 2, 4),)))[0] is None
        assert (await found(kept, chat(sampling=SAME), ids=((1, 2), (3,))))[0] is None
        assert (await found(kept, chat(sampling=SAME), fingerprint="demo@2"))[0] is None

    run_async(run())


def test_only_greedy_and_seeded_calls_are_kept_and_a_seed_of_0_is_a_seed() -> None:
    async def run() -> None:
        kept = cache()
        random_seed = chat(sampling={"temperature": 1.0, "seed": 7}, has_seed=False)
        for drawn in (chat(sampling={"temperature": 1.0}), random_seed):
            assert not await kept.keep(drawn, "demo@1", IDS, answer())
            assert await found(kept, drawn) == (None, "sampled without a seed")
        seeded = chat(sampling={"temperature": 1.0, "seed": 0})
        assert await kept.keep(seeded, "demo@1", IDS, answer())
        assert (await found(kept, seeded))[0] is not None
        assert (await found(kept, chat(sampling={"temperature": 1.0, "seed": 1})))[0] is None
        for undrawn in (SAME, {"beams": 2}):  # such an answer does not depend on it
            assert len({exact_key(chat(sampling=undrawn | {"seed": seed}), "", IDS) for seed in (3, 4)}) == 1

    run_async(run())


@pytest.mark.parametrize("reason", ["content_filter", "cancelled", "context"])
def test_no_cut_failed_or_stopped_answer_is_kept(reason: Any) -> None:
    call = chat(sampling=SAME | {"n": 2})
    whole = answer(choices=2)
    assert is_whole(call, whole)
    assert not is_whole(call, whole[:-1]) and not is_whole(call, answer(choices=1))
    assert not is_whole(call, [*whole[:-2], Failed()])
    place = next(n for n, each in enumerate(whole) if isinstance(each, Ended))
    assert not is_whole(call, [*whole[:place], Ended(0, reason), *whole[place + 1 :]])


@given(st.integers(0, 40))
def test_no_beginning_of_an_answer_is_whole(length: int) -> None:
    whole = answer("some text")
    assert is_whole(chat(), whole[:length]) == (length >= len(whole))


def test_a_replay_has_calls_of_its_own_and_says_where_it_comes_from() -> None:
    kept = [ToolCallBegun(0, 0, "call_1", "look"), ToolArguments(0, 0, "{}"), Ended(0, "tool_calls"), Used(0, 5, 3)]
    first, second = replayed(kept), replayed(kept)
    begun = [each.id for each in (first[0], second[0]) if isinstance(each, ToolCallBegun)]
    assert len({*begun, "call_1"}) == 3 and all(id.startswith("call_") for id in begun)
    assert first[1:] == (*kept[1:3], replace(kept[3], from_kept_answer=True))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=tries(40))
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 3)), max_size=30))
def test_memory_stays_within_its_bytes_and_forgets_in_time(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        clock = Clock()
        store = MemoryAnswers(60, clock)
        written: dict[str, tuple[float, bytes]] = {}
        for key, size, passed in steps:
            clock.now += passed
            value = key.encode() * size
            await store.put(key, value, 5.0)
            written[key] = (clock.now + 5.0, value)
            assert store.num_bytes <= 60
            for each, (expiry, content) in written.items():
                assert await store.get(each) in ((None, content) if clock.now < expiry else (None,))
            assert await store.get(key) == value
            used = list(store._values)
            assert used[-1] == key
            if used[0] != key:
                await store.get(used[0])
                assert list(store._values) == [*used[1:], used[0]], "what was used last is forgotten last"

    run_async(run())


@given(st.floats(1e-6, 1e6))
def test_redis_is_given_milliseconds_and_at_least_one(seconds: float) -> None:
    kept = list[int]()

    async def keep(key: str, value: bytes, px: int) -> None:
        kept.append(px)

    store: Any = SimpleNamespace(_prefix="", _client=SimpleNamespace(set=keep))
    run_async(RedisAnswers.put(store, "key", b"value", seconds))
    assert kept[0] >= 1 and kept[0] == pytest.approx(1e3 * seconds, abs=1)


def test_redis_keeps_for_a_time_and_is_missed_when_it_is_gone(own_redis: RedisServer) -> None:
    async def run() -> None:
        store = RedisAnswers(own_redis.url)
        kept = AnswerCache(AnswerCacheConfig(ttl_seconds=100), store)
        assert await kept.keep(chat(), "demo@1", IDS, answer())
        other = AnswerCache(AnswerCacheConfig(redis=own_redis.url))
        assert (await found(other, chat()))[1] == "exact"
        own_redis.kill()
        assert (await found(other, chat()))[0] is None
        assert await other.keep(chat(), "demo@1", IDS, answer())  # without an error
        assert (await found(other, chat()))[0] is None
        own_redis.start()
        assert await kept.keep(chat(), "demo@1", IDS, answer())
        assert (await found(other, chat()))[1] == "exact"
        await kept.close()
        await other.close()

    run_async(run())


class BrokenAnswers(MemoryAnswers):
    """A store that has lost its server, or holds what no gateway wrote."""

    def __init__(self, error: Exception | None):
        super().__init__(1 << 20)
        self._error = error

    async def get(self, key: str) -> bytes | None:
        if self._error is not None:
            raise self._error
        return b"not what was written"

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, OSError("gone"), TimeoutError("late"), RuntimeError("a fault")])
def test_an_error_of_the_store_costs_the_hit_alone(error: Exception | None) -> None:
    async def run() -> None:
        config = AnswerCacheConfig(semantic=SemanticConfig(embedding=CustomPart(path="test-letters")))
        kept = AnswerCache(config, BrokenAnswers(error))
        hit, why = await found(kept, chat())
        assert hit is None and why.startswith("failed: ") and kept.misses == 1 and kept.hits["exact"] == 0
        assert not await kept.keep(chat(), "demo@1", IDS, answer())

    run_async(run())


def test_an_embedding_that_fails_or_hangs_costs_the_hit_alone() -> None:
    wakes = threading.Event()

    @workbench.register("test-hangs")
    def hangs(texts: list[str]) -> list[list[float]]:
        if "hang" in texts[0]:
            wakes.wait()
        if "fail" in texts[0]:
            raise RuntimeError("no vector today")
        return letters(texts)

    async def run() -> None:
        part = CustomPart(path="test-hangs")
        kept = cache(semantic=SemanticConfig(embedding=part, seconds=0.01))
        while not await kept.keep(chat("a good question"), "demo@1", IDS, answer()):
            pass  # on a busy machine the embedding, too, may be late
        for word in ("hang", "fail"):
            hit, why = await found(kept, chat(f"a question to {word}"), ids=((9,),))
            assert hit is None and why.startswith("failed: ")
            assert not await kept.keep(chat(f"a question to {word}"), "demo@1", ((8,),), answer())
            assert (await found(kept, chat("a good question")))[1] == "exact"
        wakes.set()

    run_async(run())


@pytest.mark.parametrize("values", [{"breakpoints": (Breakpoint("system"),)}, {"only_warms": True}])
def test_a_call_that_asks_for_work_passes_by(values: Json) -> None:
    async def run() -> None:
        kept = cache()
        assert await kept.keep(chat(), "demo@1", IDS, answer())
        hit, why = await found(kept, chat(**values))
        assert hit is None and "cache" in why
        assert not await kept.keep(chat(**values), "demo@1", ((7,),), answer())
        assert (await found(kept, chat()))[1] == "exact"

    run_async(run())


@workbench.register("test-letters")
def letters(texts: list[str]) -> list[list[float]]:
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


def semantic(**values: Any) -> AnswerCache:
    return cache(semantic=SemanticConfig(embedding=CustomPart(path="test-letters"), **values))


@pytest.mark.parametrize("second_gate", [True, False])
def test_a_similar_question_hits_only_where_the_facts_agree(second_gate: bool) -> None:
    async def run() -> None:
        kept = semantic(second_gate=second_gate, threshold=0.8)
        await kept.keep(chat("How do I enable the cache?"), "demo@1", IDS, answer("so"))
        hit, why = await found(kept, chat("How do I enable a cache?"), ids=((9,),))
        assert hit is not None and why.startswith("semantic") and isinstance(hit[-1], Used)
        (read,) = (each for each in hit if isinstance(each, PromptRead))
        assert read.token_ids == (9,) and (read.prompt_tokens, hit[-1].prompt_tokens) == (1, 1)  # its own prompt's
        hit, why = await found(kept, chat("How do I disable the cache?"), ids=((9,),))
        assert (hit is None) == second_gate and ("disable" in why) == second_gate
        bob = chat("How do I enable a cache?", caller=Caller("key", "bob", "other salt"))
        assert (await found(kept, bob, ids=((9,),)))[0] is None
        assert (await found(kept, chat("How do I enable a cache?", system="Rhyme."), ids=((9,),)))[0] is None

    run_async(run())


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("How do I enable TLS?", "How do I disable TLS?", "negations"),
        ("Add 3 and 4", "Subtract 3 and 4", "opposites"),
        ("What is 2 + 3?", "What is 2 + 4?", "numbers"),
        ("The capital of France", "The capital of Spain", "names"),
        ("Is it safe to delete?", "Is it not safe to delete?", "negations"),
        ("What does `git pull` do?", "What does `git push` do?", "code"),
        ("How to lock a file", "How to unlock a file", "negations"),
        ("encode the text", "decode the text", "negations"),
        ("connect the cable", "disconnect the cable", "negations"),
        ("What does np.max return?", "What does np.min return?", "code"),
        ("Can cats eat grapes?", "Can dogs eat grapes?", "words"),
        ("how is the weather in paris", "how is the weather in rome", "words"),
        ("Convert 5 miles to kilometers", "Convert 5 kilometers to miles", "order"),
    ],
)
def test_the_second_gate_is_closed_for_other_facts(one: str, other: str, kind: str) -> None:
    assert facts_differ(one, other).startswith(kind) and facts_differ(other, one).startswith(kind)
    assert facts_differ(one, one) == facts_differ(other, other) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I enable the cache?", "How can I enable the cache, please?"),
        ("What is the capital of France?", "Tell me the capital of France"),
        ("Explain 2 + 3", "explain 2 + 3."),
        ("Why is the sky blue?", "What makes the sky look blue?"),
    ],
)
def test_the_second_gate_is_open_for_other_words(one: str, other: str) -> None:
    assert facts_differ(one, other) == ""


@given(st.text("abc DIS not12.'`", max_size=40), st.text("abc DIS not12.'`", max_size=40))
def test_the_second_gate_is_symmetric(one: str, other: str) -> None:
    assert bool(facts_differ(one, other)) == bool(facts_differ(other, one))
    assert facts_differ(one, one) == ""


def test_the_vectors_of_a_package_are_there_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wordllama", reason="the vectors: pip install wordllama")
    monkeypatch.delattr("requests.get")
    texts = ["How do I enable the cache?", "How can I enable the cache, please?", "Who wrote Hamlet?"]
    here, alike, other = map(unit, load_custom(SemanticConfig().embedding)(texts))
    assert cosine(here, alike) > 0.8 > 0.4 > cosine(here, other)


def test_similar_questions_are_the_newest_and_live_as_long_as_they_are_kept() -> None:
    async def run() -> None:
        clock = Clock()
        store = MemoryAnswers(1 << 20, clock)
        part = SemanticConfig(embedding=CustomPart(path="test-letters"), candidates=2, seconds=limit(60))
        kept = AnswerCache(AnswerCacheConfig(exact=False, semantic=part, ttl_seconds=10), store)
        words = ("apples", "bridges", "clouds")
        for word in words:
            await kept.keep(chat(f"what of {word}?"), "demo@1", IDS, answer(word))
        hits = [(await found(kept, chat(f"so, what of {word}?")))[0] is not None for word in words]
        assert hits == [False, True, True]
        clock.now = 9.0
        assert (await found(kept, chat("what of clouds?")))[0] is not None
        clock.now = 10.0
        assert not any([await store.get(key) for key in [*store._values]])

    run_async(run())
