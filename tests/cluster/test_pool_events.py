"""Events and snapshots of pools: handovers in a request's stream and in the trace, loans; and log-probabilities that
are one engine's, bit for bit, whatever died or was lost on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiled_kernels import Backend
from tests.cluster.handovers import LAYERS
from tests.cluster.pool_threads import StartThreads
from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.patience import until
from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.pools import LentPages, PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.trace.events import Decoded, HandedOver
from workbench.trace.perfetto import ENGINE, REQUESTS, chrome_trace
from workbench.trace.recorder import Recorder

TRANSFERS = pytest.mark.parametrize("transfer", ["shared", "gloo"])
CHOSEN = {"page_size": 4, "pages": 40, "backend": "eager", "cache": {"prefix": "radix"}}


@TRANSFERS
def test_a_handover_is_in_the_stream_and_in_the_trace(transfer: Transfer) -> None:
    loaded, recorder = LoadedModel(model_of(spec_of()), None, None), Recorder()
    config = EngineConfig.build(**CHOSEN)
    asked = request("r", 17, 9)
    start = StartThreads(lambda config: loaded)
    with PrefillDecodePools(config, transfer=transfer, processes=start, listener=recorder.record) as pools:
        events = list(pools.stream([asked]))
        if transfer == "shared":  # the prefix cache of the decode engine holds them
            until(lambda: pools.snapshot().lent == (LentPages(1, 2, 5),))
            pools.recall()
            until(lambda: pools.snapshot().lent == ())
        found = pools.snapshot()
    assert not found.in_flight and [(each.name, each.role) for each in found.engines] == [
        ("prefill 0", "prefill"),
        ("decode 1", "decode"),
    ]
    assert all(each.state == "ready" and not each.requests for each in found.engines)
    assert found.counts == {"handed over": 1}
    [handover] = of(HandedOver, events)
    page_bytes = len(loaded.transformer.spec.layers) * 2 * 4 * 4 * 4  # keys and values, tokens, columns, bytes
    assert (handover.source, handover.replica, handover.pages) == (1, 2, 5)
    assert handover.bytes == (0 if transfer == "shared" else 5 * page_bytes) and handover.seconds >= 0
    kinds = [each.kind for each in events]
    at = kinds.index("handed_over")
    assert [each.replica for each in of(Decoded, events)] == [1] + [2] * 8
    assert kinds[:at].count("decoded") == 1 and kinds[at:].count("decoded") == 8
    trace = chrome_trace(recorder)["traceEvents"]
    [slice_] = [each for each in trace if each["name"] == "handover" and each["pid"] == REQUESTS]
    assert slice_["args"] == {"source": 1, "replica": 2, "pages": 5, "bytes": handover.bytes}
    named = {each["args"]["name"] for each in trace if each["ph"] == "M" and each["pid"] == ENGINE}
    assert {"steps of replica 1", "steps of replica 2"} <= named


def logprobs_of(events) -> dict:
    found = of(Decoded, events)
    return {(each.request_id, each.index): (each.token_id, each.logprob, each.top_logprobs) for each in found}


@TRANSFERS
def test_bits_are_those_of_one_engine_through_deaths(transfer: Transfer) -> None:
    chosen = {**CHOSEN, "batch_invariant": True, "backend": "mlir", "page_size": 8}
    model = model_of(LAYERS, backend=Backend.EAGER)
    asked = [request(f"r{i}", 9 + 5 * i, 8, temperature=0.7, seed=i, logprobs=2) for i in range(4)]
    alone = logprobs_of(runner_of(model, **chosen).stream(asked))
    loaded = LoadedModel(model, None, None)
    start = StartThreads(lambda config: loaded, {"prefill 0": [(5, True)], "decode 1": [(6, False)]})
    with PrefillDecodePools(EngineConfig.build(**chosen), 1, 1, transfer=transfer, processes=start) as pools:
        assert logprobs_of(pools.stream(asked)) == alone
        again = [replace(each, request_id=f"{each.request_id}-") for each in asked]
        found = logprobs_of(pools.stream(again))
        assert {(name.rstrip("-"), at): value for (name, at), value in found.items()} == alone
        assert pools.counts["processes that died"] >= 1
