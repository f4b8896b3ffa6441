"""Export a call as an OpenTelemetry span with the GenAI conventions, if the extra `telemetry` is installed.

The conventions' names have the status "development" and may change; only this table has them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from workbench.serve.watch.traces import CallTrace

SYSTEM = "inference_workbench"
OPERATIONS = {"openai.completions": "text_completion"}  # others: chat
SAMPLING = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.choice.count": "n",
}
USED = {
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "gen_ai.usage.cache_write.input_tokens": "written_tokens",
    "gen_ai.usage.reasoning.output_tokens": "thinking_tokens",
}


class CallSpans:
    """An exporter of calls as spans of the process's tracer; it does nothing without OpenTelemetry."""

    def __init__(self, tracer: Any = None):
        self._tracer = tracer
        if tracer is None and importlib.util.find_spec("opentelemetry") is not None:
            from opentelemetry import trace

            self._tracer = trace.get_tracer("workbench.serve")

    def export(self, trace: CallTrace) -> None:
        """Export a settled call, with a child span for each phase."""
        if self._tracer is None or trace.outcome is None:
            return
        begin = int(trace.created * 1e9)
        moment = lambda seconds: begin + int(seconds * 1e9)  # noqa: E731 (one use)
        operation = OPERATIONS.get(trace.call.dialect, "chat")
        span = self._tracer.start_span(
            f"{operation} {trace.call.model}", start_time=begin, attributes=attributes_of(trace, operation)
        )
        if span.is_recording():
            from opentelemetry.trace import set_span_in_context

            inside = set_span_in_context(span)
            for name, (start, end) in trace.spans().items():
                self._tracer.start_span(name, context=inside, start_time=moment(start)).end(moment(end))
        span.end(moment(trace.outcome.seconds))


def attributes_of(trace: CallTrace, operation: str) -> dict[str, Any]:
    """Return the attributes of a call's span, by the names of the GenAI conventions."""
    assert trace.outcome is not None
    call, outcome = trace.call, trace.outcome
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SYSTEM,
        "gen_ai.request.model": call.model,
        "gen_ai.response.id": call.id,
        "workbench.dialect": call.dialect,
        "workbench.ended": outcome.ended,
    }
    found |= {name: getattr(call.sampling, field) for name, field in SAMPLING.items()}
    found |= {name: getattr(outcome.used, field) for name, field in USED.items()}
    if outcome.first_token_seconds is not None:
        found["gen_ai.server.time_to_first_token"] = outcome.first_token_seconds
    return found
