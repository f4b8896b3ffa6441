"""Measure prefill interference (head-of-line blocking): a long prompt arrives while other requests decode."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import model_validator

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import (
    Experiment,
    Predictions,
    ProgressCallback,
    ServedRequests,
    VariantResults,
    Workload,
    WorkloadCost,
)
from workbench.experiment.variants import described, every_variant
from workbench.measure.rounds import check_full_length, greedy_sampling, load_runners, measure_in_rounds
from workbench.progress import StageCounter
from workbench.request import Request, random_token_ids
from workbench.runs.metrics import percentile
from workbench.settings import Count, Seed
from workbench.trace.events import Decoded, Event, Finished
from workbench.units import duration

LONG, BEHIND = "long", "behind"  # request ids; the ids of the decoding requests are numbers
MEDIANS = ("longest_gap_s", "gap_s_p50", "ttft_s", "behind_ttft_s", "seconds")


class PrefillInterferenceWorkload(Workload):
    """`running` short requests decode; then one long prompt arrives, followed at once by a short request.

    The long prompt of `long_tokens` arrives when each running request has `after` tokens. Short requests have outputs
    of `output_tokens`, the long request of one token."""

    measures: ClassVar = (
        duration("longest_gap_s", "longest gap"),
        duration("gap_s_*", "gap before {}"),
        duration("ttft_s", "TTFT"),
        duration("behind_ttft_s", "TTFT behind"),
        duration("short_ttft_s_*", "short TTFT {}"),
    )
    kind: Literal["prefill_interference"] = "prefill_interference"
    running: Count = 4
    prompt_tokens: Count = 32  # tokens of a short request's prompt
    output_tokens: Count = 64
    after: Count = 8
    long_tokens: Count = 2000
    rounds: Count = 3  # measured rounds, variants in turn, each round with its own prompts
    seed: Seed = 0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.output_tokens <= self.after:
            raise ValueError(f"output_tokens {self.output_tokens}: must be above `after`, {self.after}")
        return self

    def measure(self, experiment: Experiment, on_progress: ProgressCallback, predicted: Predictions) -> VariantResults:
        """Measure every variant and return one row each: medians over interleaved rounds after one warm-up round."""
        variants = every_variant(experiment)
        on_progress = StageCounter(on_progress, len(variants) * (self.rounds + 2))
        runners = load_runners(variants, on_progress)

        def measured(name: str, turn: int) -> dict[str, Any]:
            runners[name].reset_prefix_cache()
            return run_interference_round(
                runners[name], cast(PrefillInterferenceWorkload, variants[name].workload), turn
            )

        rounds = measure_in_rounds(runners, self.rounds, on_progress, measured)
        rows = []
        for name, runner in runners.items():
            mine = [each for each in rounds if each["variant"] == name]
            known = {key: [each[key] for each in mine if each[key] is not None] for key in MEDIANS}
            short = [ttft for each in mine for ttft in (*each["running_ttft_s"], each["behind_ttft_s"])]
            rows.append({
                **described(experiment, name, runner.core.backends),
                **{key: median(values) if values else None for key, values in known.items()},
                "short_ttft_s_p50": percentile(short, 50), "short_ttft_s_p99": percentile(short, 99),
                "output_tokens_per_s": median(each["output_tokens"] / each["seconds"] for each in mine),
            })  # fmt: skip
        return VariantResults(rows, {"workload": experiment.workload.model_dump(mode="json")}, {"rounds": rounds})

    def cost(self, experiment: Experiment) -> WorkloadCost:
        lengths = {(self.prompt_tokens, self.output_tokens): self.running + 1, (self.long_tokens, 1): 1}
        return WorkloadCost((ServedRequests(experiment, lengths, self.rounds + 1),))


def run_interference_round(runner: Runner, workload: PrefillInterferenceWorkload, round_index: int) -> dict[str, Any]:
    """Run one round on `runner`.

    Returns the gaps between tokens of the decoding requests before the long prompt's arrival (None if there are none)
    and after it; the TTFT of the long request, of the short request behind it, and of the decoding requests; and the
    seconds from the first arrival to the last end."""
    draw, vocab, box = random.Random(f"{workload.seed}/{round_index}"), runner.model.spec.vocab_size, deque[Event]()
    arrived: dict[str, float] = {}
    times: dict[str, list[float]] = defaultdict(list)
    owed: set[str] = set()

    def ask(name: str, prompt: int, output: int) -> None:
        sampling = greedy_sampling(output)
        ids = random_token_ids(draw, vocab, prompt)
        arrived[name] = runner.clock()
        owed.add(name)
        runner.submit(Request(name, ids, sampling), box, arrived[name])

    running = [str(number) for number in range(workload.running)]
    try:
        for name in running:
            ask(name, workload.prompt_tokens, workload.output_tokens)
        while owed:
            runner.step(box)
            while box:
                event = box.popleft()
                if isinstance(event, Decoded):
                    times[event.request_id].append(event.time)
                elif isinstance(event, Finished):
                    owed.discard(event.request_id)
                    check_full_length(event)
            if LONG not in arrived and all(len(times[name]) >= workload.after for name in running):
                if not all(name in owed for name in running):
                    raise WorkbenchError(
                        f"{workload.running} requests did not run at once: one ended before all had {workload.after} "
                        "tokens; raise schedule.max_num_seqs or workload.output_tokens"
                    )
                ask(LONG, workload.long_tokens, 1)
                ask(BEHIND, workload.prompt_tokens, workload.output_tokens)
    finally:
        runner.cancel_all(box)
    gaps = [(before, after - before) for name in running for before, after in pairwise(times[name])]
    return {
        "longest_gap_s": max(gap for before, gap in gaps if before + gap > arrived[LONG]),
        "gap_s_p50": percentile([gap for before, gap in gaps if before + gap <= arrived[LONG]], 50),
        "ttft_s": times[LONG][0] - arrived[LONG],
        "behind_ttft_s": times[BEHIND][0] - arrived[BEHIND],
        "running_ttft_s": [times[name][0] - arrived[name] for name in running],
        "output_tokens": sum(map(len, times.values())),
        "seconds": max(each[-1] for each in times.values()) - arrived[running[0]],
    }
