"""The zoo's ways of sampling: every entry keeps the laws of its kit, and does what its equation says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import EtaLogitsWarper, TypicalLogitsWarper

import workbench
from tests.zoo.loaded import part_of
from workbench.claims.technique import load_zoo
from workbench.decoding.search import Branch
from workbench.engine.runner import Runner, generate
from workbench.request import Request, SamplingParameters
from workbench.sampling.filters import History
from workbench.sampling.samplers import uniform
from workbench.testing.samplers import logits_rows
from workbench.trace.events import Finished

ENTRIES = {name: entry for name, entry in load_zoo().items() if entry.settings.kind == "sampling"}
ROWS = st.lists(logits_rows(257), min_size=1, max_size=3)


def stacked(rows: list) -> tuple[Tensor, list[History]]:
    return torch.stack([row.logits for row in rows]), [row.history for row in rows]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return workbench.load("demo", backend="eager")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_entry_works_in_an_engine_alone_and_among_others(entry, runner: Runner) -> None:
    assert runner.tokenizer is not None
    given = {name.removeprefix("sampling."): value for name, value in entry.settings.use.items()}
    sampling = SamplingParameters.model_validate({**given, "max_tokens": 6, "ignore_eos": True, "seed": 7})
    one = Request("one", tuple(runner.tokenizer.encode("def load(path):")), sampling)
    plain = Request("two", tuple(runner.tokenizer.encode("import os\nimport")), SamplingParameters(max_tokens=6))
    alone, together = generate(runner, [one]), generate(runner, [plain, one])
    assert len(alone["one"].token_ids) == 6 and alone["one"].reason == "length", alone["one"].error
    assert together["one"].token_ids == alone["one"].token_ids
    assert runner.scheduler.pages_in_use == 0


@given(ROWS, st.floats(0.01, 0.99))
def test_typical_is_that_of_transformers(rows: list, mass: float) -> None:
    logits, histories = stacked(rows)
    exact = TypicalLogitsWarper(mass)(torch.LongTensor(len(rows), 0), logits)
    assert torch.equal(part_of("typical", mass=mass)(logits, histories), exact)


@given(ROWS, st.floats(0.01, 0.9))
def test_eta_is_that_of_transformers(rows: list, epsilon: float) -> None:
    logits, histories = stacked(rows)
    exact = EtaLogitsWarper(epsilon)(torch.LongTensor(len(rows), 0), logits)
    got = part_of("eta", epsilon=epsilon)(logits, histories)
    # transformers keeps the tokens below the bound nowhere, and its most probable one only by top-k: so do ties here.
    p, top = logits.softmax(-1), logits == logits.amax(-1, keepdim=True)
    assert torch.equal(got.where(~top, 0), exact.where(~top, 0)), "beside the most probable"
    assert bool((got[top] == logits[top]).all()) and bool((p > 0)[top].all())


# --- DRY


def plain_repetitions(ids: list[int], breakers: set[int]) -> dict[int, int]:
    """L(v) by its definition: try every earlier place and every length."""
    found: dict[int, int] = {}
    for at in range(1, len(ids)):
        length = 0
        while length < at and ids[at - 1 - length] == ids[-1 - length] and ids[-1 - length] not in breakers:
            length += 1
        if length and ids[at] not in breakers:
            found[ids[at]] = max(length, found.get(ids[at], 0))
    return found


@given(st.lists(st.integers(0, 3), max_size=40), st.sets(st.integers(0, 3), max_size=2))
def test_repetitions_are_those_of_the_definition(ids: list[int], breakers: set[int]) -> None:
    import sys

    module = sys.modules[type(part_of("dry")).__module__]
    assert module.repetitions(ids, breakers) == plain_repetitions(ids, breakers)


def test_dry_lowers_what_would_extend_a_repetition() -> None:
    part, row = part_of("dry", multiplier=0.8, base=1.75, allowed=2), torch.zeros(1, 10)
    lowered = part(row, [History([1, 2, 3, 4, 9], [1, 2, 3])])
    assert lowered[0, 4] == pytest.approx(-0.8 * 1.75) and int((lowered != 0).sum()) == 1  # L = 3, one above allowed
    assert torch.equal(part(row, [History([1, 2, 3, 4, 9], [3])]), row)  # one token is no repetition
    assert torch.equal(part_of("dry", breakers="3")(row, [History([1, 2, 3, 4, 9], [1, 2, 3])]), row)


# --- XTC


@given(logits_rows(64), st.floats(0.001, 0.999), st.floats(0, 1))
def test_xtc_removes_all_top_choices_but_the_least(row, threshold: float, probability: float) -> None:
    part = part_of("xtc", threshold=threshold, probability=probability)
    weights = row.logits.double().softmax(-1)
    left = part.without_top(weights)
    top, removed = weights >= threshold, left != weights
    assert int(removed.sum()) == max(0, int(top.sum()) - 1) and bool(top[removed].all())
    if bool(removed.any()):
        assert float(left[top].max()) == float(weights[top].min())


def test_xtc_excludes_as_often_as_it_is_set_and_samples_by_what_is_left() -> None:
    part = part_of("xtc", threshold=0.25, probability=0.3)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    without = torch.tensor([0, 0.3, 0.15, 0.05]).double()
    expected = 0.7 * p + 0.3 * without / without.sum()
    draws = torch.arange(200_000).double().add(0.5) / 200_000
    counts = torch.zeros(4).double()
    for number in draws[::100].tolist():
        counts[part.choose(p.log().float(), number, None)[0]] += 1
    assert torch.allclose(counts / counts.sum(), expected, atol=2e-3)


# --- the others


@given(ROWS, st.floats(0.01, 20), st.floats(0.1, 10))
def test_top_n_sigma_keeps_the_same_at_any_temperature(rows: list, n: float, temperature: float) -> None:
    logits, histories = stacked([row for row in rows if "removed: none" in row.kind] or rows)
    part = part_of("top_n_sigma", n=n)
    kept = part(logits, histories) > -math.inf
    other = part((logits.double() / temperature).float(), histories) > -math.inf
    left = logits > -math.inf
    exact = logits.double()
    for row, mask, mine, theirs in zip(exact, left, kept, other, strict=True):
        values = row[mask]
        bound = values.max() - n * values.std(correction=0)
        near = (row - bound).abs() <= 1e-5 * (1 + row.abs())  # what rounding decides
        assert bool(((row >= bound) == mine)[mask & ~near].all()) and bool((mine == theirs)[mask & ~near].all())


@given(ROWS)
def test_p_less_keeps_what_is_likelier_than_a_right_guess(rows: list) -> None:
    logits, histories = stacked(rows)
    kept, p = part_of("p_less")(logits, histories) > -math.inf, logits.double().softmax(-1)
    for row, mine in zip(p, kept, strict=True):
        guess = sum(float(value) ** 2 for value in row)
        assert all(bool(keep) == (float(value) >= guess) for value, keep in zip(row, mine, strict=True)
                   if abs(float(value) - guess) > 1e-9)  # fmt: skip


@given(ROWS, st.floats(0.01, 1))
def test_top_a_is_a_min_p_of_its_own_share(rows: list, a: float) -> None:
    from workbench.sampling.filters import MinP

    for row in rows:
        logits = row.logits[None]
        share = min(1.0, a * float(logits.softmax(-1).max()))
        got, expected = part_of("top_a", a=a)(logits, [row.history]), MinP(share)(logits, [row.history])
        near = (logits.softmax(-1) - share * logits.softmax(-1).max()).abs() < 1e-6
        assert torch.equal(got.where(~near, 0), expected.where(~near, 0))


@given(ROWS, st.floats(0.05, 0.999))
def test_tail_free_keeps_the_head_up_to_its_share_of_the_curvature(rows: list, z: float) -> None:
    for row in rows:
        got = part_of("tail_free", z=z)(row.logits[None], [row.history])[0] > -math.inf
        p = row.logits.double().softmax(-1)
        ranked = sorted(range(len(p)), key=lambda token: (-float(p[token]), token))
        values = [float(p[token]) for token in ranked]
        curve = [abs(values[i + 2] - 2 * values[i + 1] + values[i]) for i in range(len(values) - 2)]
        reached, kept = 0.0, len(ranked)
        for place, each in enumerate(curve):
            reached += each
            if reached > z * sum(curve) * (1 + 1e-9):
                kept = place + 1
                break
            if abs(reached - z * sum(curve)) <= 1e-9 * sum(curve):
                return  # rounding decides
        if sum(curve) == 0:
            kept = len(ranked)
        head = {token for token in ranked[:kept] if row.logits[token] > -math.inf}
        assert {token for token in range(len(p)) if got[token]} == head


@given(ROWS)
def test_the_temperature_of_entropy_is_that_of_the_equation(rows: list) -> None:
    logits, histories = stacked(rows)
    part = part_of("entropy_temperature", highest=1.5, theta=0.7)
    for row, temperature in zip(logits, part.temperature(logits), strict=True):
        p = row.double().softmax(-1)
        entropy = -sum(float(value) * math.log(float(value)) for value in p if value > 0)
        expected = max(0.01, 1.5 * 0.8 ** (0.7 / entropy)) if entropy > 1e-4 else 0.01
        assert float(temperature) == pytest.approx(expected, rel=1e-3)
    plain = part_of("entropy_temperature", highest=1.0, theta=0.0)(logits, histories)
    assert torch.allclose(plain.softmax(-1), logits.softmax(-1), atol=1e-6)  # no exponent: a temperature of 1


@pytest.mark.parametrize("target", [2.5, 3.0, 4.0])
def test_mirostat_holds_the_surprise_it_was_given(target: float) -> None:
    """Over Zipfian rows of changing steepness the mean surprise under the model comes to the target."""
    generator = torch.Generator().manual_seed(0)
    part = part_of("mirostat", target=target, rate=0.1)
    state, bits = part.start(), []
    for position in range(1500):
        steepness = 1 + 0.4 * float(torch.rand(1, generator=generator))
        logits = -steepness * torch.arange(1, 257).log()[torch.randperm(256, generator=generator)]
        token, state = part.choose(logits, uniform(0, position), state)
        bits.append(-float(logits.double().log_softmax(-1)[token]) / math.log(2))
    assert sum(bits[300:]) / 1200 == pytest.approx(target, abs=0.05)


def test_a_watermark_is_found_by_its_key_and_by_no_other() -> None:
    part, other, vocab = part_of("watermark", delta=4.0), part_of("watermark", key=7), 512
    ids, plain = [1], [1]
    for position in range(200):
        row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(position))
        ids.append(int(part(row, [History([1], ids[1:])])[0].argmax()))
        plain.append(int(row[0].argmax()))
    assert part.z(ids, vocab) > 8 and abs(part.z(plain, vocab)) < 4 and abs(other.z(ids, vocab)) < 4
    assert int(part.green(3, vocab).sum()) == vocab // 4
    assert not torch.equal(part.green(3, vocab), part.green(4, vocab))
    assert part.z([5, 6] * 100, vocab) == part.z([5, 6, 5], vocab)  # a loop is no evidence


@given(st.lists(logits_rows(64), min_size=1, max_size=2), st.integers(0, 2), st.floats(0.01, 1))
def test_dola_is_that_of_the_equations(rows: list, first: int, alpha: float) -> None:
    logits, histories = stacked(rows)
    part = part_of("dola", first=first, stop=first + 5, step=2, alpha=alpha)
    assert part.layers == (first, first + 2, first + 4)
    early = torch.stack([row.others(3) for row in rows], 1)
    got = part(logits, histories, early)
    for at in range(len(rows)):
        q = logits[at].double().softmax(-1)
        jsd = []
        for other in early[:, at].double().softmax(-1):
            middle = (q + other) / 2
            jsd.append(sum(torch.special.xlogy(each, each / middle).sum() / 2 for each in (q, other)))
        chosen = early[int(torch.stack(jsd).argmax()), at].double().log_softmax(-1)
        for token in range(64):
            near = abs(float(q[token]) - alpha * float(q.max())) < 1e-9
            if q[token] >= alpha * q.max() and not near:
                exact = float(logits[at].double().log_softmax(-1)[token] - chosen[token])
                assert float(got[at, token]) == pytest.approx(exact, rel=1e-5, abs=1e-5)
            elif not near:
                assert float(got[at, token]) == -math.inf


@given(ROWS, st.floats(0.1, 5))
def test_guidance_is_that_of_the_equations(rows: list, strength: float) -> None:
    logits, histories = stacked(rows)
    second = torch.cat([row.others(1) for row in rows])
    p, q = logits.double().log_softmax(-1), second.double().log_softmax(-1)
    for part, expected in (
        (part_of("cfg", gamma=strength), (1 - strength) * q + strength * p),
        (part_of("context_aware", alpha=strength), (1 + strength) * logits.double() - strength * second.double()),
    ):
        got, exact = part(logits, histories, second).double().softmax(-1), expected.softmax(-1)
        assert torch.allclose(got, exact, atol=1e-3)
    assert torch.allclose(part_of("cfg", gamma=1.0)(logits, histories, second).softmax(-1), p.exp().float(), atol=1e-5)
    assert torch.equal(part_of("context_aware", alpha=0.0)(logits, histories, second), logits)


def test_the_second_prompts_are_ends_of_the_first() -> None:
    assert part_of("cfg", keep=2, negative="7, 9").second_prompt((1, 2, 3)) == (7, 9, 2, 3)
    assert part_of("cfg").second_prompt((1, 2, 3)) == (3,)
    assert part_of("context_aware", question=2).second_prompt((1, 2, 3)) == (2, 3)


@given(st.integers(1, 5), st.integers(1, 4), st.floats(0, 1), st.integers(0, 999))
def test_contrastive_search_is_that_of_the_equation(tokens: int, count: int, alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(tokens, 6, generator=generator)
    branches = [
        Branch((0,) * tokens, (-1.0,) * (tokens - 1) + (-float(torch.rand(1, generator=generator)) * 3,),
               torch.cat([before, torch.randn(1, 6, generator=generator)]), torch.randn(9, generator=generator))
        for _ in range(count)
    ]  # fmt: skip
    best, going = part_of("contrastive_search", alpha=alpha).advance(branches)
    scores = []
    for branch in branches:
        new = branch.states[-1].double()
        near = [float(new @ old.double() / (new.norm() * old.double().norm())) for old in branch.states[:-1]]
        scores.append((1 - alpha) * math.exp(branch.logprobs[-1]) - alpha * max(near))
    assert scores[best] == pytest.approx(max(scores))
    likeliest = sorted(range(9), key=lambda token: -float(branches[best].logits[token]))[:count]
    assert going == [(best, token) for token in likeliest]


# --- choices among samples


def ends(*texts: str) -> list[Finished]:
    return [Finished(0.0, "a", output_text=text, token_ids=tuple(map(ord, text))) for text in texts]


@given(st.lists(st.sampled_from(["so 12", "so 7", "x 12, no 7", "none", "12\n7"]), min_size=1, max_size=9))
def test_the_majority_wins(texts: list[str]) -> None:
    vote = part_of("self_consistency")
    answers = {"so 12": "12", "so 7": "7", "x 12, no 7": "7", "none": None, "12\n7": "7"}
    mine = [answers[text] for text in texts]
    scores = vote(ends(*texts))
    best = mine[scores.index(max(scores))]
    assert all(mine.count(best) >= mine.count(answer) for answer in mine if answer is not None)
    assert (best is None) == (set(mine) == {None})


@given(st.lists(st.text("ab", max_size=6), min_size=2, max_size=6), st.integers(1, 3))
def test_the_least_risk_is_that_of_the_definition(texts: list[str], order: int) -> None:
    def grams(text: str) -> list[str]:
        return [text[at : at + order] for at in range(len(text) - order + 1)]

    def f1(one: str, other: str) -> float:
        both = sum(min(grams(one).count(gram), grams(other).count(gram)) for gram in set(grams(one)))
        total = len(grams(one)) + len(grams(other))
        return 2 * both / total if total else 1.0

    expected = [sum(f1(a, b) for j, b in enumerate(texts) if j != i) / (len(texts) - 1) for i, a in enumerate(texts)]
    assert part_of("mbr", order=order)(ends(*texts)) == pytest.approx(expected)
