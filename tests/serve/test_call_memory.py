"""The memory of calls: the next turn of a conversation computes only what is new, and tenants share
nothing."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.prompt.cache_miss import CacheMiss
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.request import SamplingParameters
from workbench.response_format import Thinking
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, ToolArguments, ToolCallBegun
from workbench.serve.call import Breakpoint, Call, Caller
from workbench.serve.memory.call_memory import CallMemory, CallRecorder
from workbench.serve.served_model import PreparedPrompt, ServedModel
from workbench.trace.events import Event, Finished

PAGE = 8
QUESTIONS = ("What is 12 + 30?", "And 7 times 8?", "Tell me about lists.", "hi", "Once upon a time", "Thank you!")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


@pytest.fixture(scope="module")
def model() -> ServedModel:
    settings = {"model": "demo-chat", "backend": "eager", "prefix": "radix", "page_size": PAGE, "pages": 900}
    return ServedModel("demo-chat", Runner(EngineConfig.build(**settings)))


def runner_of(model: ServedModel) -> Runner:
    assert isinstance(model.runner, Runner)
    return model.runner


@dataclass
class Answered:
    """A call that was carried out as the server does it, with what its client was shown."""

    call: Call
    prepared: PreparedPrompt
    pieces: list[Piece]
    events: list[Event] = field(repr=False)

    @property
    def read(self) -> PromptRead:
        return next(piece for piece in self.pieces if isinstance(piece, PromptRead))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return next(piece.token_ids for piece in self.pieces if isinstance(piece, Ended))

    def as_sent_back(self) -> AssistantTurn:
        """Return what a client of OpenAI's protocol sends: text, and calls with their ids; no thought, no tokens."""
        text = "".join(piece.text for piece in self.pieces if isinstance(piece, Text))
        calls = [piece for piece in self.pieces if isinstance(piece, ToolCallBegun)]
        arguments = ["".join(p.text for p in self.pieces if isinstance(p, ToolArguments) and p.index == each.index)
                     for each in calls]  # fmt: skip
        found = (ToolCall.parse(each.name, words, each.id) for each, words in zip(calls, arguments, strict=True))
        return AssistantTurn(content=text, tool_calls=tuple(found))


def answered(
    model: ServedModel, memory: CallMemory | None, conversation: Conversation, id: str, tenant: str = "a", **values
) -> Answered:
    sampling = {"temperature": 1.0, "max_tokens": 30, "seed": zlib.crc32(id.encode()), **values.pop("sampling", {})}
    caller = Caller(tenant=tenant, cache_salt=tenant)
    call = Call(
        id, "openai.chat", "demo-chat", (conversation,), SamplingParameters(**sampling), caller=caller, **values
    )
    prepared = model.prepare(call, None if memory is None else memory.turns)
    made = AnswerPieces(call, prepared, model.tokenizer)
    events = list(model.runner.stream([each.request for each in prepared]))
    pieces = made.push(events)
    assert made.failure is None
    if memory is not None:
        CallRecorder(memory, call, model, prepared).take(pieces)
    return Answered(call, prepared[0], pieces, events)


def talks(count: int) -> Iterator[tuple[random.Random, Conversation, dict]]:
    for seed in range(count):
        draw = random.Random(seed)
        tools = [add] if draw.random() < 0.5 else []
        yield (
            draw,
            Conversation(system=draw.choice([None, "Be brief."]), tools=tools),
            {"temperature": draw.choice([0.0, 0.7, 1.0])},
        )


def test_the_next_turn_computes_only_what_is_new(model: ServedModel) -> None:
    """The law of conversations through the memory; without it many answers have other tokens when read from text."""
    turns, lost = 0, 0
    for number, (draw, conversation, sampling) in enumerate(talks(tries(36))):
        memory, tenant = CallMemory(), f"tenant {number}"
        before: Answered | None = None
        for turn in range(4):
            asked = conversation.user(draw.choice(QUESTIONS))
            sampling |= {"seed": draw.randrange(1000), "thinking": Thinking(budget_tokens=draw.choice([0, 12]))}
            now = answered(model, memory, asked, f"{number} {turn}", tenant, sampling=sampling)
            if before is not None:
                known = before.prepared.request.prompt_ids + before.token_ids
                text_only = model.runner.assemble(asked).ids
                lost += text_only[: len(known)] != known
                assert now.prepared.request.prompt_ids[: len(known)] == known, "the history is rewritten"
                # The last token of an answer is computed with the next prompt.
                assert now.read.cached_tokens >= (len(known) - 1) // PAGE * PAGE
                turns += 1
            sent = now.as_sent_back()
            conversation = asked.with_turn(sent)
            for call in sent.tool_calls:
                conversation = conversation.result(json.dumps(draw.randrange(99)), call)
            before = now
    assert turns >= 18 and lost > 1, "the law would hold without the memory"


def reply(kept: Answered, conversation: Conversation, text: str) -> Conversation:
    """Return the conversation with the answer as its client has it, results of its calls, and a question."""
    sent = kept.as_sent_back()
    longer = conversation.with_turn(sent)
    for call in sent.tool_calls:
        longer = longer.result("42", call)
    return longer.user(text)


def test_an_answer_is_found_by_its_call_and_by_no_other_tenant(model: ServedModel) -> None:
    memory, asked = CallMemory(), Conversation(system="Be kind.").user("Tell me about lists.")
    first = answered(model, memory, asked, "chatcmpl-1", "a")
    kept = memory.turns.get("a", "chatcmpl-1")
    assert kept is not None and kept.generated_ids == first.token_ids
    assert memory.turns.get("b", "chatcmpl-1") is None and memory.turns.get("a", "chatcmpl-2") is None
    history = reply(first, asked, "And sets?")
    for tenant, filled in (("a", True), ("b", False)):
        turns = memory.turns.fill(tenant, "demo-chat", history).turns
        assert bool(turns[1].generated_ids) == filled  # type: ignore[union-attr] (the answer)
    for other in (
        history.model_copy(update={"system": "Be rude."}),
        history.model_copy(update={"turns": (history.turns[0], history.turns[1].model_copy(update={"content": "x"}))}),
    ):
        assert memory.turns.fill("a", "demo-chat", other) == other
    assert memory.turns.fill("a", "another model", history) == history


def test_tenants_share_no_pages(model: ServedModel) -> None:
    """A tenant computes all of what another has asked: nothing in time or usage tells of the other's prompt."""
    asked = Conversation(system="The code word of this test is heron, known to none but us.").user("What is it?")
    index = runner_of(model).kv_cache.manager.prefix_cache
    assert index is not None
    pages: dict[str, set[int]] = {}
    computed: dict[str, int] = {}
    for id, tenant in (("t1", "a"), ("t2", "b"), ("t3", "a")):
        got = answered(model, CallMemory(), asked, id, tenant, sampling={"max_tokens": 2, "temperature": 0})
        ids = got.prepared.request.prompt_ids
        end = next(event for event in got.events if isinstance(event, Finished))
        computed[id] = end.computed_tokens
        assert got.read.cached_tokens == end.cached_tokens == (0 if id != "t3" else (len(ids) - 1) // PAGE * PAGE)
        pages[id] = set(index.match_prefix(ids, tenant).pages[0])
        assert index.match_prefix(ids, "c").num_tokens == 0 and index.match_prefix(ids).num_tokens == 0
    assert computed["t1"] == computed["t2"] > computed["t3"]
    assert pages["t1"] and not pages["t1"] & pages["t2"] and pages["t3"] == pages["t1"]


def test_breakpoints_are_kept_and_what_was_written_is_said(model: ServedModel) -> None:
    memory = CallMemory()
    first_block = "Be brief in all that you say. " * 3
    asked = Conversation(system=first_block + "Count well.", tools=[add]).user("What is 1 + 1?")
    in_system = Breakpoint("system", len(first_block), 3600.0)
    points = (Breakpoint("turn", -1, 300.0), in_system, Breakpoint("tools", -1, 3600.0))
    first = answered(model, memory, asked, "msg_1", "points", breakpoints=points)
    prompt = first.prepared.prompt
    assert prompt is not None
    placed = {each.breakpoint.part: each.tokens for each in first.prepared.breakpoints}
    assert prompt.decode(prompt.ids[: placed["system"]]).endswith("you say.")  # a token has both the space and "Count"
    assert "Count" not in prompt.decode(prompt.ids[: placed["system"]])
    assert prompt.decode(prompt.ids[: placed["turn"]]).endswith("What is 1 + 1?")
    kept = [placed[part] // PAGE * PAGE for part in ("system", "tools", "turn")]
    assert [each.kept for each in first.read.pinned] == kept == sorted(kept)
    assert first.read.cache_written_by_ttl == ((300.0, kept[2] - kept[1]), (3600.0, kept[1]))
    assert first.read.written_tokens == kept[2] and first.read.cached_tokens == 0
    (note,) = first.call.notes["prompt_cache"]
    assert [each["kept_tokens"] for each in note["breakpoints"]] == kept
    whys = [each.get("why", "") for each in note["breakpoints"]]
    assert all(
        ("whole pages" in why) == (each["tokens"] % PAGE > 0)
        for why, each in zip(whys, note["breakpoints"], strict=True)
    )
    again = answered(model, memory, reply(first, asked, "And 2 + 2?"), "msg_2", "points", breakpoints=points)
    assert again.read.cached_tokens >= kept[2]
    ends = [each.kept for each in again.read.pinned]
    assert sum(tokens for _, tokens in again.read.cache_written_by_ttl) == max(0, max(ends) - again.read.cached_tokens)


def test_a_breakpoint_that_cannot_be_kept_says_so(model: ServedModel) -> None:
    asked = Conversation().user("hi")
    points = (Breakpoint("tools"), Breakpoint("turn", 7), Breakpoint("turn", 0))
    got = answered(model, CallMemory(), asked, "msg_3", "none", breakpoints=points)
    whys = [each["why"] for each in got.call.notes["prompt_cache"][0]["breakpoints"]]
    assert whys[:2] == ["the prompt does not have this part"] * 2 and "whole pages of 8" in whys[2]
    assert got.read.written_tokens == 0


def test_pins_outlive_what_is_used_later(model: ServedModel) -> None:
    settings = {"model": "demo-chat", "backend": "eager", "prefix": "radix", "page_size": PAGE, "pages": 40}
    small = ServedModel("demo-chat", Runner(EngineConfig.build(**settings)))
    brief = {"max_tokens": 2, "temperature": 0}
    pinned, plain = (Conversation(system=f"You are {name}. " * 6).user("hi") for name in ("Ada", "Bob"))
    one = answered(small, None, pinned, "p", breakpoints=(Breakpoint("system"),), sampling=brief)
    answered(small, None, plain, "q", sampling=brief)
    for number in range(8):
        other = Conversation(system=f"{number} is a number. " * 8).user("hi")
        answered(small, None, other, f"o{number}", sampling=brief)
    assert one.read.written_tokens
    assert answered(small, None, pinned, "p2", sampling=brief).read.cached_tokens >= one.read.written_tokens
    assert answered(small, None, plain, "q2", sampling=brief).read.cached_tokens == 0


def test_a_miss_is_explained_against_the_earlier_call(model: ServedModel) -> None:
    memory, brief = CallMemory(), {"max_tokens": 4, "temperature": 0}
    asked = Conversation(system="You answer with one word, and never two.").user("What is the sky?")
    first = answered(model, memory, asked, "msg_a", "m", sampling=brief)
    for id, tenant, changed, kind in (
        ("msg_b", "m", reply(first, asked, "And the sea?"), None),
        ("msg_c", "m", asked.model_copy(update={"system": "You answer with one song."}), "system_changed"),
        ("msg_d", "n", asked, "previous_not_found"),
    ):
        got = answered(model, memory, changed, id, tenant, previous="msg_a", sampling=brief)
        miss = got.call.notes.get("cache_miss")
        assert (None if miss is None else miss.kind) == kind
        if kind == "system_changed":
            assert isinstance(miss, CacheMiss) and miss.missed_tokens and miss.part == "system"
    runner_of(model).reset_prefix_cache()
    got = answered(model, memory, asked, "msg_e", "m", previous="msg_a", sampling=brief)
    assert got.call.notes["cache_miss"].kind == "evicted"


def test_log_probabilities_of_a_prompt_come_with_it(model: ServedModel) -> None:
    got = answered(model, None, Conversation().user("hi there"), "lp", prompt_logprobs=2)
    ids = got.prepared.request.prompt_ids
    assert tuple(each.token_id for each in got.read.logprobs) == ids
    assert got.read.logprobs[0].logprob is None and all(len(each.top) == 2 for each in got.read.logprobs[1:])
