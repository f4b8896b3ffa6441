"""Show a streaming conversation with a model or an agent, with its branches and the cost of each round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench import svg
from workbench.agents.agent import Agent, agent
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.trace.agent_events import AgentEvent
from workbench.widgets.chat.data import NO_RESULT, ChatTree, Exchange, answer_in_background
from workbench.widgets.chat.picture import draw_about, draw_chat, draw_piece_of_text, region
from workbench.widgets.job import Job
from workbench.widgets.view import GrowingPicture, PictureWidget

HERE = Path(__file__).parent
SETTINGS = {"max_tokens": 256}  # default settings of a runner's answers


class Composer(anywidget.AnyWidget):
    """The input field for a message, with its buttons; it passes on messages and button presses."""

    _esm = (HERE / "composer.js").read_text(encoding="utf-8")
    _css = (HERE / "composer.css").read_text(encoding="utf-8")
    draft = traitlets.Unicode().tag(sync=True)
    notice = traitlets.Unicode().tag(sync=True)
    placeholder = traitlets.Unicode("message").tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)


class Chat(PictureWidget):
    """A view of a chat with streaming answers, folded thoughts, tool calls with results, and the cost of each round.

    `model` is a runner, with `tools`, a `system` prompt and the settings of `workbench.agent`, or an agent, which has
    its own. The chat continues a given `conversation`. Enter sends a message; Escape and the kernel's stop button stop
    an answer, also while a tool hangs. An edited message, or a repeated answer, begins a branch on the cached prefix; ‹
    and › switch branches. The attribute `conversation` is the shown branch's, `last` its last exchange.
    """

    engine_fields = ("agent", "_answering")
    running = traitlets.Bool(False)

    _answering: Job | None = None

    def __init__(
        self,
        model: Any,
        tools: Iterable[Any] = (),
        system: str | None = None,
        conversation: Conversation | None = None,
        **settings: Any,
    ):
        from workbench.engine.runner import Runner
        from workbench.engine.runner_thread import RunnerThread
        from workbench.stop_button import install_stop_handler

        install_stop_handler()
        if isinstance(model, Agent):
            given = [name for name, value in (("tools", tuple(tools)), ("system", system), *settings.items()) if value]
            if given:
                raise WorkbenchError(f"Chat: an agent has its own {', '.join(given)}; set them in workbench.agent")
            self.agent = model
        elif isinstance(model, Runner):
            self.agent = agent(model, tools, system, **{**SETTINGS, **settings})
        else:
            raise WorkbenchError(f"Chat: give a runner or an agent (workbench.agent), not {type(model).__name__}")
        RunnerThread.attach(self.agent.runner)
        start = Conversation() if conversation is None else conversation
        if not isinstance(start, Conversation):
            raise WorkbenchError(f"Chat: conversation is a {type(start).__name__}; give a workbench.Conversation")
        self.tree, self._changing = ChatTree(start), threading.RLock()
        self._editing, self._drawn = 0, ()
        super().__init__()
        self.talk = GrowingPicture(lambda: svg.html(draw_chat(self.tree.path(), self._editing, self.running)))
        self.composer = Composer(placeholder="message (Enter sends, Shift+Enter begins a line)")
        self.composer.on_msg(lambda _, message, __: self._on_message(message))
        self.talk.on_pick(self._pick)
        self.show(below=(self.talk, self.composer))
        self.redraw()

    @property
    def conversation(self) -> Conversation:
        """Return the conversation of the shown branch, up to its last answer."""
        with self._changing:
            return self.tree.conversation

    @property
    def last(self) -> Exchange | None:
        path = self.tree.path()
        return path[-1] if path else None

    def send(self, text: str) -> None:
        """Ask a question after the shown exchanges, in the background. While a message is edited, the question replaces
        it as a new branch."""
        if self._editing:
            self.edit(self._editing, text)
        else:
            self._ask(text, None)

    def edit(self, number: int, text: str) -> None:
        """Ask `text` in place of message `number`, as a new branch."""
        self._ask(text, self.tree.get(number).parent)

    def again(self, number: int) -> None:
        """Answer message `number` again as a new branch, with another seed: a new sample unless the temperature is
        0."""
        found = self.tree.get(number)
        self._ask(found.question, found.parent, found.branch[1])

    def select(self, number: int, branch: int) -> None:
        """Show the branch of message `number` that has the index `branch`."""
        with self._changing:
            if not self.running:
                self.tree.select(number, branch)
                self._drawn = ()
        self.throttle.mark()

    def stop(self) -> None:
        """Stop the present answer; its text so far stays."""
        if self._answering is not None:
            self._answering.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the answer is complete, at most `seconds`; return whether it is."""
        return self._answering is None or self._answering.wait(seconds)

    def picture(self) -> str:
        with self._changing:
            path = self.tree.path()
            return svg.html(draw_about(self._about(path)), draw_chat(path, self._editing, self.running))

    def redraw(self) -> None:
        with self._changing:
            path = self.tree.path()
            self.shown.content = svg.html(draw_about(self._about(path)))
            parts = {region(each, n): part for each in path for n, part in enumerate(each.parts)}
            drawn = (*(_signature(each) for each in path), self._editing, self.running)
            if drawn != self._drawn:
                self._drawn = drawn
                self.talk.send_all({name: len(part.pieces) for name, part in parts.items()})
            for name, part in parts.items():
                self.talk.append(name, len(part.pieces), lambda at, part=part: [
                    draw_piece_of_text(each) for each in part.pieces[at:]
                ])  # fmt: skip

    def close(self) -> None:
        self.stop()
        super().close()

    def _ask(self, text: str, parent: Exchange | None, new_seeds: int = 0) -> None:
        """Ask a question after `parent`, the last exchange if None; `new_seeds` is added to the sampling seed."""
        text = text.strip()
        with self._changing:
            if self.running or not text:
                return
            made = self.tree.add(text, parent)
            base = made.base
            for call in base.unanswered_calls:  # calls to tools without a function must not block the conversation
                base = base.result(NO_RESULT, call)
            self._end_edit()
            made.running = self.running = self.composer.running = True
            self._answering = answer_in_background(
                self._drawing(new_seeds),
                base.user(text),
                lambda event: self._on_event(made, event),
                lambda error: self._on_end(made, error),
            )
        self.throttle.mark()

    def _drawing(self, new_seeds: int) -> Agent:
        """Return a copy of the agent with `new_seeds` added to its seed, or the agent itself for 0."""
        if not new_seeds:
            return self.agent
        other, sampling = copy(self.agent), self.agent.sampling
        other.sampling = sampling.model_copy(update={"seed": sampling.seed + new_seeds})
        return other

    def _on_event(self, exchange: Exchange, event: AgentEvent) -> None:
        with self._changing:
            exchange.add_event(event)
        self.throttle.mark()

    def _on_end(self, exchange: Exchange, error: str) -> None:
        with self._changing:
            exchange.running, exchange.error = False, exchange.error or error
            self.running = self.composer.running = False
        self.throttle.flush()
        self.keep()

    def _on_message(self, message: Any) -> None:
        if not isinstance(message, Mapping):
            return
        acts: dict[str, Callable[[], None]] = {"stop": self.stop, "cancel": self._cancel_edit, "last": self._edit_last}
        if isinstance(text := message.get("send"), str):
            self.composer.draft = ""
            self.send(text)
        for name, act in acts.items():
            if message.get(name) is True:
                act()

    def _pick(self, key: str) -> None:
        what, *rest = key.split(":")
        if what == "branch":
            self.select(int(rest[0]), int(rest[1]))
        elif what == "edit":
            self._begin_edit(int(rest[0]))
        elif what == "again":
            self.again(int(rest[0]))

    def _begin_edit(self, number: int) -> None:
        if self.running:
            return
        found = self.tree.get(number)
        self._editing = number
        self.composer.draft = found.question
        self.composer.notice = f"editing message {self._place(found)}: it begins a branch, and what follows stays"
        self.throttle.mark()

    def _edit_last(self) -> None:
        if self.last is not None:
            self._begin_edit(self.last.number)

    def _cancel_edit(self) -> None:
        self._end_edit()
        self.throttle.mark()

    def _end_edit(self) -> None:
        if self._editing:
            self.composer.draft = ""
        self._editing, self.composer.notice = 0, ""

    def _place(self, exchange: Exchange) -> int:
        return self.tree.path().index(exchange) + 1

    def _about(self, path: list[Exchange]) -> list[tuple[str, str]]:
        runner, base = self.agent.runner, self.tree.root.base
        tools = base.tools or self.agent.tools
        context = runner.model.spec.max_position_embeddings
        rounds = [each for exchange in path for each in exchange.rounds]
        used = rounds[-1].prompt_tokens + rounds[-1].output_tokens if rounds else 0
        system = base.system if base.system is not None else self.agent.system
        rows = [("model", runner.model.spec.name or "model")]
        rows += [("tools", ", ".join(tool.name for tool in tools))] if tools else []
        rows += [("system", system)] if system else []
        rows += [("context", f"{used:,} of {context:,} tokens")]
        if runner.kv_cache.manager.prefix_cache is None:
            rows += [("prefix cache", "none: each round computes its whole prompt; load with prefix='radix'")]
        elif rounds:
            cached, prompt = sum(each.cached_tokens for each in rounds), sum(each.prompt_tokens for each in rounds)
            rows += [("prompts so far", f"{prompt:,} tokens, {cached:,} of them cached")]
        return rows


def _signature(exchange: Exchange) -> tuple[Any, ...]:
    """Return everything drawn of an exchange except its growing pieces; a change requires a full redraw."""
    parts = tuple((part.kind, part.is_complete, part.name, part.result is None) for part in exchange.parts)
    ends = exchange.running, exchange.stop_reason, exchange.error, exchange.branch, len(exchange.rounds)
    return (exchange.number, parts, ends, exchange.prompt_tokens)
