"""Count calls and their times for Prometheus, under vLLM's names if the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from workbench.serve.served_model import ServedModel
from workbench.serve.watch.traces import CallTrace
from workbench.trace.events import Finished, Preempted

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counts:
    """A histogram of seconds. It adds all values of an answer at once, since adding them one by one takes a microsecond
    per token.
    """

    def __init__(self) -> None:
        self._counts = numpy.zeros(len(SECONDS) + 1, dtype=numpy.int64)
        self.total = 0.0

    def add(self, values: Sequence[float] | numpy.ndarray) -> None:
        """Add values to the histogram; each counts in the first bucket whose bound is not below it."""
        values = numpy.asarray(values, dtype=float)
        places = numpy.searchsorted(SECONDS, values, side="left")
        self._counts += numpy.bincount(places, minlength=len(self._counts))
        self.total += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Return (bound, number of values up to the bound) for each bucket."""
        bounds = [*map(floatToGoString, SECONDS), "+Inf"]
        return list(zip(bounds, map(float, numpy.cumsum(self._counts)), strict=True))


class Metrics:
    """The Prometheus metrics of one server, in a registry of its own."""

    def __init__(self, models: Mapping[str, ServedModel]):
        self._registry = registry = CollectorRegistry()
        self._models = models
        label = ["model_name"]

        def histogram(name: str, words: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", words, label, registry=registry, buckets=buckets)

        def counter(name: str, words: str, labels: list[str] = label) -> Counter:
            return Counter(f"vllm:{name}", words, labels, registry=registry)

        self._first_token = histogram("time_to_first_token_seconds", "Seconds from a call to its first token.")
        self._between: dict[str, Counts] = {}  # by model
        self._whole = histogram("e2e_request_latency_seconds", "Seconds from a call to its end.")
        self._phases = {
            name: histogram(f"request_{name}_time_seconds", f"Seconds of a call in the phase {name}.")
            for name in ("queue", "prefill", "decode")
        }
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a call.", TOKENS)
        self._answer_lengths = histogram("request_generation_tokens", "Tokens that a call generated.", TOKENS)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens that were read, cached ones too.")
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were found there.")
        self._preempted = counter("num_preemptions", "Preemptions.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._ended = counter("request_success", "Choices that ended, by reason.", ["model_name", "finished_reason"])
        self._calls = Counter(
            "workbench:calls", "Calls, by how they ended (finished, cancelled, stopped, failed, kept, refused).",
            ["model_name", "ended"], registry=registry,
        )  # fmt: skip
        registry.register(self)  # type: ignore[arg-type] (a collector by its shape)

    def collect(self) -> Iterator[Metric]:
        """Yield metrics read from the runners at this moment."""
        gauges = {
            "num_requests_running": "Requests that run.",
            "num_requests_waiting": "Requests that wait to be scheduled.",
            "kv_cache_usage_perc": "Share of the cache's pages that is in use, 0 to 1.",
        }
        families = {
            name: GaugeMetricFamily(f"vllm:{name}", words, labels=["model_name"]) for name, words in gauges.items()
        }
        for name, model in self._models.items():
            pages, (running, waiting) = model.pages, model.num_requests
            families["num_requests_running"].add_metric([name], running)
            families["num_requests_waiting"].add_metric([name], waiting)
            families["kv_cache_usage_perc"].add_metric([name], pages.used / sum(pages) if sum(pages) else 0.0)
        yield from families.values()
        yield from self._of_fleets()
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of an answer.", labels=["model_name"]
        )
        for name, counts in list(self._between.items()):
            between.add_metric([name], counts.buckets(), counts.total)
        yield between

    def _of_fleets(self) -> Iterator[Metric]:
        """Yield the additional metrics of models served by several replicas, by variant."""
        label = ["model_name", "variant"]
        replicas = GaugeMetricFamily("workbench:replicas", "Replicas that serve.", labels=label)
        words = {
            "samples": "Samples that were submitted.", "output_tokens": "Tokens of samples that ended.",
            "moves": "Requests that went on at another replica.",
            "lost_attempts": "Samples whose replica was lost or handed them over.",
            "lost_tokens": "Tokens that those replicas had computed for them and reported.",
        }  # fmt: skip
        counters = {
            name: CounterMetricFamily(f"workbench:fleet_{name}", each, labels=label) for name, each in words.items()
        }
        fleets = {name: model.fleet for name, model in self._models.items() if model.fleet is not None}
        for name, fleet in fleets.items():
            for variant, account in dict(fleet.accounts).items():
                replicas.add_metric([name, variant], fleet.num_replicas(variant))
                counts = (account.submitted, account.output_tokens, account.moves, account.lost_attempts,
                          account.lost_tokens)  # fmt: skip
                for family, count in zip(counters.values(), counts, strict=True):
                    family.add_metric([name, variant], count)
        if fleets:
            yield replicas
            yield from counters.values()

    def refused(self, model: str) -> None:
        """Count a call that was refused for lack of room."""
        self._calls.labels(model, "refused").inc()

    def observe(self, trace: CallTrace) -> None:
        """Count a call that was settled."""
        outcome, name = trace.outcome, trace.call.model
        if outcome is None:
            return
        used = outcome.used
        self._calls.labels(name, outcome.ended).inc()
        if trace.call.purpose == "tokenize":
            return
        self._whole.labels(name).observe(outcome.seconds)
        if outcome.ended == "kept" or trace.call.purpose != "answer":
            return
        if outcome.first_token_seconds is not None:
            self._first_token.labels(name).observe(outcome.first_token_seconds)
        between = self._between.setdefault(name, Counts())
        for times in trace.token_times().values():
            between.add(numpy.diff(times))
        for phase, (begin, end) in trace.spans().items():
            if phase in self._phases:
                self._phases[phase].labels(name).observe(end - begin)
        self._prompt_lengths.labels(name).observe(used.prompt_tokens)
        self._answer_lengths.labels(name).observe(used.completion_tokens)
        counts = [
            (self._prompt_tokens, used.prompt_tokens), (self._generated, used.completion_tokens),
            (self._queries, used.prompt_tokens), (self._hits, used.cached_tokens),
            (self._drafted, used.drafted_tokens), (self._accepted, used.accepted_tokens),
            (self._preempted, len(trace.of_kind(Preempted))),
        ]  # fmt: skip
        for counter, count in counts:
            counter.labels(name).inc(count)
        for end in trace.of_kind(Finished):
            self._ended.labels(name, end.reason).inc()

    def page(self) -> bytes:
        """Return the metrics page for Prometheus."""
        return generate_latest(self._registry)
