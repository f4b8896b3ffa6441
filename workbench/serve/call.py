"""Define a call: a client's request to a model, independent of protocols.

    bytes -> dialect (validation) -> Call -> Gate.admit -> engine -> pieces -> Gate -> dialect -> bytes

Each dialect turns its own body into a call, and pieces (see `pieces.py`) into its own events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.prompt.conversation import Conversation
from workbench.request import SamplingParameters

ADMIN = "admin"  # the scope of callers who may see other callers' activity
Purpose = Literal["answer", "embed", "tokenize"]
PromptInput = Conversation | str | tuple[int, ...]  # texts and token ids are completed without a template


@dataclass(frozen=True)
class Caller:
    """The caller: the key's id, its owner, and the salt under which the owner's prefixes are cached.

    `key` names a key and is never the key itself. The salt comes from the owner, never from the request, so that
    tenants share no pages.
    """

    key: str = ""
    tenant: str = ""
    cache_salt: str = ""
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Breakpoint:
    """A request to keep the prefix up to and including one part of the prompt, for `seconds` after its last use.

    `part` is tools, system or turn; `index` is the tool or turn, or a number of characters of the system prompt (-1:
    the last, or all).
    """

    part: str
    index: int = -1
    seconds: float = 300.0


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Args:
        id: the id that the client sees (`chatcmpl-...`, `msg_...`, `resp_...`), also of the trace.
        dialect: the protocol: `openai.chat`, `openai.completions`, `openai.responses`, `anthropic.messages`.
        model: the model that the client named.
        prompts: prompts to answer. A conversation is one prompt; completions may have several.
        sampling: sampling of each prompt; its `n` is the number of choices per prompt.
        has_seed: whether the client gave the seed. Otherwise each call has a random seed.
        has_max_tokens: whether the client gave max_tokens. Otherwise an answer may fill the context.
        tool_choice: auto, none, required, or a tool's name.
        parallel_tool_calls: whether an answer may have several calls.
        stream: whether the answer is streamed.
        echo: whether the prompt's text (and log-probabilities) precede the answer.
        prompt_logprobs: number of alternatives per prompt token; None for no log-probabilities of the prompt.
        breakpoints: prefixes to keep.
        only_warms: whether the prompt is only read into the cache; one token is generated, and not shown.
        previous: the id of an earlier call with a prefix to share; a cache miss is explained against it.
        priority: smaller runs sooner; 0 unless the client yields to others.
        deadline: seconds from arrival to the last token, at most; None for no deadline.
        background: whether no client waits for the answer (a batch line): the call begins after client calls and
            does not count as waiting.
        purpose: answer the prompts, embed them, or tokenize them (return their tokens, or their text).
        caller: the caller, set by the gate.
        ignored: fields without effect, with reasons, for the trace and a header of the response.
        options: further options of the dialect's writer, for the shape of the answer.
        notes: decisions of gate and server with their reasons, for the trace.
    """

    id: str
    dialect: str
    model: str
    prompts: tuple[PromptInput, ...]
    sampling: SamplingParameters
    has_seed: bool = False
    has_max_tokens: bool = True
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    only_warms: bool = False
    previous: str = ""
    priority: int = 0
    deadline: float | None = None
    background: bool = False
    purpose: Purpose = "answer"
    caller: Caller = Caller()
    ignored: Mapping[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_seeded(self) -> bool:
        """Return whether the call's answer is reproducible: it is greedy, a beam search, or has a client's seed."""
        return self.has_seed or self.sampling.temperature == 0 or bool(self.sampling.beams)

    @property
    def num_choices(self) -> int:
        """Return the number of choices: prompts times samples; choice = prompt * n + sample."""
        return len(self.prompts) * self.sampling.n
