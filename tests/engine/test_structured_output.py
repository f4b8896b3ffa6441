"""Answers of a grammar: they are valid, they are the oracle's under the same mask, and no batch, chunk, draft or
preemption changes them."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections import deque
from functools import cache, partial
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.calls import refusal_of
from tests.engine.formats import CONTEXT, FORMATS, RUNNERS, TREE, ask, model, result, runner
from tests.engine.guesses import Guesses, drafts
from tests.engine.tiny import runner_of
from tests.patience import limit
from tests.prompt.samples import byte_level, trained
from tests.thorough import THOROUGH, tries
from workbench.engine import naive
from workbench.engine.replay import replay
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat
from workbench.sampling.constraint import Constraint
from workbench.sampling.grammar import (
    LIMITS,
    MAX_COMPILE_SECONDS,
    NODES_AT_A_TIME,
    SEARCHED_NODES,
    Grammar,
    GrammarVocabulary,
)
from workbench.sampling.samplers import SampledToken
from workbench.trace.events import Decoded, Finished
from workbench.trace.recorder import Recorder
from workbench.trace.script import StepScript

ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@cache
def grammar(name: str, words: bool = False) -> Grammar:
    return GrammarVocabulary(trained() if words else byte_level()).compile(FORMATS[name])


def check_whitespace(text: str, most: int | None) -> None:
    """Assert that no more than `most` spaces lie between two tokens of JSON; None: those of `json.dumps`."""
    unwanted = r"[:,](?! )|(?<![:,])\s" if most is None else rf"\s{{{most + 1}}}"
    assert not re.search(unwanted, re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))


def check_valid(form: ResponseFormat, end: Finished) -> None:
    """Hold an answer against its format, by other means than llguidance."""
    assert end.reason in ("stop", "length"), end.error
    if isinstance(form, JSONSchema):
        jsonschema.validate(json.loads(end.output_text), form.json_schema)
        check_whitespace(end.output_text, form.max_whitespace)
    elif isinstance(form, Choices):
        assert end.output_text in form.choices
    elif isinstance(form, Regex):
        assert re.fullmatch(form.regex, end.output_text)
    elif form is FORMATS["lark"]:
        assert re.fullmatch(r"[()+0-9]+", end.output_text) and eval(re.sub(r"\d+", "1", end.output_text)) > 0
    else:
        controls = byte_level().special_token_ids  # the same ids in both tokenizers
        assert end.token_ids[0] == controls["<|tool|>"] and end.token_ids[-1] == controls["<|turn|>"]
        assert "a" in json.loads(end.output_text)
        check_whitespace(end.output_text, None)


@settings(max_examples=tries(60), deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=5),
    most=st.integers(1, 70),
    temperature=st.sampled_from([0.0, 1.0, 5.0]),
    seed=st.integers(0, 10_000),
    eos=st.sampled_from([(), (1,), (1, 9, 44)]),
    words=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_every_answer_is_valid_within_its_limit(names, most, temperature, seed, eos, words, ignore_eos) -> None:
    """Or the request is refused before anything is computed, because not even the shortest answer has room."""
    asked = [
        ask(f"r{i}", name, most, temperature=temperature, seed=seed + i, ignore_eos=ignore_eos, n=1 + i % 2)
        for i, name in enumerate(names)
    ]
    free = ask("free", "any", 12)
    free = Request("free", free.prompt_ids, SamplingParameters(max_tokens=12, temperature=0, ignore_eos=True))
    ends = generate(runner(eos, words), [*asked, free])
    assert len(ends["free"].token_ids) == 12
    for each in asked:
        for name in [each.request_id] + [f"{each.request_id}#1"] * (each.sampling.n - 1):
            end = ends[name]
            if end.reason == "refused":
                assert "its shortest answer has" in end.error and not end.token_ids
                continue
            assert each.sampling.response_format is not None
            check_valid(each.sampling.response_format, end)
            assert len(end.token_ids) <= most and (end.ended_by == "max_tokens") == (end.reason == "length")


def prefixes(form: Choices, text: bytes) -> list[bytes]:
    return [rest[len(text) :] for rest in (each.encode() for each in form.choices) if rest.startswith(text)]


def test_greedy_choices_are_the_oracles_under_a_mask_of_prefixes() -> None:
    """The mask is written anew here, from the choices' bytes."""
    form = FORMATS["choices"]
    assert isinstance(form, Choices)
    tokenizer, eos = trained(), (1, 9)
    ours = model(eos, tokenizer.vocab_size + 3)
    for text in ("a", "yes or no: ", "def f(x):\n"):
        ids = list(tokenizer.encode(text))
        answer: list[int] = []
        while True:
            said = b"".join(map(tokenizer.token_bytes, answer))
            left = prefixes(form, said)
            if left == [b""]:
                break
            allowed = [
                id
                for id in range(tokenizer.vocab_size)
                if not tokenizer.is_special(id) and tokenizer.token_bytes(id)
                and any(rest.startswith(tokenizer.token_bytes(id)) for rest in left)
            ] + [id for id in eos if b"" in left]  # fmt: skip
            row = naive.logits(ours, torch.tensor(ids + answer))[-1]
            answer.append(max(allowed, key=lambda id: (float(row[id]), -id)))
            if answer[-1] in eos:
                break
        asked = Request("r", tuple(ids), SamplingParameters(response_format=form, temperature=0, max_tokens=40))
        assert generate(runner(eos, words=True), [asked])["r"].token_ids == tuple(answer)


def oracle(asked: Request, words: bool, eos: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the greedy answer of the whole text computed anew for each token, under a mask of a fresh constraint."""
    tokenizer = trained() if words else byte_level()
    name = next(name for name, form in FORMATS.items() if form is asked.sampling.response_format)
    ours = model(eos, tokenizer.vocab_size + 3)
    constraint = Constraint(asked, tokenizer, ours.spec.vocab_size, CONTEXT, eos, grammar(name, words))
    ids: list[int] = list(asked.prompt_ids)
    while True:
        row = naive.logits(ours, torch.tensor(ids))[-1].clone()
        row[torch.from_numpy(constraint.banned()[0])] = -torch.inf
        token, completes = constraint.advance(SampledToken(int(row.argmax()))) or pytest.fail("it waits")
        ids.append(token)
        if completes or token in eos or len(ids) - len(asked.prompt_ids) == asked.sampling.max_tokens:
            return tuple(ids[len(asked.prompt_ids) :])


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_greedy_answers_are_the_oracles(name: str, words: bool) -> None:
    for most, eos in ((30, (1,)), (60, ())):
        asked = ask("r", name, most, prompt="x = 1\n")
        if words:
            asked = Request("r", tuple(trained().encode("x = 1\n")), asked.sampling)
        end = generate(runner(eos, words), [asked])["r"]
        assert end.token_ids == oracle(asked, words, eos)


ASKED = [
    ask(f"r{i}", name, 40 + i, prompt="shared beginning of a prompt " + "b" * (7 * i), seed=i, **sampling)
    for i, (name, sampling) in enumerate(
        (name, sampling) for name in sorted(FORMATS) for sampling in ({}, {"temperature": 1.5}) if name != "numbers"
    )
]


@cache
def alone() -> dict[str, tuple]:
    return {each.request_id: result(generate(runner((1,)), [each]))[each.request_id] for each in ASKED}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16, "prefix": "radix"},
        {"pages": 34, "max_num_seqs": 6},
        {"pages": 34, "prefix": "radix", "max_num_batched_tokens": 11},
    ],
    ids=str,
)
def test_batching_chunks_prefixes_and_preemption_change_nothing(settings: dict) -> None:
    recorder = Recorder()
    ends = generate(runner((1,), listener=recorder.record, **settings), ASKED)
    assert result(ends) == alone()
    if settings.get("pages") == 34:
        assert any(event.kind == "preempted" for event in recorder.events)


@pytest.mark.parametrize("accept", ["rejection", "match"])
@settings(max_examples=tries(8), deadline=None)
@given(seed=st.integers(0, 999), right=st.floats(0, 1), most=st.integers(1, 6))
def test_drafts_change_nothing(accept, seed: int, right: float, most: int) -> None:
    """Under rejection sampling greedy answers stay; where drafts are accepted by match, sampled ones do too."""
    asked = [each for each in ASKED if accept == "match" or each.sampling.temperature == 0]
    answers = {name: ids for name, (ids, *_) in alone().items()}
    speculator = drafts(Guesses(answers, seed, right), most, accept=accept)
    speculator.max_model_len = CONTEXT
    ends = generate(runner((1,), speculator=speculator), asked)
    assert result(ends) == {each.request_id: alone()[each.request_id] for each in asked}


def test_right_drafts_are_accepted_within_a_grammar() -> None:
    answers = {name: ids for name, (ids, *_) in alone().items()}
    recorder = Recorder()
    speculator = drafts(Guesses(answers, 0, 1.0), 4)
    speculator.max_model_len = CONTEXT
    generate(runner((1,), speculator=speculator, listener=recorder.record), ASKED[::2])
    verified = [event for event in recorder.events if event.kind == "verified"]
    accepted, drafted = (sum(getattr(event, name) for event in verified) for name in ("accepted", "drafted"))
    assert drafted > 50 and accepted > 0.9 * drafted  # the rest wait for an end, or are replaced


def test_sampling_is_the_models_distribution_masked_and_renormalized() -> None:
    """Exactly, for every beginning of every choice."""
    form = Choices(choices=("a", "ab", "abc", "ba", "bb"))
    tokenizer, eos = byte_level(), (1,)
    ours = model(eos, tokenizer.vocab_size + 3)
    prompt = tuple(tokenizer.encode("p"))
    seen: dict[bytes, dict[int, float]] = {}
    for seed in range(40):
        sampling = SamplingParameters(
            response_format=form, seed=seed, max_tokens=20, logprobs=100, logprobs_of="filtered", temperature=1.0
        )
        box = list(runner_events(Request("r", prompt, sampling), eos))
        said = b""
        for event in box:
            if isinstance(event, Decoded):
                found = {token: math.exp(logprob) for token, logprob in event.top_logprobs}
                ids = [*prompt, *tokenizer.encode(said.decode())]
                row = naive.logits(ours, torch.tensor(ids))[-1].double()
                left = prefixes(form, said)
                allowed = sorted({tokenizer.encode(chr(rest[0]))[0] for rest in left if rest})
                allowed += list(eos) if b"" in left else []
                wanted = dict(zip(allowed, row[allowed].softmax(-1).tolist(), strict=True))
                assert found == pytest.approx(wanted, abs=1e-6)
                seen.setdefault(said, found)
                said += b"" if event.token_id in eos else tokenizer.token_bytes(event.token_id)
        assert said.decode() in form.choices
    assert len(seen) >= 4


def runner_events(asked: Request, eos: tuple[int, ...]):
    return RUNNERS(eos).stream([asked])


def test_logprobs_of_the_model_are_without_the_mask() -> None:
    asked = ask("r", "choices", 20, logprobs=0)
    ours = model((), byte_level().vocab_size + 3)
    events = [event for event in RUNNERS(()).stream([asked]) if isinstance(event, Decoded)]
    row = naive.logits(ours, torch.tensor(asked.prompt_ids))[-1].log_softmax(-1)
    assert events[0].logprob == pytest.approx(float(row[events[0].token_id]), abs=1e-6)


def test_a_control_token_written_in_a_choice_is_text() -> None:
    end = generate(RUNNERS((1,)), [ask("r", Choices(choices=("a <|tool|> b",)), 40)])["r"]
    assert end.output_text == "a <|tool|> b" and not any(map(byte_level().is_special, end.token_ids))


@settings(max_examples=tries(25), deadline=None)
@given(data=st.data())
def test_every_valid_instance_in_canonical_form_is_admitted(data: st.DataObject) -> None:
    trees = st.deferred(lambda: tree)
    names = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=6)
    small = st.fixed_dictionaries(
        {"name": names, "age": st.integers(0, 200)}, optional={"kind": st.sampled_from(["leaf", "branch", None])}
    )
    whole = st.builds(lambda a, b: {**a, "below": b}, small, st.lists(trees, max_size=2))
    tree = st.one_of(small, whole).map(lambda each: {key: each[key] for key in TREE["properties"] if key in each})
    instance = data.draw(trees)
    for words in (False, True):
        tokenizer = trained() if words else byte_level()
        text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
        ids = tokenizer.encode(text)
        matcher = grammar("compact", words).tokens.deep_copy()
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), text


@pytest.mark.parametrize("end", [7, 9])
def test_every_end_token_ends_a_complete_answer_and_no_other(end: int) -> None:
    """Also one that the request names; none before the answer is complete."""
    form = Regex(regex="[a-z]+")
    asked = ask("r", form, 50, stop_token_ids=(7,), logit_bias={7: 100 * (end == 7), 9: 100 * (end == 9)})
    found = generate(RUNNERS((1, 9)), [asked])["r"]
    assert len(found.token_ids) == 2 and (found.stop_reason, found.reason) == (end, "stop")


def test_a_stop_string_ends_an_answer() -> None:
    asked = ask("r", Choices(choices=("abcdef",)), 50, stop=("cd",))
    found = generate(RUNNERS((1,)), [asked])["r"]
    assert (found.output_text, found.ended_by, found.stop_reason) == ("ab", "stop_string", "cd")


def test_a_complete_answer_ends_the_request() -> None:
    found = generate(RUNNERS(()), [ask("r", Choices(choices=("abc",)), 50)])["r"]
    assert (found.output_text, found.reason, found.ended_by) == ("abc", "stop", "grammar")


def test_a_request_whose_grammar_compiles_can_be_cancelled_and_its_id_is_taken() -> None:
    ours = runner((1,))
    box: deque = deque()
    ours.tracker.compiling._compiler.vocabulary()
    job = ours.tracker.compiling._compiler.start(FORMATS["tree"])
    pending = type(job)(FORMATS["tree"])  # one that never ends
    ours.tracker.compiling._compiler._jobs = dict.fromkeys(ours.tracker.compiling._compiler._jobs, pending)  # type: ignore[assignment] (a plain dict does here)
    ours.tracker.compiling._compiler.start = lambda wanted: pending  # type: ignore[method-assign] (a stand-in)
    assert ours.submit(ask("r", "tree", n=2), box) == 2 and ours.has_unfinished_requests and not box
    assert ours.submit(ask("r#1", "choices"), box) == 1 and "already taken" in box[-1].error
    ours.step(box)
    box.clear()
    ours.cancel("r")
    assert [event.kind for event in box] == ["submitted", "submitted", "finished", "finished"]
    assert {event.reason for event in box if isinstance(event, Finished)} == {"cancelled"}
    assert not ours.has_unfinished_requests
    ours.submit(ask("s", "tree"), box)
    ours.cancel_all(box)
    assert not ours.has_unfinished_requests


def test_a_compilation_beyond_its_time_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that wait behind it: it may be in a part that cannot be interrupted."""
    compile_grammar, may_end = GrammarVocabulary.compile, threading.Event()

    def busy(self, wanted):
        while isinstance(wanted, Lark) and not may_end.is_set():
            pass
        return compile_grammar(self, wanted)

    monkeypatch.setattr("workbench.engine.compiling.MAX_COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(GrammarVocabulary, "compile", busy)
    ours = runner((1,))
    try:
        asked = [ask(f"r{i}", Lark(lark=f'start: "{i}"'), 40) for i in range(3)]
        ends = generate(ours, [*asked, ask("good", Choices(choices=("a",)))])
    finally:
        may_end.set()
    assert all(end.reason == "refused" and "not compiled within" in end.error for end in (ends["r0"], ends["r1"]))
    assert ends["good"].output_text == "a"


def test_the_time_of_a_compilation_is_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.engine.compiling.MAX_COMPILE_SECONDS", 0.05)
    compile_grammar = GrammarVocabulary.compile

    def waiting(self: GrammarVocabulary, wanted: ResponseFormat) -> Grammar:
        threading.Event().wait(limit(0.03))
        return compile_grammar(self, wanted)

    monkeypatch.setattr(GrammarVocabulary, "compile", waiting)
    assert generate(runner((1,)), [ask("r", Choices(choices=("a",)))])["r"].output_text == "a"


def test_a_compilation_checks_its_time_between_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And within the search of an end: a clock that jumps at any look at it ends the compilation, after little work."""
    looks, jumps_at = itertools.count(), math.inf
    monkeypatch.setattr("time.thread_time", lambda: 2 * MAX_COMPILE_SECONDS * (next(looks) >= jumps_at))
    compile_endless = partial(GrammarVocabulary(byte_level()).compile, JSONSchema(json_schema=ENDLESS))
    said, calls = refusal_of(compile_endless)
    assert "no end was found" in said and calls < 60 * SEARCHED_NODES
    all_looks = next(looks)
    assert all_looks > SEARCHED_NODES // NODES_AT_A_TIME
    for jumps_at in {*range(1, all_looks, 1 if THOROUGH else max(1, all_looks // 8)), all_looks - 1}:
        looks = itertools.count()
        assert "not compiled within" in refusal_of(compile_endless)[0] and next(looks) == jumps_at + 1


def test_the_compilers_own_work_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock interrupts llguidance, and no count of calls sees it: its fuel does."""
    limits: list[object] = []

    def counted(*values: Any, **named: Any) -> LLMatcher:
        limits.append(named.get("limits"))
        return LLMatcher(*values, **named)

    monkeypatch.setattr("workbench.sampling.grammar.LLMatcher", counted)
    vocabulary = GrammarVocabulary(byte_level())
    for each in FORMATS.values():
        vocabulary.compile(each)
    with pytest.raises(WorkbenchError, match="properties.a"):
        vocabulary.compile(JSONSchema(json_schema={"properties": {"a": {"pattern": "(?=a)b"}}}))
    assert len(limits) > 2 * len(FORMATS) and {id(each) for each in limits} == {id(LIMITS)}


def test_beams_and_models_without_a_tokenizer_refuse_it() -> None:
    with pytest.raises(ValueError, match="leave out response_format"):
        SamplingParameters(beams=2, response_format=FORMATS["tree"])
    bare = runner_of(model((), 269))
    ends = generate(bare, [ask("r", "tree")])
    assert ends["r"].reason == "refused" and "no tokenizer" in ends["r"].error


def test_the_check_of_whitespace_can_fail() -> None:
    end = Finished(0.0, reason="stop", output_text='{"name":  "", "age": 1}')
    with pytest.raises(AssertionError):
        check_valid(FORMATS["tree"], end)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"pages": 34, "prefix": "radix"}], ids=str)
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_token_that_waits_for_an_end_changes_nothing(settings: dict, nodes: int, monkeypatch) -> None:
    """Its row is computed once more, beside the search; the others go on."""
    monkeypatch.setattr("workbench.sampling.sampler.MAX_NODES_OF_SAMPLING", nodes)
    monkeypatch.setattr("workbench.sampling.masks.MAX_NODES_BESIDE_FORWARD", nodes)
    waits = _count_waits(monkeypatch)
    ends = generate(runner((1,), **settings), ASKED)
    assert result(ends) == alone() and len(waits) > 3


def _count_waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    waits: list[str] = []
    advance = Constraint.advance

    def noted(self, choice, budget=None):
        moved = advance(self, choice, budget)
        waits.extend(["waits"] * (moved is None))
        return moved

    monkeypatch.setattr(Constraint, "advance", noted)
    return waits


@pytest.mark.parametrize("accept", ["rejection", "match"])
def test_a_token_that_waits_under_drafts_changes_nothing(accept, monkeypatch) -> None:
    monkeypatch.setattr("workbench.sampling.sampler.MAX_NODES_OF_SAMPLING", 2)
    waits = _count_waits(monkeypatch)
    asked = [each for each in ASKED if accept == "match" or each.sampling.temperature == 0]
    for right in (0.5, 1.0):
        answers = {name: ids for name, (ids, *_) in alone().items()}
        speculator = drafts(Guesses(answers, 3, right), 4, accept=accept)
        speculator.max_model_len = CONTEXT
        ends = generate(runner((1,), speculator=speculator), asked)
        assert result(ends) == {each.request_id: alone()[each.request_id] for each in asked}
    assert len(waits) > 3


@pytest.mark.parametrize("nodes", [None, 5])
def test_a_recorded_run_with_grammars_is_replayed(nodes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is also where tokens wait for an end."""
    if nodes is not None:
        monkeypatch.setattr("workbench.sampling.sampler.MAX_NODES_OF_SAMPLING", nodes)
    recorder = Recorder()
    first = generate(runner((1,), listener=recorder.record), ASKED[:6])
    again = list(replay(runner((1,)), ASKED[:6], StepScript.from_recorder(recorder)))
    ends = {event.request_id: event for event in again if isinstance(event, Finished)}
    assert result(ends) == result(first)
