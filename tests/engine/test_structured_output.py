"""Answers of a grammar: they are valid, they are drawn from the oracle's distribution under a mask that is written anew
here, and no batch, chunk, draft or preemption changes them."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.calls import refusal_of
from tests.engine.formats import CONTEXT, FORMATS, RUNNERS, TREE, ask, model, result, runner
from tests.engine.guesses import Guesses, drafts
from tests.helpers.events import of
from tests.patience import limit
from tests.prompt.samples import byte_level, trained
from tests.thorough import THOROUGH, tries
from workbench.constrained.answer import GrammarAnswer
from workbench.constrained.grammar import (
    LIMITS,
    MAX_COMPILE_SECONDS,
    NODES_AT_A_TIME,
    SEARCHED_NODES,
    Grammar,
    GrammarVocabulary,
)
from workbench.engine.inputs import sample_id
from workbench.engine.replay import replay
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.response_format import Choices, JSONSchema, Lark, Regex, ResponseFormat
from workbench.trace.events import Decoded, Finished, Verified
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


@settings(max_examples=tries(60))
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
            assert len(end.token_ids) < most or end.ended_by != "grammar"


ASKED = [
    ask(f"r{i}", name, 40 + i, prompt="shared beginning of a prompt " + "b" * (7 * i), seed=i, **sampling)
    for i, (name, sampling) in enumerate(
        (name, sampling) for name in sorted(FORMATS) for sampling in ({}, {"temperature": 1.5}) if name != "numbers"
    )
]


@cache
def alone() -> dict[str, tuple]:
    return {each.request_id: result(generate(runner((1,)), [each]))[each.request_id] for each in ASKED}


@pytest.fixture
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[str]]:
    """Return a function that lets the search of an end take so many nodes a step, and gives a note of each token that
    waits for it: its row is computed once more."""

    def limit_nodes(nodes: int | None) -> list[str]:
        waits, advance = list[str](), GrammarAnswer.advance

        def noted(self, token, budget=None):
            taken = advance(self, token, budget)
            waits.extend(["waits"] * (taken == (None, None)))
            return taken

        if nodes is not None:
            monkeypatch.setattr("workbench.sampling.sampler.MAX_NODES_OF_SAMPLING", nodes)
            monkeypatch.setattr("workbench.constrained.masks.MAX_NODES_BESIDE_FORWARD", nodes)
        monkeypatch.setattr(GrammarAnswer, "advance", noted)
        return waits

    return limit_nodes


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (None, {}),
        (None, {"max_num_batched_tokens": 16, "prefix": "radix"}),
        (None, {"pages": 34, "max_num_seqs": 6}),
        (None, {"pages": 34, "prefix": "radix", "max_num_batched_tokens": 11}),
        (1, {"max_num_batched_tokens": 7}),
        (4, {}),
        (1, {"pages": 34, "prefix": "radix"}),
    ],
    ids=str,
)
def test_batches_chunks_prefixes_preemption_and_waits_change_nothing(
    nodes: int | None, settings: dict, few_nodes: Callable
) -> None:
    """And a replay of the steps gives the same."""
    waits, recorder = few_nodes(nodes), Recorder()
    ends = generate(runner((1,), listener=recorder.record, **settings), ASKED)
    assert result(ends) == alone() and (nodes is None or len(waits) > 3)
    assert settings.get("pages") != 34 or any(event.kind == "preempted" for event in recorder.events)
    again = replay(runner((1,), **settings), ASKED, StepScript.from_recorder(recorder))
    found = {sample_id(event.request_id, event.sample): event for event in of(Finished, again)}
    assert result(found) == alone()


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("accept", ["rejection", "match"])
def test_drafts_change_nothing(accept: str, nodes: int | None, few_nodes: Callable) -> None:
    """Under rejection sampling greedy answers stay; where drafts are accepted by match, sampled ones do too; right ones
    are accepted."""
    waits, answers = few_nodes(nodes), {name: ids for name, (ids, *_) in alone().items()}
    asked = [each for each in ASKED if accept == "match" or each.sampling.temperature == 0]

    @settings(max_examples=tries(8))
    @given(seed=st.integers(0, 999), right=st.floats(0, 1), most=st.integers(1, 6))
    @example(0, 1.0, 4)
    def law(seed: int, right: float, most: int) -> None:
        speculator, recorder = drafts(Guesses(answers, seed, right), most, accept=accept), Recorder()
        speculator.max_model_len = CONTEXT
        ends = generate(runner((1,), speculator=speculator, listener=recorder.record), asked)
        assert result(ends) == {each.request_id: alone()[each.request_id] for each in asked}
        checks = of(Verified, recorder.events)
        accepted, drafted = (sum(getattr(event, name) for event in checks) for name in ("accepted", "drafted"))
        # The rest wait for an end, or are replaced.
        assert right < 1 or nodes or drafted > 50 and accepted > 0.9 * drafted

    law()
    assert nodes is None or len(waits) > 3


@pytest.mark.parametrize("words", [False, True])
def test_sampling_is_the_models_distribution_masked_and_renormalized(words: bool) -> None:
    """Exactly, after every beginning: the mask is written anew here, from the choices' bytes and those of tokens."""
    tokenizer, eos = trained() if words else byte_level(), (1,)
    form = FORMATS["choices"] if words else Choices(choices=("a", "ab", "abc", "ba", "bb"))
    assert isinstance(form, Choices)
    texts = {id: tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size) if not tokenizer.is_special(id)}
    ours, prompt = model(eos, tokenizer.vocab_size + 3), tuple(tokenizer.encode("p"))
    runs, seen = runner(eos, words), set[bytes]()
    for seed in range(40):
        sampling = SamplingParameters(
            response_format=form, seed=seed, max_tokens=40, logprobs=100, logprobs_of="filtered", temperature=1.0
        )
        ids, said = list(prompt), b""
        for event in runs.stream([Request("r", prompt, sampling)]):
            if not isinstance(event, Decoded):
                continue
            left = [text.encode().removeprefix(said) for text in form.choices if text.encode().startswith(said)]
            allowed = [id for id, text in texts.items() if text and any(rest.startswith(text) for rest in left)]
            allowed += list(eos) if b"" in left else []
            row = naive.logits(ours, torch.tensor(ids))[-1].double()[allowed]
            wanted = dict(zip(allowed, row.softmax(-1).tolist(), strict=True))
            found = {token: math.exp(logprob) for token, logprob in event.top_logprobs}
            assert found == pytest.approx(wanted, abs=1e-6)
            seen.add(said)
            ids.append(event.token_id)
            said += texts.get(event.token_id, b"")
        assert said.decode() in form.choices
    assert len(seen) >= 4


def test_logprobs_of_the_model_are_without_the_mask() -> None:
    asked = ask("r", "choices", 20, logprobs=0)
    ours = model((), byte_level().vocab_size + 3)
    events = of(Decoded, RUNNERS(()).stream([asked]))
    row = naive.logits(ours, torch.tensor(asked.prompt_ids))[-1].log_softmax(-1)
    assert events[0].logprob == pytest.approx(float(row[events[0].token_id]), abs=1e-6)


@settings(max_examples=tries(25))
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


@pytest.mark.parametrize(
    ("choice", "eos", "sampling", "text", "ends"),
    [
        ("abc", (), {}, "abc", ("grammar", None)),  # the end of a complete answer
        ("abcdef", (1,), {"stop": ("cd",)}, "ab", ("stop_string", "cd")),
        ("a <|tool|> b", (), {}, "a <|tool|> b", ("grammar", None)),  # a control token in a choice is text
    ],
)
def test_how_a_choice_ends(choice: str, eos: tuple, sampling: dict, text: str, ends: tuple) -> None:
    end = generate(RUNNERS(eos), [ask("r", Choices(choices=(choice,)), 50, **sampling)])["r"]
    assert (end.output_text, end.reason, (end.ended_by, end.stop_reason)) == (text, "stop", ends)
    assert not any(map(byte_level().is_special, end.token_ids))


@pytest.mark.parametrize(
    ("most", "text", "ended_by"), [(4, "ab", "max_tokens"), (6, "abcdef", "max_tokens"), (7, "abcdef", "grammar")]
)
@pytest.mark.parametrize("eos", [(), (1,)])
def test_a_choice_whose_end_has_no_room_ends_before_it(most: int, text: str, ended_by: str, eos: tuple) -> None:
    wanted = {byte_level().encode(each)[0]: 90.0 for each in "abcdef"}
    end = generate(RUNNERS(eos), [ask("r", Choices(choices=("ab", "abcdef")), most, logit_bias=wanted)])["r"]
    assert (end.output_text, len(end.token_ids), end.ended_by) == (text, len(text), ended_by)


def test_an_answer_without_room_to_spare_is_the_models_own() -> None:
    """Any token that has an end in time may come, not only the first of the end that is known."""
    asked = [ask(f"r{seed}", Regex(regex="[a-z]{6}"), 6, seed=seed, temperature=1.0) for seed in range(4)]
    ends = generate(RUNNERS(()), asked).values()
    assert len({end.output_text for end in ends}) == 4 and {end.reason for end in ends} == {"length"}


@pytest.mark.parametrize("end", [7, 9])
def test_every_end_token_ends_a_complete_answer_and_no_other(end: int) -> None:
    """Also one that the request names; none before the answer is complete."""
    form = Regex(regex="[a-z]+")
    asked = ask("r", form, 50, stop_token_ids=(7,), logit_bias={7: 100 * (end == 7), 9: 100 * (end == 9)})
    found = generate(RUNNERS((1, 9)), [asked])["r"]
    assert len(found.token_ids) == 2 and (found.stop_reason, found.reason) == (end, "stop")


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
    assert {event.reason for event in of(Finished, box)} == {"cancelled"}
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

    monkeypatch.setattr("workbench.constrained.grammar.LLMatcher", counted)
    vocabulary = GrammarVocabulary(byte_level())
    for each in FORMATS.values():
        vocabulary.compile(each)
    with pytest.raises(WorkbenchError, match="properties.a"):
        vocabulary.compile(JSONSchema(json_schema={"properties": {"a": {"pattern": "(?=a)b"}}}))
    assert len(limits) > 2 * len(FORMATS) and {id(each) for each in limits} == {id(LIMITS)}
