"""From an experiment's workload to requests."""

from __future__ import annotations

import random

from workbench.engine.intake import request_from
from workbench.errors import WorkbenchError
from workbench.prompt.tokenizer import Tokenizer
from workbench.request import Request, SamplingParameters
from workbench.study.experiment import Experiment, PromptsWorkload, RandomWorkload


def requests_of(experiment: Experiment, tokenizer: Tokenizer | None, vocab: int) -> list[Request]:
    """The experiment's requests, the same every time. A text that cannot be encoded is one to be refused."""
    workload = experiment.workload
    if isinstance(workload, RandomWorkload):
        return _random(workload, experiment.sampling, vocab)
    if not isinstance(workload, PromptsWorkload):
        raise WorkbenchError(f"a workload of kind {workload.kind!r} has no requests to run: it is measured as a whole")
    if tokenizer is None:
        name = experiment.model.name
        raise WorkbenchError(f"workload.prompts: model {name!r} has no tokenizer; use `workload: {{kind: random}}`")
    assert isinstance(workload, PromptsWorkload)  # the others are comparisons, which make their own requests
    return _prompts(workload, experiment.sampling, tokenizer)


def _prompts(workload: PromptsWorkload, sampling: SamplingParameters, tokenizer: Tokenizer | None) -> list[Request]:
    texts = [text for text in workload.prompts for _ in range(workload.copies)]
    return [
        request_from(text, tokenizer, sampling.model_copy(update={"seed": sampling.seed + index}), f"request-{index}")
        for index, text in enumerate(texts)
    ]


def _random(workload: RandomWorkload, sampling: SamplingParameters, vocab: int) -> list[Request]:
    draw = random.Random(workload.seed)
    asked = {"max_tokens": workload.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": ()}
    return [
        Request(
            f"request-{index}",
            tuple(draw.randrange(vocab) for _ in range(workload.prompt_tokens)),
            sampling.model_copy(update={**asked, "seed": sampling.seed + index}),
        )
        for index in range(workload.requests)
    ]
