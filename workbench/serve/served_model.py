"""Hold a model behind a server: its runner's thread, and the conversion of calls to requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.agents.agent import THINKING
from workbench.agents.call_format import PROBE, CallFormat
from workbench.agents.choice import answer_grammar, check_choice, check_schemas, tools_of_choice
from workbench.cluster.cluster import Cluster
from workbench.cluster.replica import PageCounts, fingerprint_of, tokens_in_cache
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError, nearest
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
        request: the request for the engine.
        format: the control tokens of the answer; None if its text is shown unchanged.
        in_thought: the prompt ends within a thought that the template began.
        prompt: the assembled conversation, by segment.
        conversation: the client's conversation, with answers as generated.
        breakpoints: the call's breakpoints, with their positions in this prompt.
    """

    request: Request
    format: AnswerFormat | None = None
    in_thought: bool = False
    prompt: Prompt | None = None
    conversation: Conversation | None = None
    breakpoints: tuple[PlacedBreakpoint, ...] = ()


class ServedModel:
    """A model served under a name. `runner` stays usable in cells: all its work goes through its thread. It may also be
    a cluster, whose front then takes the place of the thread.

    `default_max_tokens` applies to calls without max_tokens; default: the rest of the context.
    """

    def __init__(self, name: str, runner: Runner | Cluster, default_max_tokens: int | None = None):
        self.name, self.runner, self.created = name, runner, int(time.time())
        self.tokenizer = runner.tokenizer
        self._default_max_tokens = default_max_tokens
        self._looked_at: tuple[ChatTemplate | None, CallFormat | None] | None = None
        if defaults := self.runner.sampling_defaults:
            listed = ", ".join(f"{key} {value:g}" for key, value in defaults.items())
            LOG.warning("model %s: sampled by %s where a request does not say: %s", name, GENERATION_FILE, listed)
        try:
            template = self.runner.chat_template  # report an unreadable file now, not to a client
            if self.tokenizer is not None and template is not None and template.gaps().tools:
                LOG.warning("model %s: %s", name, NOTE)
        except WorkbenchError as error:
            LOG.warning("model %s: no chats: %s", name, error)

    @cached_property
    def thread(self) -> RunnerThread | Cluster:
        """Return the thread for all further work of the runner; for a cluster, its front."""
        return self.runner if isinstance(self.runner, Cluster) else RunnerThread.attach(self.runner)

    @property
    def max_model_len(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together; for a cluster it may change with its
        variants.
        """
        return self.runner.model.spec.max_position_embeddings

    @property
    def answer_tokens(self) -> int:
        """Return the maximum number of tokens of an answer to a call without max_tokens."""
        return self._default_max_tokens or self.max_model_len

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies weights and settings: models that may answer the same tokens differently have
        different texts.
        """
        return self.runner.fingerprint if isinstance(self.runner, Cluster) else self._engine_fingerprint

    def fingerprint_of(self, tenant: str) -> str:
        """Return the fingerprint of a tenant's answers; empty if several variants of a cluster give them."""
        return self.runner.fingerprint_of(tenant) if isinstance(self.runner, Cluster) else self._engine_fingerprint

    @cached_property
    def _engine_fingerprint(self) -> str:
        assert isinstance(self.runner, Runner)
        return fingerprint_of(self.runner)

    @property
    def fleet(self) -> Cluster | None:
        """Return the cluster that serves the model; None for a single engine."""
        return self.runner if isinstance(self.runner, Cluster) else None

    @property
    def pages(self) -> PageCounts:
        """Return the numbers of pages of the model's caches that are in use, idle and free."""
        return self.runner.pages if isinstance(self.runner, Cluster) else PageCounts.of_runner(self.runner)

    @property
    def cache_tokens(self) -> int:
        """Return the size of the model's cache in tokens; for a cluster, the size at the smallest replica."""
        return self.runner.cache_tokens if isinstance(self.runner, Cluster) else tokens_in_cache(self.runner)

    @property
    def num_requests(self) -> tuple[int, int]:
        """Return (number of running requests, number of waiting requests); in a cluster, waiting requests are not sent
        to a replica yet.
        """
        if isinstance(self.runner, Cluster):
            return self.runner.num_requests()
        return len(self.runner.scheduler.running), len(self.runner.scheduler.waiting)

    @property
    def page_size(self) -> int | None:
        """Return the page size of the prefix cache in tokens; None without a prefix cache."""
        cache = self.runner.config.cache
        return cache.page_size if isinstance(cache.prefix, RadixPrefixCache) else None

    @property
    def seconds_per_prefill_token(self) -> float:
        """Return the measured seconds per prompt token; 0 if not measured, and for clusters, where replicas differ."""
        return self.runner.scheduler.seconds_per_prefill_token if isinstance(self.runner, Runner) else 0.0

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template; None if the model has no readable template."""
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
        """Return the format of the model's answers when `tools` are in its prompt (AssertionError without a chat
        template).
        """
        assert self.tokenizer is not None and (found := self.chat_template) is not None
        name = found.choose(template, bool(tools))
        callable_tools = tools_of_choice(choice, tools)
        return AnswerFormat.from_template(found, self.tokenizer, name, callable_tools)

    def with_sampling_defaults(self, call: Call) -> Call:
        """Return the call with the sampling parameters recommended by the model's makers, where the client set none."""
        given, defaults = call.sampling.model_fields_set, self.runner.sampling_defaults
        left = {name: value for name, value in defaults.items() if name not in given}
        if not left or call.purpose != "answer":
            return call
        call.notes["sampling_defaults"] = {"of": GENERATION_FILE, **left}
        return replace(call, sampling=call.sampling.model_copy(update=left))

    def prepare(self, call: Call, turns: GeneratedTurns | None = None) -> list[PreparedPrompt]:
        """Return a call's prompts as read by the engine. Do not call it in the event loop: long prompts take long.

        Args:
            call: the call.
            turns: answers as generated, which replace their texts.

        Raises:
            ApiError: invalid_request_error for a call that cannot run.
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
        """Return the grammar of an answer that may have tool calls; None for an unconstrained answer."""
        assert self.tokenizer is not None
        wanted = call.sampling.response_format
        is_free = call.tool_choice == "auto" and call.parallel_tool_calls and wanted is None
        if is_free and self.tokenizer.byte_rule is None:
            return None  # grammars do not support this tokenizer: calls are parsed as they come
        calls = self._call_format(conversation.template) if conversation.tools else None
        if calls is None and call.tool_choice not in ("auto", "none"):
            raise WorkbenchError(f"tool_choice: the call format of {self.name!r} is unknown; use auto")
        return answer_grammar(conversation.tools, call.tool_choice, call.parallel_tool_calls, calls, wanted)

    def _call_format(self, template: str | None) -> CallFormat | None:
        """Return the format of tool calls; the format of the model's own template is cached (a cluster may replace the
        template)."""
        found = self.runner.chat_template
        if template is not None or self._looked_at is None or self._looked_at[0] is not found:
            calls = CallFormat.from_model(self.runner, self.answer_format(template, (PROBE,)), template)
            if template is not None:
                return calls
            self._looked_at = found, calls
        return self._looked_at[1]

    def prompt_ids(self, call: Call, turns: GeneratedTurns | None = None, begins: bool = True) -> list[tuple[int, ...]]:
        """Return the ids of a call's prompts, including texts too long for the model.

        A text that is the name of a control token becomes that token: tools request ids of end tokens this way. Within
        a longer text it stays text. `begins`: the begin token is put before a text.

        Raises:
            WorkbenchError: for a prompt that cannot be encoded.
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
        """Return the text of ids, with control tokens written out (WorkbenchError for an id outside the vocabulary)."""
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
        """Refuse a text with too many characters to fit, before encoding it (ApiError)."""
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


def not_served(name: object, known: Collection[str]) -> ApiError:
    """Return the error of a call for a model that is not in `known`."""
    hint = nearest(name[:200], known) if isinstance(name, str) else ""
    hint = hint or f"; served: {', '.join(known)}"
    words = f"model: {str(name)[:200]!r} is not served here{hint}"
    return ApiError("not_found_error", words, "model", "model_not_found")


def _with_model_tokens(thinking: Thinking | None, format: AnswerFormat, model: ServedModel) -> Thinking | None:
    """Return the thinking settings with the model's own control tokens; None for a model without such tokens."""
    if thinking is None or format.thought is None:
        return None
    assert model.tokenizer is not None
    opening, closing = (model.tokenizer.decode([id], special=True) for id in format.thought)
    return thinking.model_copy(update={"opening": opening, "closing": closing})
