"""A call is one span with the GenAI conventions' names, and a child for each of its phases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.request import SamplingParameters
from workbench.serve.answers.pieces import Used
from workbench.serve.call import Call
from workbench.serve.gate import Outcome
from workbench.serve.watch.telemetry import CallSpans
from workbench.serve.watch.traces import CallTrace
from workbench.trace.events import Decoded, Finished, Prefilled, Scheduled, Submitted


def test_a_call_is_a_span_with_its_phases() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `telemetry` is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="the extra `telemetry` is not installed")
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="the extra `telemetry` is not installed"
    )
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace = CallTrace(Call("chatcmpl-1", "openai.chat", "m", ((1,),), SamplingParameters(temperature=0.5)))
    at = trace.began
    trace.keep([
        Submitted(at + 1, "c"), Scheduled(at + 2, "c", action="admitted"), Prefilled(at + 3, "c", tokens=1, computed=1),
        Decoded(at + 3, "c", token_id=1), Finished(at + 5, "c", reason="stop", token_ids=(1,)),
    ])  # fmt: skip
    trace.outcome = Outcome(Used(0, 7, 2, cached_tokens=3), "finished", 5.5, 3.0)
    CallSpans(provider.get_tracer("test")).export(trace)
    *phases, whole = exporter.get_finished_spans()
    assert whole.name == "chat m" and whole.attributes["gen_ai.usage.input_tokens"] == 7
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert whole.attributes["gen_ai.request.temperature"] == 0.5
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(5.5)
    lengths = {each.name: round((each.end_time - each.start_time) / 1e9, 3) for each in phases}
    assert lengths == {"prepare": 1.0, "queue": 1.0, "prefill": 1.0, "decode": 2.0}
    assert all(each.parent.span_id == whole.context.span_id for each in phases)
    trace.call = replace(trace.call, dialect="openai.completions")
    CallSpans(provider.get_tracer("test")).export(trace)
    whole = exporter.get_finished_spans()[-1]
    assert (whole.name, whole.attributes["gen_ai.operation.name"]) == ("text_completion m", "text_completion")
