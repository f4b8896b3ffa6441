"""Prediction of delivery costs: the handling of a token measured without a model, added to roofline step times."""

from __future__ import annotations

import time
from typing import cast

from workbench.engine.runner import Runner
from workbench.prompt.detokenize import Detokenizer, WholeTextDetokenizer
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.cache_of import spec_and_dtype
from workbench.study.ceilings import ceilings_for
from workbench.study.delivery import StreamingClient, deliver
from workbench.study.experiment import Experiment
from workbench.study.simulated_machine import step_cost_of, sizes_of
from workbench.study.streaming_workload import StreamingWorkload
from workbench.trace.events import Decoded, Finished

SAMPLE = 4096  # tokens whose handling is timed


def predicted_rates(experiment: Experiment, runner: Runner) -> dict[str, float]:
    """Return output tokens a second by delivery if only roofline and handling took time: an upper bound."""
    work = cast(StreamingWorkload, experiment.workload)
    at_once = min(work.requests, experiment.schedule.max_num_seqs)
    handling = delivery_seconds_per_token(work, cast(Tokenizer, runner.tokenizer))
    step = predicted_step_seconds(experiment, at_once)
    return {
        "handling_s_per_token": handling,
        "step_s": step,
        "output_tokens_per_s": 1 / (step / at_once + handling),
    }


def predicted_step_seconds(experiment: Experiment, num_seqs: int) -> float:
    """Predict the seconds of a decode step of `num_seqs` sequences, in the middle of their outputs."""
    work = cast(StreamingWorkload, experiment.workload)
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    kind = dtype if dtype in ("float32", "bfloat16") else "float32"
    size = round(sizes.weight_bytes)
    ceilings = ceilings_for(size, dtypes=(kind,))
    cost = step_cost_of(sizes)([(work.prompt_tokens + work.output_tokens // 2, 1)] * num_seqs, num_seqs)
    return ceilings.roofline_seconds(cost.flops, cost.bytes, kind, size)


def delivery_seconds_per_token(workload: StreamingWorkload, tokenizer: Tokenizer) -> float:
    """Measure the seconds of handling one token: its text, its event and its message, as the delivery has them."""
    ids = [number % tokenizer.vocab_size for number in range(SAMPLE)]
    output = WholeTextDetokenizer(tokenizer) if workload.delivery == "whole" else Detokenizer(tokenizer)
    with StreamingClient() as client:
        began = time.perf_counter()
        for index, token_id in enumerate(ids):
            text = output.push(token_id)
            if workload.delivery != "whole":
                deliver(Decoded(began, "sample", text, token_id=token_id, index=index), workload.delivery, client)
        rest = output.finish()
        deliver(Finished(began, "sample", rest, reason="length", output_text=output.text), workload.delivery, client)
        return (time.perf_counter() - began) / len(ids)
