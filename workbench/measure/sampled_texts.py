"""Sampled texts by sampling method: their repetition, and their surprisal under the model itself, in figures and a
chart."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any, cast

import torch
from torch import Tensor

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import TextsWorkload
from workbench.experiment.variants import REFERENCE, VariantResults, described, every_variant, reference_experiment
from workbench.measure.chart import import_altair, place_labels
from workbench.measure.quality.held_out import cut_windows, read_texts, sample_windows
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.sampling.filters import History, build_filters

MAX_LOOP_TOKENS = 64  # maximum tokens of a loop's period
MIN_LOOP_REPEATS = 3  # repeats of a period that make a loop
MIN_LOOP_SPAN = 12  # minimum tokens of these repeats together
ProgressCallback = Callable[[str], None]
Ids = tuple[int, ...]
HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW = "held-out text", "random tokens", "a loop"  # rows beside the variants
MEANS = ("distinct_1", "distinct_2", "repeated_4", "looped", "bits_a_token", "entropy", "most_likely")
WIDTH, HEIGHT = 480, 340
LOW = -0.12  # where the axis begins, so that names find room below 0
REFERENCE_COLOR, SAMPLED_COLOR, PREDICTED_COLOR = "#a8a8a8", "#0b6e4f", "black"
Rows = Sequence[Mapping[str, Any]]


def distinct_ngram_fraction(ids: Sequence[int], n: int) -> float:
    """Return the fraction of a text's n-grams that are distinct (Li et al., 2016)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Return whether a period of at most `MAX_LOOP_TOKENS` tokens repeats at the end of the text."""
    for period in range(1, min(MAX_LOOP_TOKENS, len(ids) // MIN_LOOP_REPEATS) + 1):
        turns = max(MIN_LOOP_REPEATS, -(-MIN_LOOP_SPAN // period))
        end = list(ids[-period * turns :])
        if len(end) == period * turns and end == end[-period:] * turns:
            return True
    return False


def token_surprisal(logits: Tensor, ids: Sequence[int]) -> tuple[float, float, float]:
    """Return surprisal statistics of a text's tokens.

    Args:
        logits: Logits of the position before each token, [token, vocab].
        ids: The tokens.

    Returns:
        The total bits of the tokens, the mean entropy of the distributions in bits, and the fraction of most likely
        tokens.
    """
    logp = logits.double().log_softmax(-1)
    tokens = torch.tensor(ids)
    bits = -float(logp.gather(-1, tokens[:, None]).sum()) / math.log(2)
    return bits, entropy(logits), float((logp.argmax(-1) == tokens).double().mean())


def entropy(logits: Tensor) -> float:
    """Return the mean entropy of the rows' distributions in bits."""
    p = logits.double().softmax(-1)
    return float(-torch.special.xlogy(p, p).sum(-1).mean()) / math.log(2)


class ScoringModel:
    """The prompts, their held-out continuations, and the float32 model that scores texts."""

    def __init__(self, experiment: Experiment):
        work = cast(TextsWorkload, experiment.workload)
        self.judge = runner_for(reference_experiment(experiment))
        if self.judge.tokenizer is None:
            raise WorkbenchError(f"workload.kind texts: model {experiment.model.name!r} has no tokenizer")
        texts, self.about = read_texts(work.texts)
        length = work.prompt_tokens + work.output_tokens
        every = cut_windows(self.judge.tokenizer, texts, length)
        cut = [window.ids for window in sample_windows(every, work.prompts, work.seed, length)]
        self.prompts: list[Ids] = [ids[: work.prompt_tokens] for ids in cut]
        self.came: list[Ids] = [ids[work.prompt_tokens : length] for ids in cut]

    def logits(self, index: int, output: Ids) -> Tensor:
        """Return the logits of the position before each token of an output: [token, vocab]."""
        prompt = self.prompts[index]
        return self.judge.model.logits((*prompt, *output)[:-1])[len(prompt) - 1 :]


def predict_draws(experiment: Experiment, on_progress: ProgressCallback = lambda line: None) -> dict[str, Any]:
    """Predict by variant the distributions of its draws as if every context were held-out text.

    Returns their entropy, and the bits that the model assigns to a drawn token."""
    on_progress("what would be drawn after held-out text")
    asked = ScoringModel(experiment)
    rows = torch.cat([asked.logits(index, came) for index, came in enumerate(asked.came)])
    variants = every_variant(experiment) or {"as given": experiment}
    return {"variants": {name: _drawn(rows, each.sampling) for name, each in variants.items()}}


def _drawn(logits: Tensor, sampling: SamplingParameters) -> dict[str, float]:
    exact = logits.double().log_softmax(-1)
    if sampling.temperature == 0:
        return {"drawn_entropy": 0.0, "bits_a_token": -float(exact.amax(-1).mean()) / math.log(2)}
    kept = logits
    for rule in build_filters(sampling):
        kept = rule(kept, [History()] * len(kept))
    p = kept.double().softmax(-1)
    return {"drawn_entropy": entropy(kept), "bits_a_token": -float((p * exact).sum(-1).mean()) / math.log(2)}


def measure_sampled_texts(
    experiment: Experiment, on_progress: ProgressCallback, predicted: dict[str, Any]
) -> VariantResults:
    """Measure sampled texts and return the rows of the references, then one row a variant: means over the texts."""
    work, asked = cast(TextsWorkload, experiment.workload), ScoringModel(experiment)
    draw, vocab = random.Random(work.seed), asked.judge.model.spec.vocab_size
    noise = [random_token_ids(draw, vocab, len(came)) for came in asked.came]
    loops = [(came[:8] * len(came))[: len(came)] for came in asked.came]
    found: list[dict[str, Any]] = []
    for name, outputs in ((HELD_OUT_ROW, asked.came), (RANDOM_ROW, noise), (LOOP_ROW, loops)):
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(outputs)]
    rows = [{"variant": name, "settings": "", **_means(found, name)} for name in (HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW)]
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, (1 + work.repeats) * len(variants))
    runners = load_runners(variants, on_progress, {"sampling": SamplingParameters()})
    turns: dict[str, list[list[Ids]]] = {name: [] for name in variants}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(work.repeats):  # in turn, so that contention affects all alike
        for name, variant in variants.items():
            on_progress(name)
            began = time.perf_counter()
            turns[name].append(_outputs(runners[name], asked.prompts, variant.sampling, work))
            seconds[name].append(time.perf_counter() - began)
    tokens = work.prompts * work.output_tokens
    for name, variant in variants.items():
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(turns[name][0])]
        same = all(turn == turns[name][0] for turn in turns[name])
        rows.append({
            **described(experiment, name, runners[name].core.backends),
            "temperature": variant.sampling.temperature, "top_k": variant.sampling.top_k, **_means(found, name),
            "repeated_alike": same if work.repeats > 1 else None, "predicted": predicted["variants"][name],
            "s_per_token": median(seconds[name][1:]) / tokens if work.repeats > 1 else None,  # the first one compiles
        })  # fmt: skip
    about = asked.about | {"prompts": work.prompts, "output_tokens": work.output_tokens, "looked_at_by": REFERENCE}
    return VariantResults(rows, about, {"texts": found})


def _outputs(
    runner: Runner, prompts: Sequence[Ids], sampling: SamplingParameters, workload: TextsWorkload
) -> list[Ids]:
    asked = [
        Request(str(i), prompt, sampling.model_copy(
            update={"max_tokens": workload.output_tokens, "ignore_eos": True, "stop": (), "seed": sampling.seed + i}))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    ends = generate(runner, asked)
    if wrong := next((end for end in ends.values() if end.reason not in ("length", "not_chosen")), None):
        raise WorkbenchError(f"workload.texts: {wrong.error or wrong.reason}")
    return [ends[str(i)].token_ids for i in range(len(prompts))]


def _figures(asked: ScoringModel, index: int, ids: Ids) -> dict[str, Any]:
    assert asked.judge.tokenizer is not None
    bits, spread, likely = token_surprisal(asked.logits(index, ids), ids)
    size = sum(len(asked.judge.tokenizer.token_bytes(token)) for token in ids)
    return {
        "text": index, "distinct_1": distinct_ngram_fraction(ids, 1), "distinct_2": distinct_ngram_fraction(ids, 2),
        "repeated_4": 1 - distinct_ngram_fraction(ids, 4), "looped": ends_in_loop(ids), "bits_a_token": bits / len(ids),
        "bits": bits, "bytes": size, "entropy": spread, "most_likely": likely,
        "output_text": asked.judge.tokenizer.decode_after(asked.prompts[index], ids),
    }  # fmt: skip


def _means(found: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    mine = [each for each in found if each["variant"] == name]
    bits = sum(each["bits"] for each in mine) / sum(each["bytes"] for each in mine)
    return {"bits_per_byte": bits, **{key: mean(float(each[key]) for each in mine) for key in MEANS}}


def chart(rows: Rows, title: str) -> Any:
    """Draw Altair charts: left bits a token against repeated 4-grams by variant, right bits a token beside the
    predicted ones."""
    altair = import_altair()
    return altair.hconcat(_repeats(altair, rows), _bits(altair, rows)).properties(title=title)


def _repeats(altair: Any, rows: Rows) -> Any:
    points = [{"variant": row["variant"], "bits": row["bits_per_byte"], "repeated": row["repeated_4"],
               "made": "predicted" in row} for row in rows]  # fmt: skip
    left, right = 0.8 * min(point["bits"] for point in points), 1.25 * max(point["bits"] for point in points)
    x = altair.X(
        "bits:Q", title="bits a byte under the model in float32",
        scale=altair.Scale(type="log", domain=[left, right], nice=False),
    )  # fmt: skip
    y = altair.Y(
        "repeated:Q", title="repeated 4-grams",
        scale=altair.Scale(domain=[LOW, 1], nice=False),
        axis=altair.Axis(format="%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
    )  # fmt: skip
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        color=altair.condition("datum.made", altair.value(SAMPLED_COLOR), altair.value(REFERENCE_COLOR))
    )
    width = WIDTH / math.log(right / left)
    pixels = [(width * math.log(p["bits"] / left), HEIGHT * (1 - p["repeated"]) / (1 - LOW)) for p in points]
    texts = [
        altair.Chart(altair.Data(values=[point]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for point, label in zip(points, place_labels(pixels, [p["variant"] for p in points], WIDTH), strict=True)
    ]
    return altair.layer(dots, *texts).properties(width=WIDTH, height=HEIGHT)


def _bits(altair: Any, rows: Rows) -> Any:
    values = [{"variant": row["variant"], "bits": row["bits_a_token"],
               "predicted": row.get("predicted", {}).get("bits_a_token")} for row in rows]  # fmt: skip
    base = altair.Chart(altair.Data(values=values)).encode(y=altair.Y("variant:N", sort=None, title=None))
    bars = base.mark_bar(color=SAMPLED_COLOR).encode(x=altair.X("bits:Q", title="bits a token (tick: predicted)"))
    ticks = base.transform_filter("isValid(datum.predicted)").mark_tick(color=PREDICTED_COLOR, thickness=2)
    return (bars + ticks.encode(x="predicted:Q")).properties(width=300, height=altair.Step(22))
