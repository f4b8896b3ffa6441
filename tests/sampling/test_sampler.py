"""The laws of choosing for many: no row depends on its neighbours, and a broken row breaks alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.request import CustomPart, Request, SamplingParameters, Sequence
from workbench.response_format import Choices, Thinking
from workbench.sampling.filters import History, build_filters
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import RandomSampler, uniform
from workbench.testing.samplers import LogitsRow, logits_rows

PARTS = "tests.sampling.parts:"
INF = float("inf")
KINDS = [
    SamplingParameters(temperature=0),
    SamplingParameters(temperature=0, logprobs=3, repetition_penalty=1.5),
    SamplingParameters(seed=3),
    SamplingParameters(seed=4, temperature=0.7, top_p=0.9, logprobs=2),
    SamplingParameters(seed=5, temperature=0.7, top_p=0.9, max_tokens=4),
    SamplingParameters(seed=6, top_k=7, min_p=0.1, frequency_penalty=0.5, logprobs=4, logprobs_of="filtered"),
    SamplingParameters(seed=7, presence_penalty=0.5, logit_bias={0: -INF, 1: 2.0}, top_k=7),
    SamplingParameters(seed=8, filters=(CustomPart(path=PARTS + "Ban", arguments={"token": 1}),), top_k=9),
    SamplingParameters(seed=9, sampler=CustomPart(path=PARTS + "Alternating"), top_p=0.8),
    SamplingParameters(seed=10, sampler=CustomPart(path="experiments.zoo.mirostat:Mirostat"), logprobs=0),
]


def sequence(name: str, sampling: SamplingParameters, prompt=(1, 2), output=()) -> Sequence:
    made = Sequence.from_request(Request(name, tuple(prompt), sampling), arrival_index=0)
    made.token_ids.extend(output)
    return made


def sequences_for(batch: list[LogitsRow], kinds: list[SamplingParameters]) -> list[Sequence]:
    pairs = enumerate(zip(batch, kinds, strict=True))
    return [sequence(f"r{i}", k, r.history.prompt_ids, r.history.output_ids) for i, (r, k) in pairs]


def batches(vocab: int) -> st.SearchStrategy[list[tuple[LogitsRow, SamplingParameters]]]:
    return st.lists(st.tuples(logits_rows(vocab), st.sampled_from(KINDS)), min_size=2, max_size=6)


@settings(max_examples=tries(80))
@given(st.sampled_from([5, 17, 64, 1001, 4096, 32_003]).flatmap(batches))
def test_a_row_alone_is_bit_for_bit_the_row_in_a_batch(batch):
    drawn, kinds = map(list, zip(*batch, strict=True))
    logits = torch.stack([row.logits for row in drawn])
    together = Sampler().sample(logits, sequences_for(drawn, kinds))
    for i, one in enumerate(sequences_for(drawn, kinds)):
        assert Sampler().sample(logits[i : i + 1].clone(), [one]) == [together[i]]


@settings(max_examples=tries(40))
@given(batches(64), st.sampled_from([math.nan, INF, -INF]), st.data())
def test_a_broken_row_breaks_alone(batch, poison, data):
    drawn, kinds = map(list, zip(*batch, strict=True))
    logits = torch.stack([row.logits for row in drawn])
    healthy = Sampler().sample(logits, sequences_for(drawn, kinds))
    broken = data.draw(st.integers(0, len(drawn) - 1))
    logits[broken, slice(None) if poison == -INF else 3] = poison
    choices = Sampler().sample(logits, sequences_for(drawn, kinds))
    assert choices[broken].error and choices[broken].token_id == -1
    del choices[broken], healthy[broken]
    assert choices == healthy


BREAKING = ["Raises", "RemovesAll", "GivesNaN", "Resurrects", "ResurrectsInPlace", "OtherType", "OtherShape"]
BREAKING_SAMPLERS = ["SamplerRaises", "TakesRemoved", "TakesUnknown", "TakesFraction"]


@pytest.mark.parametrize("name", [*BREAKING, *BREAKING_SAMPLERS])
def test_a_users_part_that_breaks_ends_its_own_row(name):
    part = CustomPart(path=PARTS + name)
    own = {"sampler": part} if name in BREAKING_SAMPLERS else {"filters": (part,)}
    bad = SamplingParameters.model_validate({"top_k": 2, **own})
    good = SamplingParameters(top_k=2)
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    choices = Sampler().sample(logits, [sequence("a", good), sequence("b", bad), sequence("c", good)])
    assert name in choices[1].error
    plain = Sampler().sample(logits, [sequence("a", good), sequence("b", good), sequence("c", good)])
    assert [choices[0], choices[2]] == [plain[0], plain[2]]


def test_a_row_that_breaks_a_common_filter_breaks_alone():
    penalised = SamplingParameters(repetition_penalty=1.2, seed=2)
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    made = [sequence(name, penalised, prompt) for name, prompt in (("a", [1]), ("b", [99]), ("c", [2]))]
    choices = Sampler().sample(logits, made)
    assert "token id 99 is outside the vocabulary of 8" in choices[1].error
    assert [choices[0]] == Sampler().sample(logits[:1], made[:1])
    assert [choices[2]] == Sampler().sample(logits[2:], made[2:])


def test_a_filter_that_changes_its_input_harms_no_other():
    kind = SamplingParameters(filters=(CustomPart(path=PARTS + "InPlace"),), logprobs=1)
    logits = torch.zeros(2, 8)
    Sampler().sample(logits, [sequence("a", kind), sequence("b", kind)])
    assert torch.equal(logits, torch.zeros(2, 8))


@given(logits_rows(64), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_the_draw_is_of_the_seed_and_the_number_of_output_tokens(row, seed, count):
    kind = SamplingParameters(seed=seed, temperature=0.8, top_k=12, presence_penalty=0.3)
    one = sequence("a", kind, row.history.prompt_ids, [7] * count)
    logits = row.logits[None]
    for rule in build_filters(kind):
        logits = rule(logits, [History(row.history.prompt_ids, one.output_ids)])
    token, _ = RandomSampler().choose(logits[0], uniform(seed, count))
    assert Sampler().sample(row.logits[None], [one])[0].token_id == token


@given(logits_rows(64), st.integers(0, 70), st.sampled_from(["model", "filtered"]))
def test_logprobs_are_those_before_the_filters_unless_asked_otherwise(row, count, of):
    kind = SamplingParameters(temperature=0.5, top_k=5, seed=1, logprobs=count, logprobs_of=of)
    choice = Sampler().sample(row.logits[None], [sequence("a", kind)])[0]
    wanted = row.logits
    if of == "filtered":
        wanted = row.logits / 0.5
        wanted = wanted.masked_fill(wanted < wanted.sort(descending=True).values[4], -INF)
    expected = wanted.double().log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[choice.token_id]), abs=1e-5)
    kept = [token for token in range(64) if float(wanted[token]) > -INF]
    best = sorted(kept, key=lambda token: (-float(wanted[token]), token))[:count]
    assert len(choice.top_logprobs) == len(best)
    for (_, logprob), token in zip(choice.top_logprobs, best, strict=True):
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
    if row.kind.startswith(("tied", "constant")) and of == "model":
        assert [token for token, _ in choice.top_logprobs] == best  # equal ones by token id
    plain = kind.model_copy(update={"logprobs": None})
    bare = Sampler().sample(row.logits[None], [sequence("a", plain)])[0]
    assert (bare.token_id, bare.logprob, bare.top_logprobs) == (choice.token_id, None, ())


def test_state_is_each_requests_own_and_gone_when_forgotten():
    kind = SamplingParameters(sampler=CustomPart(path=PARTS + "Alternating"))
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    sampler, held = Sampler(), {name: sequence(name, kind) for name in "ab"}
    turns = {"a": "", "b": ""}
    for name in "aababb":
        turns[name] += str(sampler.sample(logits, [held[name]])[0].token_id)
    assert turns == {"a": "010", "b": "010"}
    sampler.remove("a")
    sampler.remove("never seen")
    for one, next_token in ((held["a"], 0), (held["b"], 1), (sequence("a", kind), 0)):  # the last under an old name
        assert sampler.sample(logits, [one])[0].token_id == next_token
    assert sampler.sample(logits * math.nan, [held["b"]])[0].error
    assert sampler.sample(logits, [held["b"]])[0].token_id == 0, "a failed choice leaves the state as it was"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParameters(logit_bias={64: 1.0}), "token id 64 is outside the vocabulary of 64 tokens"),
        (SamplingParameters(logit_bias={-1: 1.0}), "logit bias token id -1: must be 0 or more"),
        (SamplingParameters(logit_bias={1: math.nan}), "logit bias of token 1 nan"),
        (SamplingParameters(filters=(CustomPart(path="nowhere:F"),)), "nowhere cannot be imported"),
        (
            SamplingParameters(sampler=CustomPart(path=PARTS + "StartBreaks")),
            "StartBreaks: start: RuntimeError",
        ),
        (
            SamplingParameters(temperature=0, sampler=CustomPart(path=PARTS + "Ban")),
            "temperature 0 means greedy",
        ),
    ],
)
def test_admit_refuses_what_cannot_work_and_choose_tells_the_same(sampling, message):
    sampler = Sampler(64)
    refuses(message, lambda: sampler.add(sequence("a", sampling)))
    made = [sequence("a", sampling), sequence("b", SamplingParameters())]
    choices = sampler.sample(torch.zeros(2, 64), made)
    assert message.split(":")[0] in choices[0].error and not choices[1].error


def test_half_precision_and_no_rows():
    greedy = SamplingParameters(temperature=0)
    assert Sampler().sample(torch.zeros(0, 8), []) == []
    logits = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.bfloat16)
    assert Sampler().sample(logits, [sequence("a", greedy)])[0].token_id == 1
    with pytest.raises(ValueError, match="1 rows of logits for 2 sequences"):
        Sampler().sample(logits, [sequence("a", greedy)] * 2)


@pytest.mark.parametrize(
    "setting",
    [
        {"response_format": Choices(choices=("yes",))},
        {"constraint": CustomPart(path="tests.constrained.own:Walk")},
        {"thinking": Thinking(budget_tokens=3)},
    ],
)
def test_what_is_to_be_constrained_is_not_sampled_free(setting):
    (choice,) = Sampler().sample(torch.zeros(1, 8), [sequence("a", SamplingParameters(**setting))])
    assert choice.error == f"request a: {next(iter(setting))}: add the request with its constraint"
