"""Beam search against Hugging Face's, and against its definition; beams share pages and leave others alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.beam_oracle import Text, beams
from tests.engine.poison import Poison
from tests.engine.tiny import VOCAB, finals, layer, model_of, request, runner_of, spec_of, specs
from tests.helpers.events import of
from tests.thorough import tries
from workbench.decoding.beams import BeamHypothesis, Beams
from workbench.engine.beam_search import EarlyStopping, beam_search
from workbench.engine.inputs import sample_id
from workbench.engine.runner import Runner, generate
from workbench.kv_cache.format import parse_cache_format
from workbench.model.hf.families import read_spec
from workbench.model.hf.weights import load_weights
from workbench.model.transformer import Transformer
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.trace.events import Decoded, Finished, Preempted, Stepped

EXACT = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)), dtype=torch.float64)
ENDS = (3, 7, 11)


def prompt_of(length: int, seed: int = 0) -> Text:
    return random_token_ids(random.Random(seed), VOCAB, length)


def searched(name: str, ids: Text, width: int, most: int, **more) -> Request:
    return Request(name, ids, SamplingParameters(beams=width, n=width, max_tokens=most, **more))


def plain(model: Transformer, prompt: Text):
    """The distribution after an output, from the whole text anew."""

    def logprobs(text: Text) -> Tensor:
        return naive.logits(model, torch.tensor(prompt + text), torch.float64)[-1].log_softmax(-1)

    return logprobs


def found(runner: Runner, requests: list[Request]) -> dict[str, list[tuple[Text, float]]]:
    """Return the texts that each search found, in order."""
    ends = generate(runner, requests)
    assert {end.reason for end in ends.values()} <= {"stop", "length"}, {end.error for end in ends.values()}
    texts: dict[str, list[tuple[Text, float]]] = {}
    for each in requests:
        mine = (ends[sample_id(each.request_id, number)] for number in range(each.sampling.n))
        texts[each.request_id] = [(end.token_ids, end.score or 0.0) for end in mine]
    return texts


def same(one: list[tuple[Text, float]], other: list[tuple[Text, float]], bound: float = 1e-9) -> None:
    assert [text for text, _ in one] == [text for text, _ in other]
    assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=bound)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [(False, 1.0), (True, 1.0), ("never", 1.0), (False, 0.0), ("never", 2.0), (True, -1.0)],
)
def test_as_hugging_face(tmp_path: Path, early_stopping: EarlyStopping, length_penalty: float) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, eos_token_id=list(ENDS),
        bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval().double()
    theirs.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert set(spec.eos_token_ids) == set(ENDS)
    ours = runner_of(Transformer.from_state(spec, load_weights(tmp_path, spec, torch.float64)), max_num_seqs=8)
    lengths = set()
    for seed, (width, length, most) in enumerate([(2, 5, 12), (4, 9, 16), (5, 3, 20), (3, 14, 7), (1, 4, 9)]):
        ids = prompt_of(length, seed)
        said = theirs.generate(
            torch.tensor([ids]), num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=most,
            length_penalty=length_penalty, early_stopping=early_stopping, output_scores=True,
            return_dict_in_generate=True,
        ) if width > 1 else None  # fmt: skip
        mine = beam_search(ours, ids, width, most, length_penalty, early_stopping)
        assert [each.score for each in mine] == sorted((each.score for each in mine), reverse=True)
        for each in mine:
            assert each.score == pytest.approx(sum(each.logprobs) / len(each.token_ids) ** length_penalty)
            lengths.add(len(each.token_ids))
        if said is None:  # one beam may go on beyond an end where nothing ends it early
            alone = finals(ours, [Request("g", ids, SamplingParameters(temperature=0, max_tokens=most))])["g"]
            assert early_stopping == "never" or mine[0].token_ids == alone
            continue
        texts = [row[len(ids) :].tolist() for row in said.sequences]
        for text, score, each in zip(texts, said.sequences_scores.tolist(), mine, strict=True):
            length = len(each.token_ids)
            assert tuple(text[:length]) == each.token_ids and set(text[length:]) <= {1}
            assert score == pytest.approx(each.score, rel=2e-6)  # they add in float32
    assert len(lengths) > 3, "some end early"


@pytest.mark.parametrize("penalty", [-2.0, -0.5, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("ratio", [0.9, 1.1, 3.0])
@pytest.mark.parametrize(("length", "most"), [(1, 1), (1, 9), (4, 5), (4, 40)])
def test_never_stopping_early_goes_on_while_any_length_could_win(
    penalty: float, ratio: float, length: int, most: int
) -> None:
    """A beam can at most keep its logprob: the length at which its score is best has its say, whatever the penalty."""
    best, worst = -1.0, -ratio / length**penalty
    search = object.__new__(Beams)
    search.num_beams, search.max_tokens, search.early_stopping, search.length_penalty = 1, most, "never", penalty
    search.hypotheses = [BeamHypothesis((1,), (), worst)]
    could = any(best / each**penalty > worst for each in range(length, most + 1))
    assert search._may_improve(best, length) == could


cases = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 1.0, 1.7, -0.5]),
              st.sampled_from([False, True, "never"])),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=tries(12))
@given(specs, cases, st.booleans(), st.booleans(), st.randoms())
def test_as_defined(spec, searches: list, prefix: bool, offload: bool, shuffle: random.Random) -> None:
    """Beside one another and beside other requests, however scarce the pages and whatever was found in the cache."""
    model = model_of(spec, shuffle.randrange(99), dtype=torch.float64)
    size, budget = shuffle.randint(1, 7), shuffle.randint(1, 24)
    runner = runner_of(
        model, max_num_seqs=shuffle.randint(4, 6), max_num_batched_tokens=budget, page_size=size,
        pages=4 * -(-22 // size) + shuffle.randrange(8), prefix="radix" if prefix else "off",
        offload={"kind": "memory", "bytes": 2**16} if offload else "none",
    )  # fmt: skip
    Poison(runner)
    others = [request(f"o{i}", 7, 9) for i in range(2)]
    alone = found(runner_of(model, pages=99), others)
    asked_for = [
        searched(f"s{i}", prompt_of(length, i // 2), width, most, length_penalty=penalty, early_stopping=early,
                 stop_token_ids=ENDS)
        for i, (length, width, most, penalty, early) in enumerate(searches)
    ]  # fmt: skip
    said = {r.request_id: defined(model, r) for r in asked_for}
    again = [replace(r, request_id=f"again {r.request_id}") for r in asked_for]
    for wave in ([asked_for[0], *others, *asked_for[1:]], again):
        texts = found(runner, wave)
        for search in wave:
            if search not in others:
                same(texts[search.request_id], said[search.request_id.removeprefix("again ")])
            else:
                assert texts[search.request_id] == alone[search.request_id]
    assert runner.scheduler.pages_in_use == 0


def defined(model: Transformer, search: Request) -> list[tuple[Text, float]]:
    s = search.sampling
    logprobs = plain(model, search.prompt_ids)
    return beams(logprobs, s.beams, s.max_tokens, set(ENDS), s.length_penalty, s.early_stopping)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_caches(kind: str) -> None:
    """The definition, over what a cold runner with the same cache says of each text."""
    model = model_of(spec_of(layer(4, 2, dim=8), layer(4, 2, dim=8, sliding_window=9)), seed=3)
    settings_ = {
        "cache": parse_cache_format({"format": kind, "residual_length": 5, "quant_group": 8}),
        "page_size": 8,
        "max_num_seqs": 5,
    }
    cold, ids = runner_of(model, **settings_), prompt_of(19)

    def logprobs(text: Text) -> Tensor:
        one = SamplingParameters(max_tokens=1, temperature=0, logprobs=VOCAB)
        event = of(Decoded, cold.stream([Request("c", ids + text, one)]))[0]
        return torch.tensor([value for _, value in sorted(event.top_logprobs)])

    runner = runner_of(model, prefix="radix", **settings_)
    Poison(runner)
    said = beams(logprobs, 4, 10, set(ENDS))
    for name in ("cold", "warm"):
        same(found(runner, [searched(name, ids, 4, 10, stop_token_ids=ENDS)])[name], said, 1e-4)


def test_beams_share_pages() -> None:
    runner = runner_of(EXACT, max_num_seqs=5)
    Poison(runner)
    steps: list[Stepped] = []
    held = []
    for event in runner.stream([searched("s", prompt_of(30), 4, 12, ignore_eos=True)]):
        if isinstance(event, Stepped):
            steps.append(event)
            held.append(len({page for s in runner.scheduler.running for page in s.pages[0] if page}))
    assert [step.decode_tokens for step in steps[3:]] == [4] * 11, "all beams of a step are one batch"
    # Seven pages of the prompt are whole. Each beam has the rest and twelve tokens more: four pages at most.
    assert max(held) <= 7 + 4 * 4 and runner.scheduler.pages_in_use == 0
    assert sum(step.prefill_tokens for step in steps) == 29 + 4


def test_beams_are_preempted_together() -> None:
    """An older request takes their pages: they come back, on pages that they share, and find the same."""
    long, search = request("long", 24, 20), searched("s", prompt_of(14), 3, 16, ignore_eos=True)
    alone = found(runner_of(EXACT, pages=99), [search])["s"]
    runner = runner_of(EXACT, pages=20)
    Poison(runner)
    backs, ends = [], {}
    for event in runner.stream([long, search]):
        backs += [event] if isinstance(event, Preempted) else []
        if isinstance(event, Finished):
            ends[event.request_id, event.sample] = event
    assert {event.sample for event in backs} == {0, 1, 2}
    same([(ends["s", k].token_ids, ends["s", k].score or 0.0) for k in range(3)], alone)
    assert runner.scheduler.pages_in_use == 0


def test_more_beams_than_a_small_vocabulary_has_tokens() -> None:
    spec = spec_of(layer()).model_copy(update={"vocab_size": 3})
    model = model_of(spec, dtype=torch.float64)
    runner = runner_of(model, max_num_seqs=6)
    texts = found(runner, [searched("s", (0, 1), 6, 3, stop_token_ids=(2,))])["s"]
    same(texts, beams(plain(model, (0, 1)), 6, 3, {2}))
    assert len(texts) == 6
