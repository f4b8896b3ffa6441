"""Define the body of OpenAI's Responses: items of the input, tools, and refused fields with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo

from workbench.serve.bodies.fields import IN_CHATS, Body, IgnoredFields, Int, Refused
from workbench.serve.bodies.parts import Part, refused_types, type_of
from workbench.serve.dialects.openai.common import NO_ACCOUNT, Effort

TEXT_ONLY = "the models here read text; give its text"
FUNCTIONS_ONLY = "this server runs no tools itself; declare a function and answer its calls"
CALLERS = {
    "caller": Refused("only the model calls functions", ({"type": "direct"},)),
    "namespace": Refused(FUNCTIONS_ONLY),
}


class PromptCacheBreakpoint(Part):
    """A breakpoint: keep the prefix up to this part for `ttl` after its last use."""

    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m", "12h"] = "30m"


class TextPart(Part):
    """A text of the input or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {
        "annotations": "answers here have no citations",
        "logprobs": "an earlier answer is read as text",
    }


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


PARTS = ("input_text", "output_text", "text", "refusal")
REFUSED_PARTS = {"input_image": TEXT_ONLY, "input_file": TEXT_ONLY, "input_audio": TEXT_ONLY}
ContentPart = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | refused_types("a part", PARTS, REFUSED_PARTS),
    Discriminator(type_of(PARTS)),
]
Parts = Annotated[list[ContentPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart])]


class MessageItem(Part):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    type: Literal["message"] = "message"

    IGNORED: ClassVar[Mapping[str, str]] = {
        "id": "the server reads only an item's content",
        "status": "the server reads only an item's content",
        "phase": "a chat template has no place for it",
    }


class FunctionCallItem(Part):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: str
    arguments: str

    REFUSED: ClassVar[Mapping[str, Refused]] = {**CALLERS, "async": Refused(FUNCTIONS_ONLY, (False,))}
    IGNORED: ClassVar[Mapping[str, str]] = {
        "id": "a call is identified by its call_id",
        "status": "the server reads only an item's content",
    }


class FunctionOutputItem(Part):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    output: Parts

    REFUSED: ClassVar[Mapping[str, Refused]] = CALLERS
    IGNORED: ClassVar[Mapping[str, str]] = {
        "id": "a result is identified by its call_id",
        "name": "the function_call item has the name",
        "status": "the server reads only an item's content",
    }


class ReasoningText(Part):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Part):
    """A thought of an earlier answer; `encrypted_content`, if given, replaces its text."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] = []
    encrypted_content: str | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {
        "id": "the server reads only an item's content",
        "status": "the server reads only an item's content",
    }


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
REFUSED_ITEMS = {
    "item_reference": "give the item itself, or previous_response_id",
    "compaction": "histories are not compacted here",
    "compaction_trigger": "histories are not compacted here",
    "configuration_update": "give tools and instructions with the request",
    "additional_tools": "give tools with the request",
    **dict.fromkeys(
        (
            "file_search_call", "computer_call", "computer_call_output", "web_search_call", "tool_search_call",
            "tool_search_output", "image_generation_call", "code_interpreter_call", "local_shell_call",
            "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
            "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
            "custom_tool_call", "custom_tool_call_output", "program", "program_output",
        ),
        FUNCTIONS_ONLY,
    ),
}  # fmt: skip
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | refused_types("an item", ITEMS, REFUSED_ITEMS),
    Discriminator(type_of(ITEMS, "message")),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _refuse_other_tools(tool: Any) -> Any:
    if isinstance(tool, Mapping) and (kind := tool.get("type")) != "function":
        raise ValueError(f"a tool of type {str(kind)[:60]!r} is not supported: {FUNCTIONS_ONLY}")
    return tool


class FunctionTool(Part):
    """A function that the model may call. With `strict` calls match its whole schema, or the request is refused."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused("only the model calls functions", (["direct"],)),
        "async": Refused("calls are answered in the next request", (False,)),
        "defer_loading": Refused("this server has no tool search; give every tool that the model may call", (False,)),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        "output_schema": "tool results are read as text",
    }


class NamedFunction(Part):
    type: Literal["function"]
    name: str


def _refuse_other_choices(choice: Any) -> Any:
    if isinstance(choice, Mapping) and (kind := choice.get("type")) != "function":
        raise ValueError(f"{str(kind)[:60]!r} is not supported; give none, auto, required or a function")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ValueError(f"{choice[:60]!r} is unknown; known: none, auto, required")
    return choice


class TextFormat(Part):
    type: Literal["text", "json_schema", "json_object"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    strict: bool | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {"description": "the model is not shown the schema"}


class TextConfig(Part):
    format: TextFormat | None = None

    IGNORED: ClassVar[Mapping[str, str]] = {"verbosity": "the model was not trained for a verbosity"}


class Reasoning(Part):
    effort: Effort | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {"mode": Refused("the server has one mode", ("standard",))}
    IGNORED: ClassVar[Mapping[str, str]] = {
        "summary": "the whole thought is returned, not a summary",
        "generate_summary": "the whole thought is returned, not a summary",
        "context": "the chat template decides which thoughts the model reads",
    }


class PromptCacheOptions(Part):
    """Cache options; a miss is explained against the response `comparison_response_id`."""

    comparison_response_id: Annotated[str, Field(max_length=256)] | None = None
    prewarm: bool = False

    IGNORED: ClassVar[Mapping[str, str]] = {
        "mode": "every prefix is cached while there is room, and explicit breakpoints beyond that",
        "ttl": "each breakpoint has its own lifetime",
    }


class ResponseStreamOptions(Part):
    IGNORED: ClassVar[Mapping[str, str]] = {"include_obfuscation": "no padding is added to events"}


class InputTokensBody(Body):
    """The body of a token count: all fields that determine the prompt."""

    model: str
    input: Annotated[
        list[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(max_length=100_000),
    ] = []
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    tools: list[Annotated[FunctionTool, BeforeValidator(_refuse_other_tools)]] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None, BeforeValidator(_refuse_other_choices)
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "conversation": Refused("conversations are not stored separately; use previous_response_id"),
        "truncation": Refused("the server's setting `overflow` decides which part of a prompt is cut", ("disabled",)),
        "personality": Refused("put the personality into instructions"),
    }


INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
OTHER_PARTS = (  # parts of answers that no answer here has
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip


def _note_other_parts(name: str, info: ValidationInfo) -> str:
    """Record as ignored a requested part that no answer here has, which does not change the answer (ApiError for an
    unknown part, if unknown fields are refused)."""
    ignored = info.context if isinstance(info.context, IgnoredFields) else IgnoredFields(is_strict=True)
    if name in OTHER_PARTS:
        ignored.add(f"include.{name}", "answers here have no such part")
    elif name not in INCLUDED:
        ignored.unknown(f"include.{name}", (*INCLUDED, *OTHER_PARTS))
    return name


class ResponsesBody(InputTokensBody):
    """The body of a response. `max_output_tokens` counts the thought too."""

    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    include: list[Annotated[str, AfterValidator(_note_other_parts)]] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **{name: why for name, why in InputTokensBody.REFUSED.items() if name != "personality"},
        **IN_CHATS,
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refused("use max_output_tokens")),
        **dict.fromkeys(("response_format", "structured_outputs", "output_config"), Refused("use text.format")),
        **dict.fromkeys(("reasoning_effort", "thinking"), Refused("use reasoning.effort")),
        **dict.fromkeys(("stop", "stop_sequences"), Refused("this protocol has no stop strings", ([],))),
        "top_k": Refused("this protocol has no such field; /v1/chat/completions has", (0,)),
        "messages": Refused("use input", ([],)),
        "system": Refused("use instructions", ("", [])),
        "background": Refused("use /v1/batches for requests that no client waits for", (False,)),
        "context_management": Refused("histories are not compacted here", ([],)),
        "moderation": Refused("moderation is set at the gateway"),
        "prompt": Refused("prompts are not stored here; give instructions and input"),
        "image": Refused(TEXT_ONLY),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        "access_programs": NO_ACCOUNT,
        "background_options": "no response runs in the background",
        "max_tool_calls": "it limits the server's own tools, and this server has none",
        "user": NO_ACCOUNT,
        "safety_identifier": NO_ACCOUNT,
        "service_tier": "the server has one service tier",
        "prompt_cache_key": "one server has one cache, so no routing is needed",
        "prompt_cache_retention": "every prefix is cached while there is room; breakpoints have lifetimes",
    }
