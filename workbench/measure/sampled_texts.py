"""Measure texts sampled by different methods: their repetition, and their surprisal under the model itself."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults
from workbench.experiment.variants import REFERENCE, described, every_variant, reference_experiment
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Bar, bars
from workbench.figures.figure import Figure, beside
from workbench.figures.points import Point, points
from workbench.measure.quality.held_out import HeldOutWorkload
from workbench.measure.rounds import load_runners
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.sampling.filters import History, build_filters
from workbench.settings import Count
from workbench.svg import Axis
from workbench.units import Measure, duration, share

MAX_LOOP_TOKENS = 64  # maximum period of a loop in tokens
MIN_LOOP_REPEATS = 3  # minimum number of repeats of a period that count as a loop
MIN_LOOP_SPAN = 12  # minimum total tokens of these repeats
Ids = tuple[int, ...]
# rows of references, in addition to the variants
HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW = "held-out text", "random tokens", "a loop"
MEANS = ("distinct_1", "distinct_2", "repeated_4", "looped", "bits_a_token", "entropy", "most_likely")


class TextsWorkload(HeldOutWorkload):
    """Continue held-out prompts with each variant's sampling, `repeats` times, to see whether repeats generate the same
    text.

    The held-out continuation, random tokens and a loop are measured as references."""

    measures: ClassVar = (
        Measure("bits_a_token", "bits/token", "bits/token"),
        Measure("entropy", "entropy", "bits"),
        Measure("drawn_entropy", "entropy after filters", "bits"),
        share("most_likely", "most likely tokens", None),
        share("distinct_*", "distinct {}-grams", None),
        share("repeated_4", "repeated 4-grams", None),
        share("looped", "ends in a loop", None),
        duration("s_per_token", "token", "s/token"),
        Measure("temperature"),
        Measure("top_k", "top-k", "tokens"),
    )
    is_predicted: ClassVar = True
    kind: Literal["texts"] = "texts"
    output_tokens: Annotated[int, Field(ge=16)] = 256
    repeats: Count = 1

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure sampled texts. Return the rows of the references, followed by a row for each variant: means over the
        texts.
        """
        asked = ScoringModel(experiment, self)
        draw, vocab = random.Random(self.seed), asked.judge.model.spec.vocab_size
        noise = [random_token_ids(draw, vocab, len(came)) for came in asked.came]
        loops = [(came[:8] * len(came))[: len(came)] for came in asked.came]
        found: list[dict[str, Any]] = []
        for name, outputs in ((HELD_OUT_ROW, asked.came), (RANDOM_ROW, noise), (LOOP_ROW, loops)):
            found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(outputs)]
        rows = [
            {"variant": name, "settings": "", **_means(found, name)} for name in (HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW)
        ]
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, (1 + self.repeats) * len(variants))
        runners = load_runners(variants, on_progress, {"sampling": SamplingParameters()})
        turns: dict[str, list[list[Ids]]] = {name: [] for name in variants}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(self.repeats):  # variants in turn, so that contention affects all alike
            for name, variant in variants.items():
                on_progress(name)
                began = time.perf_counter()
                turns[name].append(_outputs(runners[name], asked.prompts, variant.sampling, self))
                seconds[name].append(time.perf_counter() - began)
        tokens = self.prompts * self.output_tokens
        for name, variant in variants.items():
            found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(turns[name][0])]
            same = all(turn == turns[name][0] for turn in turns[name])
            rows.append({
                **described(experiment, name, runners[name].core.backends),
                "temperature": variant.sampling.temperature, "top_k": variant.sampling.top_k, **_means(found, name),
                "repeated_alike": same if self.repeats > 1 else None, "predicted": predicted["variants"][name],
                # the first repetition compiles
                "s_per_token": median(seconds[name][1:]) / tokens if self.repeats > 1 else None,
            })  # fmt: skip
        about = asked.about | {"prompts": self.prompts, "output_tokens": self.output_tokens, "looked_at_by": REFERENCE}
        return VariantResults(rows, about, {"texts": found})

    def predict(self, experiment: Experiment, on_progress: ProgressCallback) -> Predictions:
        """Predict the distributions that each variant samples from, on held-out text in place of its own outputs.

        Returns their entropy, and the bits that the model assigns to a sampled token."""
        on_progress("computing the sampling distributions after held-out text")
        asked = ScoringModel(experiment, self)
        rows = torch.cat([asked.logits(index, came) for index, came in enumerate(asked.came)])
        return {"variants": {name: _drawn(rows, each.sampling) for name, each in every_variant(experiment).items()}}

    def chart(self, rows: VariantRows, title: str) -> Figure:
        """Draw two charts: bits per byte against repeated 4-grams by variant, and measured against predicted bits per
        token."""
        found = []
        for row in rows:
            kind = "sampled" if "predicted" in row else "reference"
            found.append(Point(row["variant"], row["bits_per_byte"], row["repeated_4"], kind))
        repeats = points(
            found,
            Axis("bits per byte under the model in float32", log=True),
            Axis("repeated 4-grams", percent=True),
            width=480,
            height=340,
            y_zero=True,
        )
        predicted = [row.get("predicted", {}).get("bits_a_token") for row in rows]
        bits = [Bar(row["variant"], row["bits_a_token"], mark) for row, mark in zip(rows, predicted, strict=True)]
        return beside([repeats, bars(bits, Axis("bits per token (tick: predicted)"), width=300)], title)


def distinct_ngram_fraction(ids: Sequence[int], n: int) -> float:
    """Return the fraction of a text's n-grams that are distinct (Li et al., 2016)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams)


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Return whether the text ends in a loop with a period of at most `MAX_LOOP_TOKENS` tokens."""
    for period in range(1, min(MAX_LOOP_TOKENS, len(ids) // MIN_LOOP_REPEATS) + 1):
        turns = max(MIN_LOOP_REPEATS, -(-MIN_LOOP_SPAN // period))
        end = list(ids[-period * turns :])
        if len(end) == period * turns and end == end[-period:] * turns:
            return True
    return False


def token_surprisal(logits: Tensor, ids: Sequence[int]) -> tuple[float, float, float]:
    """Return statistics of the surprisal of a text's tokens.

    Args:
        logits: Logits of the position before each token, [token, vocab].
        ids: The tokens.

    Returns:
        The total bits of the tokens, the mean entropy of the distributions in bits, and the fraction of tokens that are
        the most likely ones.
    """
    logp = logits.double().log_softmax(-1)
    tokens = torch.tensor(ids)
    bits = -float(logp.gather(-1, tokens[:, None]).sum()) / math.log(2)
    return bits, entropy(logits), float((logp.argmax(-1) == tokens).double().mean())


def entropy(logits: Tensor) -> float:
    """Return the entropy in bits of each row's distribution, averaged over the rows."""
    p = logits.double().softmax(-1)
    return float(-torch.special.xlogy(p, p).sum(-1).mean()) / math.log(2)


class ScoringModel:
    """The prompts, their held-out continuations, and the float32 model that scores all texts."""

    def __init__(self, experiment: Experiment, work: TextsWorkload):
        self.judge = runner_for(reference_experiment(experiment))
        windows, self.about = work.draw_windows(self.judge, work.output_tokens)
        length = work.prompt_tokens + work.output_tokens
        self.prompts: list[Ids] = [window.ids[: work.prompt_tokens] for window in windows]
        self.came: list[Ids] = [window.ids[work.prompt_tokens : length] for window in windows]

    def logits(self, index: int, output: Ids) -> Tensor:
        """Return the logits of the position before each token of an output: [token, vocab]."""
        prompt = self.prompts[index]
        return self.judge.model.logits((*prompt, *output)[:-1])[len(prompt) - 1 :]


def _drawn(logits: Tensor, sampling: SamplingParameters) -> dict[str, float]:
    exact = logits.double().log_softmax(-1)
    if sampling.temperature == 0:
        return {"drawn_entropy": 0.0, "bits_a_token": -float(exact.amax(-1).mean()) / math.log(2)}
    kept = logits
    for rule in build_filters(sampling):
        kept = rule(kept, [History()] * len(kept))
    p = kept.double().softmax(-1)
    return {"drawn_entropy": entropy(kept), "bits_a_token": -float((p * exact).sum(-1).mean()) / math.log(2)}


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
