"""Show a model's prompt: its segments and tokens, the cached part, and the effect of a template."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import RLock
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.prompt.assemble import Divergence, Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn
from workbench.trace.events import Event
from workbench.widgets.prompt.data import AssembledView, BandGroup, TemplateChoices, TemplateOutcome, as_conversation
from workbench.widgets.prompt.picture import LAYOUTS, PAGE_TOKENS, PromptState, draw_prompt
from workbench.widgets.settings_form.form import error_line, error_markup
from workbench.widgets.view import PictureWidget

MAX_PROMPTS = 16  # cached prompts


class PromptView(PictureWidget):
    """A view of a conversation as the model reads it: segments as bands, each with its tokens, its cached part, and its
    text.

    Click a band for its tokens. Control tokens are marked; their names within a text are plain text. `previous` is an
    earlier conversation or prompt: the view shows the first token that differs from it. Setting `conversation` makes
    the old one the previous one. `templates` adds templates by name: Jinja texts, folders of models, or chat templates;
    `template` is the name of the chosen one, and `arguments` are further variables for it.

    With a runner, the cached part follows its prefix cache. `max_tokens` are reserved for the answer, as in a request.
    `prompt` is the assembled prompt.
    """

    engine_fields = ("_runner",)
    conversation = traitlets.Instance(Conversation)
    template = traitlets.Unicode()
    arguments = traitlets.Dict()
    layout_name = traitlets.Enum(LAYOUTS, default_value=LAYOUTS[0])
    chosen = traitlets.Int(-1)  # index of the segment with visible tokens
    opened = traitlets.Unicode()  # first index of the open group of segments, or "cut"
    token_page = traitlets.Int(0)

    def __init__(
        self,
        runner: Any,
        conversation: Any,
        previous: Any = None,
        templates: Mapping[str, Any] | None = None,
        max_tokens: int = 1,
    ):
        from workbench.engine.runner import Runner
        from workbench.engine.runner_thread import RunnerThread

        talk = as_conversation(conversation)
        self._runner = runner if isinstance(runner, Runner) else None
        self._choices, self._max_tokens = TemplateChoices.of(runner, templates or {}), max_tokens
        self._previous = previous if previous is None or isinstance(previous, Prompt) else as_conversation(previous)
        self._prompts: OrderedDict[Any, tuple[Conversation, Prompt, str]] = OrderedDict()
        self._reading = RLock()
        self._view: tuple[Any, AssembledView] | None = None
        super().__init__(conversation=talk, template=self._choices.choose(talk))
        self._alert = error_line("")
        self.read()  # raises here if the template refuses the conversation
        names = self._choices.names
        known = ipywidgets.Dropdown(options=names, description="template", layout={"width": "18em"})
        self._arguments = ipywidgets.Text(
            description="arguments", placeholder='{"enable_thinking": false}', continuous_update=False,
            layout={"width": "24em"},
        )  # fmt: skip
        layouts = ipywidgets.ToggleButtons(options=LAYOUTS, style={"button_width": "auto"})
        self._arguments.observe(self._on_arguments, "value")
        self.observe(self._on_conversation, "conversation")
        self.watch("conversation", "template", "arguments", "layout_name", "chosen", "opened", "token_page")
        self.shown.on_pick(self._pick)
        if self._runner is not None:
            self._leave = RunnerThread.attach(self._runner).listen(self._on_event)
        row = [self.linked("layout_name", layouts), self.linked("template", known), self._arguments]
        self.show(ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}), self._alert)

    @property
    def prompt(self) -> Prompt:
        return self.read().prompt

    def read(self) -> AssembledView:
        """Return the prompt with the data for its drawing, and with its presently cached tokens.

        Raises:
            WorkbenchError: the chosen template refuses the conversation.
        """
        with self._reading:
            name, context = self.template, self._context
            prompt, error = self._assembled(self.conversation, name)
            parted = self._parted(prompt, name)
            outcomes = self._outcomes() if len(self._choices.names) > 1 else ()
            cached = self._cached(prompt)
            key = (id(prompt), cached, error, parted, name)
            if self._view is None or self._view[0] != key:  # a view caches its bands
                compared = self._previous is not None
                view = AssembledView(
                    prompt, self._choices.tokenizer, cached, context, compared, parted, error, name, outcomes
                )
                self._view = key, view
            return self._view[1]

    def picture(self) -> str:
        state = PromptState(self.layout_name, self.chosen, self.opened, self.token_page)
        return draw_prompt(self.read(), state, self._choices.text(self.template))

    def redraw(self) -> None:
        try:
            super().redraw()
        except WorkbenchError as error:  # refused by the template: keep the picture, and show the error
            self._alert.value = error_markup(str(error))
        else:
            self._alert.value = ""

    @property
    def _context(self) -> int:
        return self._runner.model.spec.max_position_embeddings if self._runner is not None else 0

    def _assembled(self, conversation: Conversation, name: str) -> tuple[Prompt, str]:
        """Return the prompt, and why the runner would refuse it, or ""; a refused prompt is returned whole."""
        key = (id(conversation), name, json.dumps(self.arguments, sort_keys=True, default=str))
        if key not in self._prompts:
            self._prompts[key] = (conversation, *self._assemble(conversation, name))
            while len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        _, prompt, error = self._prompts[key]
        return prompt, error

    def _assemble(self, conversation: Conversation, name: str) -> tuple[Prompt, str]:
        reader = self._choices.reader(name)
        wanted = self._choices.conversation(conversation, name, self.arguments)
        # A conversation that ends with an answer needs no generation prompt.
        answered = bool(wanted.turns) and isinstance(wanted.turns[-1], AssistantTurn)
        options = {"add_generation_prompt": not answered}
        if self._runner is None:
            return wanted.prompt(reader, **options), ""
        overflow, context = self._runner.config.schedule.overflow, self._context
        free = min(self._max_tokens, context // 2) if overflow == "cut_oldest" else 1  # as Runner.assemble has it
        try:
            return wanted.prompt(reader, **options, context=context, max_tokens=free, overflow=overflow), ""
        except WorkbenchError as error:
            return wanted.prompt(reader, **options), str(error)

    def _parted(self, prompt: Prompt, name: str) -> Divergence | None:
        if self._previous is None:
            return None
        before = self._previous if isinstance(self._previous, Prompt) else self._assembled(self._previous, name)[0]
        return prompt.divergence(before)

    def _outcomes(self) -> tuple[TemplateOutcome, ...]:
        found = []
        for name in self._choices.names:
            try:
                prompt, error = self._assembled(self.conversation, name)
                found.append(TemplateOutcome(name, prompt, self._parted(prompt, name), error))
            except WorkbenchError as error:
                found.append(TemplateOutcome(name, error=str(error)))
        return tuple(found)

    def _cached(self, prompt: Prompt) -> int | None:
        from workbench.engine.runner_thread import between_steps

        if self._runner is None or self._runner.kv_cache.manager.prefix_cache is None:
            return None
        return between_steps(self._runner, lambda runner: runner.cached_tokens(prompt.ids))

    def _on_event(self, event: Event) -> None:
        if event.kind == "finished":
            self.throttle.mark()

    def _on_conversation(self, change: dict[str, Any]) -> None:
        self._previous = change["old"]
        self.chosen, self.opened, self.token_page = -1, "", 0

    def _on_arguments(self, change: dict[str, Any]) -> None:
        text = change["new"].strip()
        try:
            found = json.loads(text) if text else {}
            if not isinstance(found, dict):
                raise ValueError("an object is wanted")
        except ValueError as error:
            self._alert.value = error_line(f'arguments: no JSON object ({error}); such as {{"name": true}}').value
            return
        self.arguments = found
        self._alert.value = ""

    def _pick(self, key: str) -> None:
        what, _, rest = key.partition(":")
        if what == "band":
            self.chosen, self.token_page = (-1 if int(rest) == self.chosen else int(rest)), 0
        elif what == "group":
            self.opened = "" if rest == self.opened else rest
        elif what == "page":
            band = self.read().bands[self.chosen]
            self.token_page = min(max(0, int(rest)), (band.num_tokens - 1) // PAGE_TOKENS)
        elif what == "template" and rest in self._choices.names:
            self.template = rest
        elif what == "break":
            self._go_to_break()

    def _go_to_break(self) -> None:
        """Show the tokens around the first difference from the previous prompt."""
        view = self.read()
        if view.divergence is None:
            return
        at = view.containing(view.divergence.token)
        groups = (each for each in view.rows if isinstance(each, BandGroup))
        self.opened = next((str(each.first) for each in groups if each.first <= at < each.last), self.opened)
        self.chosen = at
        self.token_page = max(0, view.divergence.token - view.bands[at].segment.start) // PAGE_TOKENS
