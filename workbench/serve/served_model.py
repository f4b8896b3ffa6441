"""Hold a model behind a server: its runner's thread, and how calls become requests that it can run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.agents.agent import THINKING
from workbench.agents.call_format import PROBE, CallFormat
from workbench.agents.choice import answer_grammar, check_choice, check_schemas, tools_of_choice
from workbench.cluster.cluster import Cluster
from workbench.cluster.replica import PageCounts, fingerprint_of, tokens_in_cache
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.kv_cache.settings import RadixPrefixCache
from workbench.model.hf.generation import GENERATION_FILE
from workbench.prompt.answers import AnswerFormat
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.default_tools import NOTE
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool
from workbench.request import Request, SamplingParameters
from workbench.response_format import ResponseFormat, Thinking
from workbench.serve.bodies.fields import invalid
from workbench.serve.call import Call, PromptInput
from workbench.serve.errors import ApiError
from workbench.serve.memory.generated_turns import GeneratedTurns
from workbench.serve.memory.prompt_cache import PlacedBreakpoint, pins_of, place_breakpoints

LOG = logging.getLogger(__name__)
CONTEXT_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt of a call, ready to be submitted.

    Args:
        request: what the engine is given.
        format: the control tokens of the answer; None where its text is shown as it is.
        in_thought: the prompt ends within a thought that the template began.
        prompt: the assembled conversation, by segment.
        conversation: what the client sent, with answers as they were generated.
        breakpoints: of the call, with their places in this prompt.
    """

    request: Request
    format: AnswerFormat | None = None
    in_thought: bool = False
    prompt: Prompt | None = None
    conversation: Conversation | None = None
    breakpoints: tuple[PlacedBreakpoint, ...] = ()


class ServedModel:
    """A model under a name. `runner` stays usable in cells: all work for it goes through its thread. It may be a
    cluster, whose front is such a thread.

    `default_max_tokens` is of an answer whose call names none; what the context has left unless given.
    """

    def __init__(self, name: str, runner: Runner | Cluster, default_max_tokens: int | None = None):
        self.name, self.runner, self.created = name, runner, int(time.time())
        self.thread: RunnerThread | Cluster = runner if isinstance(runner, Cluster) else RunnerThread.attach(runner)
        self.tokenizer = runner.tokenizer
        self._default_max_tokens = default_max_tokens
        self._looked_at: tuple[ChatTemplate | None, CallFormat | None] | None = None
        if defaults := self.runner.sampling_defaults:
            listed = ", ".join(f"{key} {value:g}" for key, value in defaults.items())
            LOG.warning("model %s: sampled by %s where a request does not say: %s", name, GENERATION_FILE, listed)
        try:
            template = self.runner.chat_template  # a file that cannot be read is said now, not to a client
            if self.tokenizer is not None and template is not None and template.gaps().tools:
                LOG.warning("model %s: %s", name, NOTE)
        except WorkbenchError as error:
            LOG.warning("model %s: no chats: %s", name, error)

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a prompt and its answer; a cluster's may change with its variants."""
        return self.runner.model.spec.max_position_embeddings

    @property
    def answer_tokens(self) -> int:
        """Return the most tokens of an answer whose call names no limit."""
        return self._default_max_tokens or self.max_model_len

    @property
    def fingerprint(self) -> str:
        """Return a text that differs where the same tokens may be answered differently: weights and settings."""
        return self.runner.fingerprint if isinstance(self.runner, Cluster) else self._engine_fingerprint

    def fingerprint_of(self, tenant: str) -> str:
        """Return the fingerprint of a tenant's answers; empty where a cluster gives them by several variants."""
        return self.runner.fingerprint_of(tenant) if isinstance(self.runner, Cluster) else self._engine_fingerprint

    @cached_property
    def _engine_fingerprint(self) -> str:
        assert isinstance(self.runner, Runner)
        return fingerprint_of(self.runner)

    @property
    def fleet(self) -> Cluster | None:
        """Return the cluster that serves it; None where one engine does."""
        return self.runner if isinstance(self.runner, Cluster) else None

    @property
    def pages(self) -> PageCounts:
        """Return the pages of its caches."""
        return self.runner.pages if isinstance(self.runner, Cluster) else PageCounts.of_runner(self.runner)

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens its cache has room for; of a cluster, that of the smallest replica."""
        return self.runner.cache_tokens if isinstance(self.runner, Cluster) else tokens_in_cache(self.runner)

    @property
    def num_requests(self) -> tuple[int, int]:
        """Return the requests that run, and those that wait to be scheduled; of a cluster, to be sent to a replica."""
        if isinstance(self.runner, Cluster):
            return self.runner.num_requests()
        return len(self.runner.scheduler.running), len(self.runner.scheduler.waiting)

    @property
    def page_size(self) -> int | None:
        """Return the tokens of a page, in which prefixes are cached; None without a prefix cache."""
        cache = self.runner.config.cache
        return cache.page_size if isinstance(cache.prefix, RadixPrefixCache) else None

    @property
    def seconds_per_prefill_token(self) -> float:
        """Return what a token of a prompt takes; 0 while none is measured, and of a cluster, whose replicas differ."""
        return self.runner.scheduler.seconds_per_prefill_token if isinstance(self.runner, Runner) else 0.0

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Return the template of chats; None where there is none that can be read."""
        try:
            return self.runner.chat_template
        except WorkbenchError:
            return None

    @property
    def can_chat(self) -> bool:
        return self.tokenizer is not None and self.chat_template is not None

    @property
    def can_think(self) -> bool:
        """Return whether the model has control tokens of a thought."""
        return self.can_chat and self.answer_format().thought is not None

    def answer_format(
        self, template: str | None = None, tools: Sequence[Tool] = (), choice: str = "auto"
    ) -> AnswerFormat:
        """Return the parts of the model's answers, where it is shown these tools (AssertionError without a chat
        template)."""
        assert self.tokenizer is not None and (found := self.chat_template) is not None
        name = found.choose(template, bool(tools))
        callable_tools = tools_of_choice(choice, tools)
        return AnswerFormat.from_template(found, self.tokenizer, name, callable_tools)

    def with_sampling_defaults(self, call: Call) -> Call:
        """Return a call whose answer is sampled as the model's makers recommend, where its client does not say."""
        given, defaults = call.sampling.model_fields_set, self.runner.sampling_defaults
        left = {name: value for name, value in defaults.items() if name not in given}
        if not left or call.purpose != "answer":
            return call
        call.notes["sampling_defaults"] = {"of": GENERATION_FILE, **left}
        return replace(call, sampling=call.sampling.model_copy(update=left))

    def prepare(self, call: Call, turns: GeneratedTurns | None = None) -> list[PreparedPrompt]:
        """Return a call's prompts as the engine reads them. It takes long for long prompts: not for the event loop.

        Args:
            call: the call.
            turns: answers as they were generated, which stand in for their texts.

        Raises:
            ApiError: invalid_request_error for what cannot run.
        """
        call = self.with_sampling_defaults(call)
        try:
            several = len(call.prompts) > 1
            return [
                self._prepare(call, prompt, f"{call.id}.{number}" if several else call.id, turns)
                for number, prompt in enumerate(call.prompts)
            ]
        except WorkbenchError as error:
            raise invalid(error) from None

    def _prepare(
        self, call: Call, prompt: PromptInput, request_id: str, turns: GeneratedTurns | None
    ) -> PreparedPrompt:
        if isinstance(prompt, Conversation):
            if turns is not None and not prompt.continues:
                prompt = turns.fill(call.caller.tenant, self.name, prompt)
            return self._prepare_conversation(call, prompt, request_id)
        if isinstance(prompt, str):
            self._check_characters(call, prompt)
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        placed = place_breakpoints(call.breakpoints, None, len(ids))
        return PreparedPrompt(self._request(call, request_id, ids, call.sampling, placed), breakpoints=placed)

    def _prepare_conversation(self, call: Call, conversation: Conversation, request_id: str) -> PreparedPrompt:
        if not self.can_chat:
            raise ApiError(
                "invalid_request_error", f"model: {self.name!r} has no chat template; use /v1/completions", "model"
            )
        sent = conversation
        format = self.answer_format(conversation.template, conversation.tools, call.tool_choice)
        sampling = call.sampling
        if (thinking := _with_model_tokens(sampling.thinking, format, self)) is not None:
            wanted = {THINKING: thinking.budget_tokens > 0, **conversation.template_arguments}
            conversation = conversation.model_copy(update={"template_arguments": wanted})
        update: dict[str, object] = {"thinking": thinking}
        if conversation.tools or call.tool_choice != "auto":
            self._check_tools(call, conversation, format)
            update["response_format"] = self._grammar(call, conversation, format)
        prompt = self._assemble(conversation, sampling.max_output_tokens)
        if prompt.notes:
            call.notes["prompt"] = list(prompt.notes)
        ends = () if sampling.ignore_eos else prompt.end_token_ids
        update["stop_token_ids"] = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
        placed, sampling = (
            place_breakpoints(call.breakpoints, prompt, len(prompt.ids)),
            sampling.model_copy(update=update),
        )
        request = self._request(call, request_id, prompt.ids, sampling, placed, prompt.cut_tokens)
        return PreparedPrompt(request, format, format.ends_in_thought(prompt.ids), prompt, sent, placed)

    def _assemble(self, conversation: Conversation, max_tokens: int) -> Prompt:
        try:
            return self.runner.assemble(conversation, min(max_tokens, self.max_model_len))
        except WorkbenchError as error:
            if not str(error).startswith("the prompt has"):
                raise
            words = f"messages: {error}"
            raise ApiError("invalid_request_error", words, "messages", CONTEXT_EXCEEDED) from None

    def _check_tools(self, call: Call, conversation: Conversation, format: AnswerFormat) -> None:
        check_choice(call.tool_choice, conversation.tools)
        if not conversation.tools:
            return
        if call.tool_choice not in ("auto", "none") and format.call is None and not format.is_bare:
            raise WorkbenchError(f"tool_choice: model {self.name!r} has no control token that begins a call; use auto")
        if left := check_schemas(call.tool_choice, conversation.tools):
            call.notes["left_to_the_check_of_arguments"] = left

    def _grammar(self, call: Call, conversation: Conversation, format: AnswerFormat) -> ResponseFormat | None:
        """Return the grammar of an answer that may have calls; None where it is free."""
        assert self.tokenizer is not None
        wanted = call.sampling.response_format
        is_free = call.tool_choice == "auto" and call.parallel_tool_calls and wanted is None
        if is_free and self.tokenizer.byte_rule is None:
            return None  # no grammar can be compiled for this tokenizer; calls are parsed as they come
        calls = self._call_format(conversation.template) if conversation.tools else None
        if calls is None and call.tool_choice not in ("auto", "none"):
            raise WorkbenchError(f"tool_choice: how {self.name!r} writes a call is not known; use auto")
        return answer_grammar(conversation.tools, call.tool_choice, call.parallel_tool_calls, calls, wanted)

    def _call_format(self, template: str | None) -> CallFormat | None:
        """Return how calls are written; how the model's own template does is looked at once (a cluster may replace
        it)."""
        found = self.runner.chat_template
        if template is not None or self._looked_at is None or self._looked_at[0] is not found:
            calls = CallFormat.from_model(self.runner, self.answer_format(template, (PROBE,)), template)
            if template is not None:
                return calls
            self._looked_at = found, calls
        return self._looked_at[1]

    def prompt_ids(self, call: Call, turns: GeneratedTurns | None = None, begins: bool = True) -> list[tuple[int, ...]]:
        """Return the ids of a call's prompts, of texts also where they do not fit the model.

        The whole name of a control token is that token: tools ask for the ids of ends in this way. Within a longer text
        it stays text. `begins`: the begin token is put before a text.

        Raises:
            WorkbenchError: for what cannot be encoded.
        """
        if any(isinstance(each, Conversation) for each in call.prompts):
            return [each.request.prompt_ids for each in self.prepare(call, turns)]
        controls = {} if self.tokenizer is None else self.tokenizer.special_token_ids
        found: list[tuple[int, ...]] = []
        for text in call.prompts:
            assert isinstance(text, str)
            front = self.tokenizer.bos_token_ids if begins and self.tokenizer is not None else ()
            found.append((*front, controls[text]) if text in controls else self._encode(text, begins))
        return found

    def decode(self, ids: PromptInput) -> str:
        """Return the text of ids, control tokens written out (WorkbenchError for what is no id of the vocabulary)."""
        assert isinstance(ids, tuple)
        return self._known_tokenizer().decode(ids, special=True)

    def _encode(self, text: str, begins: bool = True) -> tuple[int, ...]:
        tokenizer = self._known_tokenizer()
        ids = tokenizer.encode(text)
        return (*(tokenizer.bos_token_ids if begins else ()), *ids) if ids else ()

    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise WorkbenchError(f"prompt: model {self.name!r} has no tokenizer; give token ids")
        return self.tokenizer

    def _check_characters(self, call: Call, text: str) -> None:
        """Refuse a text that has too many characters to fit, before it is encoded (ApiError)."""
        if self.tokenizer is not None and self.runner.config.schedule.overflow == "refuse":
            least = len(text) // self.tokenizer.max_token_characters
            if least >= self.max_model_len:
                raise self._too_long(call, f"at least {least:,}")

    def _request(
        self,
        call: Call,
        request_id: str,
        ids: Sequence[int],
        sampling: SamplingParameters,
        placed: Sequence[PlacedBreakpoint],
        cut_tokens: int = 0,
    ) -> Request:
        if len(ids) >= self.max_model_len and self.runner.config.schedule.overflow == "refuse":
            raise self._too_long(call, f"{len(ids):,}")
        if not ids:
            raise ApiError("invalid_request_error", "prompt: is empty; give at least one token", "prompt")
        if call.prompt_logprobs is not None:
            sampling = sampling.model_copy(update={"prompt_logprobs": call.prompt_logprobs})
        return Request(
            request_id, tuple(ids), sampling, cut_tokens=cut_tokens, cache_salt=call.caller.cache_salt,
            priority=call.priority, tenant=call.caller.tenant, deadline=call.deadline, pins=pins_of(placed),
        )  # fmt: skip

    def _too_long(self, call: Call, tokens: str) -> ApiError:
        words = f"the prompt has {tokens} tokens, and {self.max_model_len - 1:,} fit the model; shorten it"
        param = "messages" if "chat" in call.dialect else "input" if call.purpose == "embed" else "prompt"
        return ApiError("invalid_request_error", words, param, CONTEXT_EXCEEDED)


def _with_model_tokens(thinking: Thinking | None, format: AnswerFormat, model: ServedModel) -> Thinking | None:
    """Return the settings of a thought with the model's own control tokens; None for a model that has none."""
    if thinking is None or format.thought is None:
        return None
    assert model.tokenizer is not None
    opening, closing = (model.tokenizer.decode([id], special=True) for id in format.thought)
    return thinking.model_copy(update={"opening": opening, "closing": closing})
