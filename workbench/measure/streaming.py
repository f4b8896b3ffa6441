"""Compare streaming with whole answers: the cost of each way of delivery, measured and predicted, and the time to the
first visible text.

A text is delivered in one message, or in one message for every token that adds text. The prediction adds the time of
handling a token, measured without a model, to roofline step times.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, ClassVar, Literal, cast

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults, Workload
from workbench.experiment.variants import described, every_variant
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.rounds import check_full_length, load_runners, measure_in_rounds
from workbench.measure.simulated import sizes_of, step_cost_of
from workbench.memory.capacity import spec_and_dtype
from workbench.progress import StageCounter
from workbench.prompt.tokenization.detokenize import Detokenizer, WholeTextDetokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import Request, random_token_ids
from workbench.runs.metrics import percentile
from workbench.settings import Count, Seed
from workbench.trace.events import Decoded, Event, Finished
from workbench.units import Measure, duration

Delivery = Literal["whole", "events", "stream"]
SCRIPT = Path(__file__).with_name("streaming_client.py")
SAMPLE = 4096  # number of tokens used to time the handling of a token
MEDIANS = ("seconds", "output_tokens_per_s", "visible_s_p50", "e2el_s_p50", "messages")


class StreamingWorkload(Workload):
    """Send `requests` at once, all with outputs of full length, to a client in a separate process.

    `whole`: the client gets each text at its end, and tokens are detokenized only then. `events`: the same, but every
    token is detokenized and becomes an event at once. `stream`: the client gets every token's text as a server-sent
    event."""

    measures: ClassVar = (
        duration("visible_s_*", "first text seen {}"),
        Measure("messages"),
        duration("handling_s_per_token", "handling", "s/token"),
    )
    kind: Literal["streaming"] = "streaming"
    delivery: Delivery = "stream"
    requests: Count = 16
    prompt_tokens: Count = 32
    output_tokens: Count = 128
    rounds: Count = 9  # measured rounds, variants in turn, after one warm-up
    seed: Seed = 0

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure delivery and return one row for each variant: medians over interleaved rounds, with the predicted
        rate.

        Variants that differ only in their workload share a runner, so that the weights lie at the same addresses."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, 1 + len(variants) * (self.rounds + 2))
        runners = load_runners(variants, on_progress, {"workload": experiment.workload})
        for name, runner in runners.items():
            if runner.tokenizer is None:
                model = variants[name].model.name
                raise WorkbenchError(f"variants.{name}: model {model!r} has no tokenizer and cannot produce text")
        on_progress("predicting")
        predicted = {name: predicted_rates(variant, runners[name]) for name, variant in variants.items()}

        def measured(name: str, turn: int) -> dict[str, Any]:
            runners[name].reset_prefix_cache()
            return run_streaming_round(runners[name], variants[name], turn)

        rounds = measure_in_rounds(runners, self.rounds, on_progress, measured, rotate=True)
        rows = [_row(experiment, name, runners[name], rounds, predicted[name]) for name in variants]
        about = {"workload": experiment.workload.model_dump(mode="json"), "predicted": predicted}
        return VariantResults(rows, about, {"rounds": rounds})


class StreamingClient:
    """A client in a separate process. After `close`, `received` holds for each request the times that the client
    noted."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._pipe = cast(IO[bytes], self._process.stdin)
        self.received: dict[str, list[Any]] = {}
        if cast(IO[bytes], self._process.stdout).readline().strip() != b"ready":
            self._process.kill()
            raise WorkbenchError("the client's process did not start; its error is printed above")

    def send(self, name: str, text: str, reason: str | None) -> None:
        """Send one server-sent event, as `/v1/completions` streams them."""
        chunk = {
            "id": name, "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]
        }  # fmt: skip
        self._pipe.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def __enter__(self) -> StreamingClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        said = self._process.communicate()[0]
        if kind is None:
            self.received = json.loads(said)


def deliver(event: Event, delivery: Delivery, client: StreamingClient) -> None:
    """Send the client the text that an event adds. With delivery `stream`, the last piece carries the finish reason."""
    if isinstance(event, Finished):
        client.send(event.request_id, event.text if delivery == "stream" else event.output_text, event.reason)
    elif isinstance(event, Decoded) and delivery == "stream" and event.text:
        client.send(event.request_id, event.text, None)


def predicted_rates(experiment: Experiment, runner: Runner) -> dict[str, float]:
    """Return an upper bound of output tokens per second for each kind of delivery, as if only roofline steps and token
    handling took time."""
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
    size = round(sizes.weight_bytes)
    ceilings = ceilings_for(size, dtypes=gemm_dtypes(dtype))
    cost = step_cost_of(sizes)([(work.prompt_tokens + work.output_tokens // 2, 1)] * num_seqs, num_seqs)
    return ceilings.roofline_seconds(cost.flops, cost.bytes, dtype, size)


def delivery_seconds_per_token(workload: StreamingWorkload, tokenizer: Tokenizer) -> float:
    """Measure the seconds of handling one token in a kind of delivery: detokenizing it, making an event, and sending a
    message, each only if that delivery does it."""
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


def run_streaming_round(runner: Runner, experiment: Experiment, round_index: int) -> dict[str, Any]:
    """Run one round. Return the seconds from the first arrival to the last message, and the client's timestamps."""
    work = cast(StreamingWorkload, experiment.workload)
    box, owed = deque[Event](), set[str]()
    tokens = 0
    with StreamingClient() as client:
        began = runner.clock()
        try:
            for request in random_requests(experiment, runner.model.spec.vocab_size, round_index):
                owed.add(request.request_id)
                runner.submit(request, box, began)
            while owed:
                if not box:
                    runner.step(box)
                while box:
                    event = box.popleft()
                    deliver(event, work.delivery, client)
                    if isinstance(event, Finished):
                        owed.discard(event.request_id)
                        tokens += len(event.token_ids)
                        check_full_length(event)
        finally:
            runner.cancel_all(box)
        seconds = runner.clock() - began
    seen = client.received.values()
    return {
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "visible_s_p50": percentile((first - began for first, *_ in seen), 50),
        "e2el_s_p50": percentile((last - began for _, last, *_ in seen), 50),
        "messages": sum(count for _, _, count, _ in seen),
    }


def random_requests(experiment: Experiment, vocab: int, round_index: int) -> list[Request]:
    """Return requests with prompts of random tokens, the same for every delivery in a round."""
    work = cast(StreamingWorkload, experiment.workload)
    draw = random.Random(f"{work.seed}/{round_index}")
    asked = {"max_tokens": work.output_tokens, "ignore_eos": True, "stop": (), "stop_token_ids": (), "n": 1}
    sampling = experiment.sampling.model_copy(update=asked)
    return [
        Request(
            f"request-{number}", random_token_ids(draw, vocab, work.prompt_tokens),
            sampling.model_copy(update={"seed": (sampling.seed + number) % 2**63}), final_only=work.delivery == "whole",
        )
        for number in range(work.requests)
    ]  # fmt: skip


def _row(
    experiment: Experiment, name: str, runner: Runner, rounds: list[dict[str, Any]], predicted: Mapping[str, float]
) -> dict[str, Any]:
    mine = [each for each in rounds if each["variant"] == name]
    return {
        **described(experiment, name, runner.core.backends),
        **{key: median(each[key] for each in mine) for key in MEDIANS},
        "rates": [each["output_tokens_per_s"] for each in mine],
        "predicted_output_tokens_per_s": predicted["output_tokens_per_s"],
        "handling_s_per_token": predicted["handling_s_per_token"],
    }  # fmt: skip
