"""Define the bodies of Anthropic's Messages: supported fields with types, and refused fields with reasons.

A text is equivalent to a list of one text block wherever the protocol accepts both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from workbench.serve.bodies.fields import IN_CHATS, Body, Int, Refused
from workbench.serve.bodies.parts import Part, refused_types, type_of

TEXT_ONLY = "the models here read text; give its text"
NO_SERVER_TOOLS = "this server runs no tools itself; declare a tool with an input_schema and answer its calls"
NO_CONTAINER = "this server runs no containers"
NO_PROFILES = "the key identifies the user"

# Tokens of a thought by `output_config.effort`, as shares of max_tokens; the thought is counted in max_tokens.
EFFORT_SHARES = {"low": 0.2, "medium": 0.4, "high": 0.6, "xhigh": 0.75, "max": 0.9}


class CacheControl(Part):
    """A breakpoint: keep the prefix up to here for `ttl` after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Part):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "citations": Refused("answers here cite no documents; put the cited text into the message", ([],))
    }


class ThinkingBlock(Part):
    """A thought of an earlier answer, sent back unchanged."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(Part):
    """A thought of an earlier answer without its text, sent back unchanged."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "caller": Refused("only the model calls tools", ({"type": "direct"},)),
        "toolset_name": Refused(NO_SERVER_TOOLS),
    }


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Part):
    """A result of a tool. With `is_error` the model reads `Error: ` before it."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Blocks = []
    is_error: bool = False
    cache_control: CacheControl | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {"toolset_name": Refused(NO_SERVER_TOOLS)}


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
REFUSED_BLOCKS = {
    "image": TEXT_ONLY,
    "document": TEXT_ONLY,
    "search_result": TEXT_ONLY,
    "container_upload": NO_CONTAINER,
    "server_tool_use": NO_SERVER_TOOLS,
    **dict.fromkeys(
        (f"{name}_tool_result" for name in (
            "web_search", "web_fetch", "code_execution", "bash_code_execution", "text_editor_code_execution",
            "tool_search",
        )),
        NO_SERVER_TOOLS,
    ),
}  # fmt: skip
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | refused_types("a block", BLOCKS, REFUSED_BLOCKS),
    Discriminator(type_of(BLOCKS)),
]
Blocks = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class Message(Part):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolDeclaration(Part):
    """A tool that the model may call. With `strict` calls match its whole schema, or the request is refused."""

    name: str
    input_schema: dict[str, Any]
    description: str = ""
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused("only the model calls tools", (["direct"],)),
        "defer_loading": Refused("this server has no tool search; give every tool that the model may call", (False,)),
        "input_examples": Refused("no chat template shows examples; put an example into the description", ([],)),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        "eager_input_streaming": "arguments are always streamed as they are generated",
    }


def _refuse_server_tool(tool: Any) -> Any:
    if isinstance(tool, Mapping) and (kind := tool.get("type")) not in (None, "custom"):
        raise ValueError(f"a tool of type {str(kind)[:60]!r} is not supported: {NO_SERVER_TOOLS}")
    return tool


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Part):
    """Thinking settings: `adaptive` takes the budget of `output_config.effort`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # the summary is the whole thought


class AnswerSchema(Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerSchema | None = None


def _refuse_edit(edit: Any) -> Any:
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    if not isinstance(kind, str) or not kind.startswith("clear_thinking_"):
        raise ValueError(f"an edit of type {str(kind)[:60]!r} is not supported: the server reads the history unchanged")
    return edit


class ContextManagement(Part):
    """Edits of the history. Clearing thoughts has no effect: the template decides which earlier thoughts are read."""

    edits: list[Annotated[Any, BeforeValidator(_refuse_edit)]] = []


class Metadata(Part):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class Diagnostics(Part):
    previous_message_id: Annotated[str, Field(max_length=256)] | None = None


class CountTokensBody(Body):
    """The body of a token count: all fields that determine the prompt."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)]
    system: TextBlocks = []
    tools: Annotated[
        list[Annotated[ToolDeclaration, BeforeValidator(_refuse_server_tool)]], Field(max_length=1024)
    ] = []
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "output_format": Refused("use output_config.format"),
        "mcp_servers": Refused(NO_SERVER_TOOLS, ([],)),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        "speed": "the server has one speed",
        "user_profile_id": NO_PROFILES,
        "workspace_id": NO_PROFILES,
        "betas": "supported features need no beta header",
        "anthropic_beta": "supported features need no beta header",
    }


class MessagesBody(CountTokensBody):
    """The body of a message. `max_tokens` counts the thought too; 0 only reads the prompt into the cache."""

    max_tokens: Annotated[Int, Field(ge=0)]
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None

    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **CountTokensBody.REFUSED,
        **IN_CHATS,
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), Refused("use max_tokens")),
        **dict.fromkeys(("response_format", "structured_outputs"), Refused("use output_config.format")),
        **dict.fromkeys(("reasoning_effort", "reasoning"), Refused("use thinking")),
        "stop": Refused("use stop_sequences", ([],)),
        "instructions": Refused("use system", ("",)),
        "container": Refused(NO_CONTAINER),
    }
    IGNORED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.IGNORED,
        "inference_geo": "the server has one location",
        "service_tier": "the server has one service tier",
    }
