"""The gateway as a whole: from a key to the entry of a call in the accounts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gateway.calls import ALICE, BOB, Models, answer, chat, outcome
from tests.gateway.gates import answered, refused, run, said
from workbench.errors import WorkbenchError
from workbench.files import write_atomically
from workbench.gateway.config import GatewayConfig
from workbench.gateway.gate import Gateway
from workbench.prompt.conversation import Conversation
from workbench.serve.answers.pieces import Ended, Used
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError


def test_a_caller_is_renewed_as_long_as_the_key_is_valid(tmp_path: Path) -> None:
    """Work without a client asks before each call: what changed since holds at once."""

    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, secret = gateway.keys.create("alice", models=("demo",))
        caller = await gateway.identify({"x-api-key": secret})
        assert await gateway.renew(caller) == caller
        gateway.keys.rotate(key.id, hours=0)  # the text is another, the key the same
        assert await gateway.renew(caller) == caller
        gateway.keys.revoke(key.id)
        expired, _ = gateway.keys.create("alice", days=0)
        assert gateway.keys.active(expired.id) is None
        for each in (caller, Caller(expired.id, "alice"), Caller("unknown", "alice")):
            with pytest.raises(ApiError) as caught:
                await gateway.renew(each)
            assert caught.value.kind == "authentication_error"

    run(use, keys=str(tmp_path / "keys.json"))


def test_keys_of_both_protocols(tmp_path: Path) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, secret = gateway.keys.create("alice", models=("demo-draft",))
        caller = await gateway.identify({"authorization": f"Bearer {secret}"})
        for headers in (
            {"x-api-key": secret},
            *({"authorization": f"{kind} {secret}"} for kind in ("bearer", "BEARER")),
        ):
            assert caller == await gateway.identify(headers)
        assert (caller.key, caller.tenant, caller.scopes) == (key.id, "alice", {"model:demo-draft"})
        assert len(caller.cache_salt) == 64
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": secret}, {"x-api-key": secret[:-1]}):
            with pytest.raises(ApiError) as caught:
                await gateway.identify(headers)
            assert caught.value.status == 401
        assert (await refused(gateway, chat(caller=caller))).status == 403
        await answered(gateway, chat(model="demo-draft", caller=caller))

    run(use, keys=str(tmp_path / "keys.json"))


def test_moderation_of_prompts_and_answers() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        call = chat("Where is the TREASURE?")
        error = await refused(gateway, call)
        assert (error.status, error.code) == (400, "content_filter") and call.notes["moderation"] == "input: pirates"
        call = chat("Hi")
        left = await answered(gateway, call, answer("the treasure is"), "stopped")
        assert said(left) == "the " and left[-2:-1] == [Ended(0, "content_filter")]
        assert call.notes["moderation"] == "output: pirates"
        assert said(await answered(gateway, chat("Hi"), answer("no"))) == "no"  # the stopped one was not kept
        assert said(await answered(gateway, chat("Hi"), answer("else"))) == "no"
        assert (await gateway.limiter.remaining(gateway.config.limits.holders(call.caller)))[0].remaining >= 5

    rule = {"name": "pirates", "terms": ["treasure"]}
    limits = {"each_key": {"requests_per_minute": 10}}
    run(use, moderation={"rules": [rule]}, answers={}, limits=limits)


def test_token_ids_are_not_a_way_round_moderation() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        for text, is_refused in (("a Treasure", True), ("a map", False)):
            ids = tuple(map(ord, text))
            call = Call("cmpl-1", "openai.completions", "demo", ("a text", ids), chat().sampling, caller=ALICE)
            if is_refused:
                assert (await refused(gateway, call)).code == "content_filter"
            else:
                await answered(gateway, call, answer("x", choices=2))

    run(use, moderation={"rules": [{"name": "pirates", "terms": ["treasure"]}]})


TOOL = {"type": "object", "properties": {"at": {"type": "string", "enum": ["here", "there"]}}}


@pytest.mark.parametrize(
    "values",
    [
        {"tools": [{"name": "treasure", "parameters": TOOL}]},
        {"tools": [{"name": "look", "description": "Find the treasure.", "parameters": TOOL}]},
        {"tools": [{"name": "look", "parameters": TOOL | {"properties": {"treasure": {"type": "string"}}}}]},
        {"tools": [{"name": "look", "parameters": TOOL | {"properties": {"at": {"enum": ["treasure"]}}}}]},
        {"template_arguments": {"persona": ["pirate", {"wants": "the treasure"}]}},
        {"documents": [{"title": "A map", "text": "no", "source": "treasure island"}]},
        {"turns": ["Hi", {"role": "assistant", "content": "no", "thinking": "the treasure"}, "Ho"]},
        {"turns": [
            "Hi",
            {"role": "assistant", "content": "", "tool_calls": [{"name": "dig", "arguments": {"for": "treasure"}}]},
            {"role": "tool", "name": "dig", "content": "no"},
        ]},
    ],
)  # fmt: skip
def test_no_part_of_a_conversation_is_left_unmoderated(values: dict[str, Any]) -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        call = replace(chat(), prompts=(Conversation(**({"turns": ["Hi"]} | values)),))
        assert (await refused(gateway, call)).code == "content_filter"

    run(use, moderation={"rules": [{"name": "pirates", "terms": ["treasure"]}]})


def test_kept_answers_cost_nothing_and_are_accounted_as_kept() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        assert (await gateway.identify({})).scopes == {"*", "admin"}, "without keys any caller is the administrator"
        first, second = chat("Hi"), chat("Hi", dialect="anthropic.messages")
        assert said(await answered(gateway, first, answer("one"))) == "one"
        left = await answered(gateway, second, answer("two"))
        assert said(left) == "one" and second.notes["answers"] == "exact"
        assert isinstance(left[-1], Used) and left[-1].from_kept_answer
        assert said(await answered(gateway, chat("Hi", caller=BOB), answer("two"))) == "two"
        await answered(gateway, chat("Ho"), answer("cut")[:-2] + [Ended(0, "cancelled"), Used()], "cancelled")
        assert said(await answered(gateway, chat("Ho"), answer("whole"))) == "whole"
        gateway.accounts.flush()
        rows = {row.group: row for row in gateway.accounts.sums(("ended",))}
        assert rows[("kept",)].usage.prompt == 0 and rows[("kept",)].kept == 23 and rows[("kept",)].cost == 0
        assert rows[("finished",)].calls == 3 and rows[("cancelled",)].calls == 1

    run(use, answers={}, accounting={"prices": "article-a"})


def test_answers_of_variants_of_a_model_do_not_stand_for_each_other() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        async def asked(instead: str) -> str:
            return said(await answered(gateway, chat("Hi"), answer(instead)))

        models.weights = ""  # now one variant, now another
        call = chat("Hi")
        assert said(await answered(gateway, call, answer("of a"))) == "of a"
        assert call.notes["answers"] == "several variants of the model answer"
        assert [await asked("of b"), await asked("of a")] == ["of b", "of a"]
        models.weights = "1"
        lease = await gateway.admit(chat("Hi"))
        models.weights = "2"  # while it was answered
        left = [found for piece in answer("of a") for found in await lease.take([piece])]
        await lease.settle(outcome(left, "finished"))
        assert await asked("of b") == "of b"
        models.weights = "1"
        assert [await asked("of c"), await asked("of d")] == ["of c", "of c"]

    run(use, answers={})


def test_the_router_is_wired_in() -> None:
    async def use(gateway: Gateway, models: Models) -> None:
        models.away["demo-chat"] = "stopped"
        call = chat("Hi", "auto")
        lease = await gateway.admit(call)
        assert lease.call.model == "demo" and lease.call.notes is call.notes
        assert call.notes["router"]["reasons"][-1] == "fallback: demo"
        await lease.settle(outcome(answer()))
        gateway.accounts.flush()
        assert [row.group for row in gateway.accounts.sums(("model",))] == [("demo",)]

    rule = {"to": "demo-chat", "models": ["auto"]}
    run(use, router={"rules": [rule], "fallbacks": {"demo-chat": ["demo"]}})


def test_a_broken_file_of_keys_lets_no_caller_in_and_says_nothing_of_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"

    async def use(gateway: Gateway, models: Models) -> None:
        assert gateway.keys is not None
        key, text = gateway.keys.create("alice")
        caller = await gateway.identify({"authorization": f"Bearer {text}"})
        whole = file.read_text()
        for broken in ("{", '{"keys": 5}'):
            write_atomically(file, lambda to, broken=broken: to.write(broken.encode()))
            for ask in (gateway.identify({"x-api-key": text}), gateway.renew(caller)):
                with pytest.raises(ApiError) as caught:
                    await ask
                assert caught.value.status == 503 and str(tmp_path) not in caught.value.message
        assert str(file) in caplog.text
        write_atomically(file, lambda to: to.write(whole.encode()))
        assert await gateway.identify({"x-api-key": text}) == caller

    run(use, keys=str(file))


def test_the_config_is_one_value_of_yaml() -> None:
    text = """
    keys: keys.json
    limits: {each_tenant: {requests_at_once: 4, money_per_day: 2.50}}
    moderation: {rules: [{name: pirates, terms: [treasure]}]}
    answers: {ttl_seconds: 60}
    accounting: {file: usage.sqlite, prices: article-a}
    """
    config = GatewayConfig.from_values(yaml.safe_load(text))
    assert GatewayConfig.from_values(config.model_dump(mode="json")) == config
    with pytest.raises(WorkbenchError, match="gateway: limits.each_key.request_per_minute: unknown key; did you mean"):
        GatewayConfig.from_values({"limits": {"each_key": {"request_per_minute": 1}}})
