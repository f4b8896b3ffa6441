"""Define a call: what a client asks of a model, in no protocol's words.

    bytes -> dialect (validation) -> Call -> Gate.admit -> engine -> pieces -> Gate -> dialect -> bytes

Each dialect turns its own body into a call, and pieces (see `pieces.py`) into its own events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.prompt.conversation import Conversation
from workbench.request import SamplingParameters

ADMIN = "admin"  # the scope of a caller who may see what others do
Purpose = Literal["answer", "embed", "tokenize"]
PromptInput = Conversation | str | tuple[int, ...]  # a text and ids are completed as they are, without a template


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
    """A promise to keep the prefix up to and including one part of the prompt, for `seconds` after its last use.

    `part` is tools, system or turn; `index` which tool or turn, or how many characters of the system prompt (-1: the
    last, or all).
    """

    part: str
    index: int = -1
    seconds: float = 300.0


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Args:
        id: the id that the client sees (`chatcmpl-...`, `msg_...`, `resp_...`); also that of its trace.
        dialect: the protocol: `openai.chat`, `openai.completions`, `openai.responses`, `anthropic.messages`.
        model: the model that the client named.
        prompts: what to answer. A conversation is one prompt; completions may have several.
        sampling: of each prompt; `n` of it is the choices of one prompt.
        has_seed: whether the seed is the client's. Without one each call has a random seed of its own.
        has_max_tokens: whether max_tokens is the client's. Without one an answer may fill the context.
        tool_choice: auto, none, required, or a tool's name.
        parallel_tool_calls: whether an answer may have several calls.
        stream: whether the answer is streamed.
        echo: whether the prompt's text (and log-probabilities) stand before the answer.
        prompt_logprobs: alternatives beside each token of the prompt; None for no log-probabilities of it.
        breakpoints: prefixes to keep.
        only_warms: whether the prompt is only read into the cache; one token is generated, and not shown.
        previous: the id of an earlier call whose prefix this one should share; a miss is explained against it.
        priority: the smaller, the sooner; 0 unless the client stands back behind others.
        deadline: seconds from arrival within which the client wants the last token; None for no deadline.
        background: whether no client waits for the answer (a line of a batch): it begins after those of clients and
            does not count among the calls that wait.
        purpose: answer the prompts; embed them, a vector each; or tokenize them: return their tokens, or their text.
        caller: who asks, set by the gate.
        ignored: fields without effect here, and why; the trace shows them, and a header of the response.
        options: what the dialect's writer is to know besides: how its answer is shaped.
        notes: what the gate and the server learned on the way, for the trace: decisions with their reasons.
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
        """Return whether the same call has the same answer: it is greedy, a beam search, or has the client's seed."""
        return self.has_seed or self.sampling.temperature == 0 or bool(self.sampling.beams)

    @property
    def num_choices(self) -> int:
        """Return the number of choices of the answer: prompts times samples; choice = prompt * n + sample."""
        return len(self.prompts) * self.sampling.n
