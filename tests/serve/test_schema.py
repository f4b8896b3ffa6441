"""The OpenAPI document against the server, by schemathesis: no 5xx, and every answer as the document describes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import checks
from schemathesis.core.errors import InvalidSchema
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import negative

import workbench
from tests.patience import limit
from tests.thorough import THOROUGH, tries
from workbench.engine.runner import Runner
from workbench.serve.app import build_app
from workbench.serve.call import Call
from workbench.serve.dialects.openai.completions import OpenAICompletions
from workbench.serve.document import build_document
from workbench.serve.gate import Lease, OpenGate, OpenLease
from workbench.serve.server import Server, serve

MODEL = "demo-chat"
MAX_TOKENS = 3  # of an answer, whatever its body asks for: requests are quick
COVERAGE = 1.0 if THOROUGH else 0.25  # share of the 3,600 bodies that schemathesis makes of bounds and wrong types
SLOW = (
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
)
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@dataclass
class ShortAnswers(OpenGate):
    """A gate that admits every call with a short answer; with `fails_when_whole` it fails where it is no stream."""

    fails_when_whole: bool = False

    async def admit(self, call: Call) -> Lease:
        if self.fails_when_whole and not call.stream:
            raise RuntimeError("planted")
        sampling = call.sampling
        values = {"max_tokens": min(sampling.max_tokens, MAX_TOKENS), "thinking": None}
        return OpenLease(replace(call, sampling=sampling.model_copy(update=values)))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return workbench.load(MODEL, backend="eager", prefix="radix")


@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Server]:
    with serve(runner, gate=ShortAnswers(), max_choices=4) as found:
        yield found


def describe() -> Any:
    """Return the operations of the document. Calls name the one model that is served: they get beyond its search."""
    document = build_document(build_app({}))
    for operations in document["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                fields = content["schema"]["properties"]
                if fields.get("model", {}).get("type") == "string":
                    fields["model"] = {"type": "string", "enum": [MODEL]}
    return schemathesis.openapi.from_dict(document)


# Where schemathesis 4.32 finds that nothing can be drawn from a mutation it ends the test; like others it is declined.
negative.DECLINED += (InvalidSchema,)

schema = describe()


def is_chosen(case: schemathesis.Case) -> bool:
    """Choose by what the case is, so that a failure is found again: seeds of draws are not those of the coverage."""
    digest = hashlib.sha256(repr((case.path, case.query, case.headers, case.body)).encode()).digest()
    return digest[0] < 256 * COVERAGE


@schema.parametrize()
@settings(max_examples=tries(40), deadline=None, suppress_health_check=[HealthCheck.too_slow, *SLOW])
def test_every_answer_is_as_the_document_says(case: schemathesis.Case, server: Server) -> None:
    """Cases of the coverage that are not chosen are rejected: they count as no examples."""
    assume(case.meta is None or case.meta.phase.name.value != "coverage" or is_chosen(case))
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=limit(60))


@pytest.mark.parametrize("fault", ["a failure", "a shape"])
def test_a_planted_fault_is_found(fault: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = schema["/v1/completions"]["POST"]
    if fault == "a shape":
        monkeypatch.setattr(OpenAICompletions, "answer", lambda *_: {"id": "cmpl-1", "choices": []})

    with serve(runner, gate=ShortAnswers(fails_when_whole=fault == "a failure"), max_choices=4) as faulty:

        @settings(
            max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, *SLOW]
        )
        @given(case=operation.as_strategy())
        def attack(case: schemathesis.Case) -> None:
            case.call_and_validate(base_url=faulty.url, checks=CHECKS, timeout=limit(60))

        with pytest.raises(FailureGroup, match="Server error" if fault == "a failure" else "violates schema"):
            attack()
