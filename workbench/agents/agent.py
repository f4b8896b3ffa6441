"""Make an agent: a model, its tools and limits. An agent holds no conversation: a run takes one and returns a longer
one, with further turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from workbench.agents.call_format import PROBE, CallFormat
from workbench.agents.choice import answer_grammar, check_choice, check_schemas
from workbench.agents.limits import Limits, parse_limits
from workbench.agents.result import AgentResult
from workbench.agents.rounds import AgentRun
from workbench.display import Displayable, Table
from workbench.engine.inputs import parse_sampling
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.prompt.answers import CALLS, AnswerFormat
from workbench.prompt.conversation import Conversation
from workbench.prompt.tools import Tool, declare_all
from workbench.prompt.turns import Content, ResultTurn, UserTurn
from workbench.response_format import ResponseFormat, Thinking

THINKING = "enable_thinking"  # template variable that enables thinking
_NUMBERS = itertools.count(1)


class Agent(Displayable):
    """A model with its tools, and the settings of its runs (see `agent`)."""

    def __init__(
        self,
        runner: Runner,
        tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]] = (),
        system: Content | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        **sampling: Any,
    ):
        self.runner, self.tools = runner, declare_all(tools)
        self.system = Conversation(system=system).system
        self.tool_choice, self.parallel_tool_calls = tool_choice, parallel_tool_calls
        self.limits = parse_limits(limits)
        self.template, self.template_arguments = template, dict(template_arguments or {})
        if runner.tokenizer is None or runner.chat_template is None:
            Conversation(turns=["a"]).prompt(runner)  # raises if parts are missing
        self.sampling = parse_sampling(sampling)
        if self.sampling.num_sequences > 1 or self.sampling.beams:
            raise WorkbenchError("an agent has one answer a round: leave out n, best_of and beams")
        self._check_tools(self.tools)

    def run(self, question: str | Conversation) -> AgentResult:
        """Run rounds until the model answers without calls, calls a tool that has no function, or reaches a limit;
        return the result.

        Args:
            question: the user's text, or a conversation that ends with a user's turn or tool results. A conversation
                without a system prompt or tools takes the agent's.

        Raises:
            WorkbenchError: if the first request cannot run. Later errors are in the result.
        """
        run = self.stream(question)
        for _ in run:
            pass
        return run.result

    def stream(self, question: str | Conversation) -> AgentRun:
        """Start the same run as `run`, and return it as an iterator of events: pieces of answers as they come, rounds,
        and calls.

        Closing it cancels the run; `stop()`, which any thread may call, ends it with the reason `cancelled`.
        """
        return AgentRun(self, self._conversation(question), f"agent-{next(_NUMBERS)}")

    def answer_format(self, tools: tuple[Tool, ...]) -> AnswerFormat:
        """Return the control tokens of the model's answers when `tools` are in its prompt."""
        runner = self.runner
        assert runner.tokenizer is not None and runner.chat_template is not None
        name = runner.chat_template.choose(self.template, bool(tools))
        callable_tools = () if self.tool_choice == "none" else tools
        return AnswerFormat.from_template(runner.chat_template, runner.tokenizer, name, callable_tools)

    def _check_tools(self, tools: tuple[Tool, ...]) -> None:
        """Raise WorkbenchError for a choice that names none of these tools, or a model that cannot see or call them."""
        check_choice(self.tool_choice, tools)
        if not tools:
            return
        format = self.answer_format(tools)
        if self.tool_choice not in ("auto", "none") and format.call is None and not format.is_bare:
            known = ", ".join(opening for opening, _ in CALLS)
            raise WorkbenchError(
                f"tool_choice: {self.tool_choice!r} is not supported: the model's tokenizer has no control token "
                f"that begins a call (known: {known}); use auto, or another model"
            )
        check_schemas(self.tool_choice, tools)
        if self.tool_choice not in ("auto", "none") and self._call_format is None:
            raise WorkbenchError("tool_choice: the call format of this model is unknown; use auto, or another model")

    def sampling_of(self, conversation: Conversation, format: AnswerFormat, tokens_left: int | None) -> dict[str, Any]:
        """Return the sampling parameters of a conversation's next answer, as arguments of `Runner.stream`."""
        values = {name: getattr(self.sampling, name) for name in self.sampling.model_fields_set}
        last = conversation.turns[-1]
        forced = self.tool_choice not in ("auto", "none") and isinstance(last, UserTurn)
        choice = self.tool_choice if forced or self.tool_choice == "none" else "auto"
        values["response_format"] = self._grammar(conversation.tools, choice)
        thinking = self._thinking(format)
        most = self.sampling.max_tokens
        if tokens_left is not None:
            most = min(most, tokens_left)
            if thinking is not None and not thinking.within_max_tokens:
                budget = min(thinking.budget_tokens, max(0, tokens_left - most - 2))
                thinking = thinking.model_copy(update={"budget_tokens": budget})
        return {**values, "thinking": thinking, "max_tokens": most}

    def _thinking(self, format: AnswerFormat) -> Thinking | None:
        """Return the thinking settings, with the model's own control tokens unless others are given."""
        thinking, tokenizer = self.sampling.thinking, self.runner.tokenizer
        if thinking is None or format.thought is None or {"opening", "closing"} & thinking.model_fields_set:
            return thinking
        assert tokenizer is not None
        opening, closing = (tokenizer.decode([id], special=True) for id in format.thought)
        return thinking.model_copy(update={"opening": opening, "closing": closing})

    def _grammar(self, tools: tuple[Tool, ...], choice: str) -> ResponseFormat | None:
        """Return the grammar of an answer; None for an unconstrained answer."""
        wanted, tokenizer = self.sampling.response_format, self.runner.tokenizer
        assert tokenizer is not None
        if not tools:
            return wanted
        is_free = choice == "auto" and self.parallel_tool_calls and wanted is None
        if is_free and tokenizer.byte_rule is None:
            return None  # grammars do not support this tokenizer: calls are checked when parsed
        return answer_grammar(tools, choice, self.parallel_tool_calls, self._call_format, wanted)

    @cached_property
    def _call_format(self) -> CallFormat | None:
        return CallFormat.from_model(self.runner, self.answer_format((PROBE,)), self.template)

    def _conversation(self, question: str | Conversation) -> Conversation:
        if isinstance(question, str):
            question = Conversation(turns=[question], template=self.template)
        if not isinstance(question, Conversation):
            raise WorkbenchError(f"an agent runs a text or a Conversation, not a {type(question).__name__}")
        if not question.turns:
            raise WorkbenchError("conversation: has no turns; add what the user says")
        if waiting := question.unanswered_calls:
            raise WorkbenchError(f"conversation: the call of {waiting[0].name!r} has no result; add it with `result`")
        if not isinstance(question.turns[-1], UserTurn | ResultTurn):
            raise WorkbenchError("conversation: ends with the assistant's turn; add what the user says next")
        update: dict[str, Any] = {}
        if question.system is None and self.system is not None:
            update["system"] = self.system
        if question.tools and question.tools != self.tools:
            self._check_tools(question.tools)
        elif self.tools:
            update["tools"] = self.tools
        if question.template is None and self.template is not None:
            update["template"] = self.template
        if self.template_arguments:
            update["template_arguments"] = {**self.template_arguments, **question.template_arguments}
        return question.model_copy(update=update) if update else question

    def with_thinking(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the template argument that switches thinking on or off, by `sampling.thinking`.
        It is unchanged if that is None or the conversation has the argument.
        """
        if self.sampling.thinking is None or THINKING in conversation.template_arguments:
            return conversation
        arguments = {**conversation.template_arguments, THINKING: self.sampling.thinking.budget_tokens > 0}
        return conversation.model_copy(update={"template_arguments": arguments})

    def function_of(self, tool: Tool) -> Tool:
        """Return `tool` if it has a function, else the agent's own tool of the same name, else `tool` without a
        function.
        """
        if tool.function is not None:
            return tool
        return next((each for each in self.tools if each.name == tool.name), tool)

    def _display_table(self) -> Table:
        rows: list[tuple[str, object]] = [("model", self.runner.model.spec.name)]
        rows += [("system", self.system)] if self.system else []
        rows += [(f"tool {each.name}", each.description.split("\n")[0]) for each in self.tools]
        rows += [("tool_choice", self.tool_choice), ("parallel_tool_calls", self.parallel_tool_calls)]
        rows += [(f"limits.{name}", value) for name, value in self.limits]
        rows += [(name, getattr(self.sampling, name)) for name in sorted(self.sampling.model_fields_set)]
        return Table("agent", rows)


def agent(
    runner: Runner,
    tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]] = (),
    system: Content | None = None,
    *,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    limits: Limits | Mapping[str, Any] | None = None,
    template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Agent:
    """Make an agent: a model that calls tools, in rounds, until it has an answer.

        agent = workbench.agent(runner, tools=[calculate], max_tokens=256, temperature=0)
        result = agent.run("How many seconds are 3 weeks and 2 days?")

    Args:
        runner: the model; several agents may share it (in several threads, through a `widgets.RunnerThread`).
        tools: functions with type hints and docstrings, JSON declarations, or `Tool` values. A tool without a function
            ends the run, with its call in the result.
        system: the system prompt.
        tool_choice: auto; none; required or a tool's name: the first answer to a question must be a call, later answers
            are free. A grammar enforces it.
        parallel_tool_calls: let one answer have several calls, which run in parallel.
        limits: see `Limits`: rounds, seconds, tokens, tool_seconds, result_characters.
        template: the name of a template, if the model's folder has several.
        template_arguments: further variables of the template.
        sampling: SamplingParameters of each answer: max_tokens, temperature, thinking, response_format, stop, ...

    Raises:
        WorkbenchError: for an unknown choice, tools that the model's template does not show, or an unsupported schema.
    """
    return Agent(
        runner, tools, system, tool_choice, parallel_tool_calls, limits, template, template_arguments, **sampling
    )
