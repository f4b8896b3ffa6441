"""Sampled texts by sampling method: their repetition, and their surprisal under the model itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.sampling.filters import History, build_filters
from workbench.stages import StageCounter
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.held_out import sample_windows, cut_windows
from workbench.study.quality_texts import read_texts
from workbench.study.runner_for import runner_for
from workbench.study.text_figures import distinct_ngram_fraction, ends_in_loop, entropy, token_surprisal
from workbench.study.texts_workload import TextsWorkload
from workbench.study.variants import REFERENCE, every_variant, reference_experiment, settings_text

ProgressCallback = Callable[[str], None]
Ids = tuple[int, ...]
HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW = "held-out text", "random tokens", "a loop"  # rows beside the variants


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


def measure_sampled_texts(experiment: Experiment, on_progress: ProgressCallback, predicted: dict[str, Any]) -> VariantResults:
    """Measure sampled texts and return the rows of the references, then one row a variant: means over the texts."""
    work, asked = cast(TextsWorkload, experiment.workload), ScoringModel(experiment)
    draw, vocab = random.Random(work.seed), asked.judge.model.spec.vocab_size
    noise = [tuple(draw.randrange(vocab) for _ in came) for came in asked.came]
    loops = [(came[:8] * len(came))[: len(came)] for came in asked.came]
    found: list[dict[str, Any]] = []
    for name, outputs in ((HELD_OUT_ROW, asked.came), (RANDOM_ROW, noise), (LOOP_ROW, loops)):
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(outputs)]
    rows = [{"variant": name, "settings": "", **_means(found, name)} for name in (HELD_OUT_ROW, RANDOM_ROW, LOOP_ROW)]
    runners: dict[str, Runner] = {}
    variants = every_variant(experiment) or {"as given": experiment}
    on_progress = StageCounter(on_progress, len(variants))
    for name, variant in variants.items():
        on_progress(name)
        key = variant.model_copy(update={"sampling": SamplingParameters()}).to_yaml()
        if key not in runners:
            runners[key] = runner_for(variant)
        turns = [_outputs(runners[key], asked.prompts, variant.sampling, work) for _ in range(work.repeats)]
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(turns[0])]
        same = all(turn == turns[0] for turn in turns)
        rows.append({
            "variant": name, "settings": settings_text(experiment, name), "backend": str(runners[key].backends),
            "temperature": variant.sampling.temperature, "top_k": variant.sampling.top_k, **_means(found, name),
            "repeated_alike": same if work.repeats > 1 else None, "predicted": predicted["variants"][name],
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
    if wrong := next((end for end in ends.values() if end.reason != "length"), None):
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
        "output_text": asked.judge.tokenizer.decode(ids),
    }  # fmt: skip


MEANS = ("distinct_1", "distinct_2", "repeated_4", "looped", "bits_a_token", "entropy", "most_likely")


def _means(found: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    mine = [each for each in found if each["variant"] == name]
    bits = sum(each["bits"] for each in mine) / sum(each["bytes"] for each in mine)
    return {"bits_per_byte": bits, **{key: mean(float(each[key]) for each in mine) for key in MEANS}}
