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
from workbench.sampling.filters import History, pipeline
from workbench.stages import Counted
from workbench.study.experiment import Experiment
from workbench.study.findings import Findings
from workbench.study.held_out import sample, windows
from workbench.study.quality_texts import texts_of
from workbench.study.run import runner_for
from workbench.study.text_figures import distinct, ends_in_loop, entropy, surprise
from workbench.study.texts_workload import TextsWorkload
from workbench.study.variants import REFERENCE, every_variant, reference_of, settings_text

Tell = Callable[[str], None]
Ids = tuple[int, ...]
CAME, NOISE, LOOP = "held-out text", "random tokens", "a loop"  # rows beside the variants


class Asked:
    """The prompts, their held-out continuations, and the float32 model that scores texts."""

    def __init__(self, experiment: Experiment):
        work = cast(TextsWorkload, experiment.workload)
        self.judge = runner_for(reference_of(experiment))
        if self.judge.tokenizer is None:
            raise WorkbenchError(f"workload.kind texts: model {experiment.model.name!r} has no tokenizer")
        texts, self.about = texts_of(work.texts)
        length = work.prompt_tokens + work.output_tokens
        every = windows(self.judge.tokenizer, texts, length)
        cut = [window.ids for window in sample(every, work.prompts, work.seed, length)]
        self.prompts: list[Ids] = [ids[: work.prompt_tokens] for ids in cut]
        self.came: list[Ids] = [ids[work.prompt_tokens : length] for ids in cut]

    def logits(self, index: int, output: Ids) -> Tensor:
        """Return the logits of the position before each token of an output: [token, vocab]."""
        prompt = self.prompts[index]
        return self.judge.model.logits((*prompt, *output)[:-1])[len(prompt) - 1 :]


def foretold(experiment: Experiment, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Predict by variant the distributions of its draws as if every context were held-out text.

    Returns their entropy, and the bits that the model assigns to a drawn token."""
    tell("what would be drawn after held-out text")
    asked = Asked(experiment)
    rows = torch.cat([asked.logits(index, came) for index, came in enumerate(asked.came)])
    variants = every_variant(experiment) or {"as given": experiment}
    return {"variants": {name: _drawn(rows, each.sampling) for name, each in variants.items()}}


def _drawn(logits: Tensor, sampling: SamplingParameters) -> dict[str, float]:
    exact = logits.double().log_softmax(-1)
    if sampling.temperature == 0:
        return {"drawn_entropy": 0.0, "bits_a_token": -float(exact.amax(-1).mean()) / math.log(2)}
    kept = logits
    for rule in pipeline(sampling):
        kept = rule(kept, [History()] * len(kept))
    p = kept.double().softmax(-1)
    return {"drawn_entropy": entropy(kept), "bits_a_token": -float((p * exact).sum(-1).mean()) / math.log(2)}


def sampled_texts(experiment: Experiment, tell: Tell, predicted: dict[str, Any]) -> Findings:
    """Measure sampled texts and return the rows of the references, then one row a variant: means over the texts."""
    work, asked = cast(TextsWorkload, experiment.workload), Asked(experiment)
    draw, vocab = random.Random(work.seed), asked.judge.model.spec.vocab
    noise = [tuple(draw.randrange(vocab) for _ in came) for came in asked.came]
    loops = [(came[:8] * len(came))[: len(came)] for came in asked.came]
    found: list[dict[str, Any]] = []
    for name, outputs in ((CAME, asked.came), (NOISE, noise), (LOOP, loops)):
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(outputs)]
    rows = [{"variant": name, "settings": "", **_means(found, name)} for name in (CAME, NOISE, LOOP)]
    runners: dict[str, Runner] = {}
    variants = every_variant(experiment) or {"as given": experiment}
    tell = Counted(tell, len(variants))
    for name, variant in variants.items():
        tell(name)
        key = variant.model_copy(update={"sampling": SamplingParameters()}).to_yaml()
        if key not in runners:
            runners[key] = runner_for(variant)
        turns = [_outputs(runners[key], asked.prompts, variant.sampling, work) for _ in range(work.repeats)]
        found += [{"variant": name, **_figures(asked, i, ids)} for i, ids in enumerate(turns[0])]
        same = all(turn == turns[0] for turn in turns)
        rows.append({
            "variant": name, "settings": settings_text(experiment, name), "lane": str(runners[key].lanes),
            "temperature": variant.sampling.temperature, "top_k": variant.sampling.top_k, **_means(found, name),
            "repeated_alike": same if work.repeats > 1 else None, "predicted": predicted["variants"][name],
        })  # fmt: skip
    about = asked.about | {"prompts": work.prompts, "output_tokens": work.output_tokens, "looked_at_by": REFERENCE}
    return Findings(rows, about, {"texts": found})


def _outputs(
    runner: Runner, prompts: Sequence[Ids], sampling: SamplingParameters, work: TextsWorkload
) -> list[Ids]:
    asked = [
        Request(str(i), prompt, sampling.model_copy(
            update={"max_tokens": work.output_tokens, "ignore_eos": True, "stop": (), "seed": sampling.seed + i}))
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    ends = generate(runner, asked)
    if wrong := next((end for end in ends.values() if end.reason != "length"), None):
        raise WorkbenchError(f"workload.texts: {wrong.error or wrong.reason}")
    return [ends[str(i)].token_ids for i in range(len(prompts))]


def _figures(asked: Asked, index: int, ids: Ids) -> dict[str, Any]:
    assert asked.judge.tokenizer is not None
    bits, spread, likely = surprise(asked.logits(index, ids), ids)
    size = sum(len(asked.judge.tokenizer.token_bytes(token)) for token in ids)
    return {
        "text": index, "distinct_1": distinct(ids, 1), "distinct_2": distinct(ids, 2),
        "repeated_4": 1 - distinct(ids, 4), "looped": ends_in_loop(ids), "bits_a_token": bits / len(ids),
        "bits": bits, "bytes": size, "entropy": spread, "most_likely": likely,
        "output_text": asked.judge.tokenizer.decode(ids),
    }  # fmt: skip


MEANS = ("distinct_1", "distinct_2", "repeated_4", "looped", "bits_a_token", "entropy", "most_likely")


def _means(found: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    mine = [each for each in found if each["variant"] == name]
    bits = sum(each["bits"] for each in mine) / sum(each["bytes"] for each in mine)
    return {"bits_per_byte": bits, **{key: mean(float(each[key]) for each in mine) for key in MEANS}}
