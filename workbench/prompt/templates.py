"""Turn chat messages into a prompt's token ids, by the Jinja template of a model's folder (Hugging Face)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import jinja2
from jinja2 import nodes

from workbench.errors import WorkbenchError, nearest
from workbench.files import read_bytes, read_json_object
from workbench.prompt.default_tools import Gaps, fill
from workbench.prompt.template_bounds import (
    BASE_STEPS,
    Steps,
    TemplateTooExpensive,
    format_growth,
    spend,
    steps_for,
)
from workbench.prompt.template_encoding import TemplateEncoder, TokenSpan
from workbench.prompt.template_sandbox import BoundedEnvironment, GenerationTag
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.traced import ROLE, TEMPLATE, Origin, Traced, runs_of, traced

CONFIG, FILE, FOLDER = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of templates, as in Hugging Face
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])  # roles of OpenAI's API
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of the field for a thought in templates
MAX_NESTING = 64  # maximum nesting of objects and lists in a message
CHARACTERS_PER_TEXT = 32  # added to the length of each text: every message costs a template some steps
PROBE_STEPS = BASE_STEPS // 4  # step limit of one probe: a hostile template uses it up each time
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # id of a call that Mistral's templates accept
PROBED, LONG_ID, SHORT = "probed_tool", "call_0123456789abcdef01234567", "bcdef0123"
PROBED_ARGUMENTS = {"x": "a probed value"}
SYSTEM, QUESTION, RESULT = "a system prompt", "a question", "a result"
_PROBED = {"name": PROBED, "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
PROBE = {"type": "function", "function": _PROBED}
BARE_CALL = re.compile(rf'\s*\[?\s*{{[^{{}}]*"{PROBED}"')
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag; its space reveals whether a template strips texts
CONTINUED_ORIGIN = Origin("continued")
FRAME = ""  # origin of a part's keys: it sorts before all others, so `origin_of` uses it for a part as a whole
_MODULE = re.escape(Traced.__module__)
TRACED = re.compile(  # the name of our string class in error messages
    rf"""(["'])(?:{_MODULE}\.)?Traced((?: object)?\1)|{_MODULE}\.Traced( object)"""
)


class CallHabits(NamedTuple):
    """Properties of a chat template, each true or false: it accepts only call ids of nine letters or digits; it writes
    a call as JSON at the start of an answer, without a control token; it refuses two calls in one answer.
    """

    wants_short_ids: bool
    writes_bare_calls: bool
    wants_one_call: bool


class ChatTemplate:
    """A chat template. Control tokens that it writes are encoded as such; names of control tokens in messages are plain
    characters.

    Args:
        text: the Jinja template, or several by name: `default`, and `tool_use` where there are tools.
        names: the token variables of the template: `bos_token`, `eos_token`, ...
        where: its source, for error messages.
    """

    def __init__(self, text: str | Mapping[str, str], names: Mapping[str, str], where: str = "chat template"):
        self.texts = {DEFAULT: text} if isinstance(text, str) else dict(text)
        self.names, self._where = dict(names), where
        self._compiled = {name: _Compiled(each, where) for name, each in self.texts.items()}
        self._habits: dict[str, CallHabits] = {}
        self._gaps: dict[str, Gaps] = {}
        self._encoders: WeakKeyDictionary[Tokenizer, dict[str, TemplateEncoder]] = WeakKeyDictionary()

    @property
    def text(self) -> str:
        """Return the Jinja source of the default template, or of the only one."""
        return self.texts[DEFAULT] if DEFAULT in self.texts else next(iter(self.texts.values()))

    @classmethod
    def from_folder(cls, folder: Path | str) -> ChatTemplate | None:
        """Load the templates of `chat_template.jinja`, `additional_chat_templates/` or `tokenizer_config.json`; return
        None if there is none.
        """
        file, config = Path(folder) / FILE, Path(folder) / CONFIG
        try:
            values = read_json_object(read_bytes(config), str(config)) if config.exists() else {}
            entry = values.get("chat_template")
            if isinstance(entry, list):  # several templates by name
                entry = {each["name"]: each["template"] for each in entry}
            texts = {DEFAULT: entry} if isinstance(entry, str) else dict(entry or {})
            named = sorted((Path(folder) / FOLDER).glob("*.jinja"))
            texts |= {path.stem: read_bytes(path).decode("utf-8") for path in named}
            texts |= {DEFAULT: read_bytes(file).decode("utf-8")} if file.exists() else {}
            tokens = {name: values.get(name) for name in NAMED_TOKENS}
            plain = {name: each["content"] if isinstance(each, dict) else each for name, each in tokens.items() if each}
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise WorkbenchError(f"{folder}: its chat template cannot be read ({_line(error)})") from None
        texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        return cls(texts, plain, str(file if file.exists() else config)) if texts else None

    def choose(self, name: str | None = None, tools: bool = False) -> str:
        """Return the name of the template to use: `name`, else `tool_use` if there are tools and such a template, else
        the default.

        Raises:
            WorkbenchError: if no template has that name.
        """
        name = name or (WITH_TOOLS if tools and WITH_TOOLS in self.texts else DEFAULT)
        if name in self.texts:
            return name
        names = f"{nearest(name, self.texts)}; it has {', '.join(self.texts)}"
        raise WorkbenchError(f"{self._where}: no chat template is named {name!r}{names}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Traced:
        """Return the prompt's text with the origin of every character.

        A string content is passed as a list of one part if the template only shows it in that form.

        Args:
            messages: as in `transformers.apply_chat_template`; `Traced` strings keep their origins.
            tools: tool declarations in OpenAI's format.
            documents: documents with title and text.
            add_generation_prompt: end with the opening of an assistant message.
            continue_final_message: end with the last message's content, or with its field of this name.
            template: the name of one of several templates.
            arguments: further variables of the template (`enable_thinking`).
            now: the time that `strftime_now` prints; default: the current time.

        Raises:
            WorkbenchError: if the template refuses the messages, loops without end or produces an endless text.
        """
        if continue_final_message and add_generation_prompt:
            raise WorkbenchError("continue_final_message ends within a message, add_generation_prompt before one: "
                                 "give one")  # fmt: skip
        name = self.choose(template, tools is not None)
        compiled = self._compiled[name]
        inputs: dict[str, Any] = {"messages": messages, "tools": tools, "documents": documents, **(arguments or {})}
        characters = sum(CHARACTERS_PER_TEXT + len(text) for key in inputs for _, text in _texts(inputs[key], key))
        moment = now or datetime.now()
        listed = [_message(each, number, compiled.words) for number, each in enumerate(messages)]
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            _mark_end(listed, field)
        variables: dict[str, Any] = {name: Traced(text, TEMPLATE) for name, text in self.names.items()}
        variables |= {name: traced(value, Origin("argument", None, name)) for name, value in (arguments or {}).items()}
        variables["strftime_now"] = partial(_time_text, moment)
        variables |= {
            "tools": None if tools is None else [traced(each, Origin("tool", n)) for n, each in enumerate(tools)],
            "documents": None
            if documents is None
            else [traced(each, Origin("document", n)) for n, each in enumerate(documents)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if any(each.get("tool_calls") for each in listed):
                habits = self.call_habits(name)
                listed = list(_with_short_ids(listed)) if habits.wants_short_ids else listed
                listed = list(_with_one_call_each(listed)) if habits.wants_one_call else listed
            text = _with_all_shown(listed, partial(compiled.render, steps_for(characters), **variables))
        except Exception as error:  # a template can raise whatever Python can
            raise WorkbenchError(f"messages: the chat template refuses them ({_line(error)})") from None
        return _until_mark(text) if continue_final_message else text

    def call_habits(self, template: str | None = None) -> CallHabits:
        """Return the properties of a template's tool calls, found by rendering one call, with ids of three lengths, and
        two calls.
        """
        name = self._known(template)
        if name not in self._habits:
            short, *others = (self.written_call(name, id) for id in (SHORT, LONG_ID, SHORT[:1]))
            is_bare = self.gaps(name).calls or (short is not None and BARE_CALL.match(short) is not None)
            is_one = short is not None and self.written_call(name, SHORT, 2) is None
            self._habits[name] = CallHabits(short is not None and None in others, is_bare, is_one)
        return self._habits[name]

    def gaps(self, template: str | None = None) -> Gaps:
        """Return the parts of a conversation that the template of this name does not show, found by probing. A template
        that shows tools is used with its own format of calls.
        """
        name = self._known(template)
        if name not in self._gaps:
            system, question, answer, result = _probes(SHORT)

            def shows(word: str, *messages: Mapping[str, Any]) -> bool:
                return word in (self._rendered(name, messages) or "")

            begin = [question] if shows(QUESTION, question) else [system, question]
            without = self._rendered(name, begin)
            lacks_tools = without is not None and self._rendered(name, begin, [PROBE]) in (None, without)
            lacks_calls = lacks_tools and not shows(PROBED, *begin, answer)
            self._gaps[name] = Gaps(
                tools=lacks_tools,
                calls=lacks_calls,  # then a role `tool` is printed as any other, and its model never saw it
                results=lacks_calls or (lacks_tools and not shows(RESULT, *begin, answer, result)),
                system=lacks_tools and not shows(SYSTEM, system, question),
            )
        return self._gaps[name]

    def written_call(self, template: str | None = None, id: str = "", count: int = 1) -> str | None:
        """Return the text that the template writes after a prompt for an answer with `count` calls of PROBED; with an
        `id` their results are included. None if the template refuses the messages.
        """
        name = self._known(template)
        messages, gaps = _probes(id or SHORT, count)[1 : None if id else 3], self.gaps(name)
        tools = None if gaps.tools else [PROBE]
        prompt = self._rendered(name, fill(messages[:1], [PROBE], gaps), tools, add_generation_prompt=True)
        whole = self._rendered(name, fill(messages, [PROBE], gaps), tools)
        if prompt is None or whole is None:
            return None
        return behind_prompt(whole, prompt)

    def _rendered(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Any = None, **variables: Any
    ) -> str | None:
        """Return the rendered messages; None if the template refuses them."""
        variables |= {**self.names, "documents": None, "strftime_now": lambda _: "", "tools": tools}
        compiled = self._compiled[name]
        listed = [_message(each, number, compiled.words) for number, each in enumerate(messages)]
        try:
            return str.__str__(_with_all_shown(listed, partial(compiled.render, Steps(PROBE_STEPS), **variables)))
        except Exception:  # a template can raise whatever Python can
            return None

    def _known(self, template: str | None) -> str:
        return template if template in self.texts else next(iter(self.texts))

    def encode(self, text: Traced, tokenizer: Tokenizer, template: str | None = None) -> list[TokenSpan]:
        """Encode a text that `render` returned; return its tokens with their character ranges."""
        return self.encoder(tokenizer, template).encode(text)

    def encoder(self, tokenizer: Tokenizer, template: str | None = None) -> TemplateEncoder:
        """Return the encoder for texts that the template `template` renders."""
        name = self._known(template)
        encoders = self._encoders.setdefault(tokenizer, {})
        if name not in encoders:
            literals = self.literals(name)
            written = [each for each in tokenizer.added_token_ids if each.strip() and each in literals]
            encoders[name] = TemplateEncoder(tokenizer, written)
        return encoders[name]

    def literals(self, template: str | None = None) -> str:
        """Return the literal texts in the source of the template `template`."""
        return self._compiled[self._known(template)].literals

    def end_token_ids(self, tokenizer: Tokenizer, template: str | None = None) -> tuple[int, ...]:
        """Return the control token that the template writes after an answer, as a tuple of one id; empty if it writes
        none.
        """
        encoder = self.encoder(tokenizer, template)
        if encoder.end_token_ids is None:
            encoder.end_token_ids = self._find_end(encoder, template)
        return encoder.end_token_ids

    def _find_end(self, encoder: TemplateEncoder, template: str | None) -> tuple[int, ...]:
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text = self.render(talk, add_generation_prompt=False, template=template)
        except WorkbenchError:  # it requires more than a question and an answer
            return ()
        place = 0
        for length, origin in runs_of(text):
            place += length
            if (origin.part, origin.index) == ("message", 1):
                return tuple(token.id for token in encoder.written_tokens(text[place:]))[:1]
        return ()  # it does not show answers

    def ids(self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the prompt's token ids, up to the start of the assistant's message.

        Raises:
            WorkbenchError: if a message lacks a role or content, and if `render` fails.
        """
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise WorkbenchError(f"messages.{number}: must be an object with a role and a content")
            if message.get("content") is None and not message.get("tool_calls"):
                where = f"messages.{number}.content"
                raise WorkbenchError(f"{where}: must be a text or a list of parts, unless it has tool_calls")
        text = self.render(messages)
        return tuple(token.id for token in self.encode(text, tokenizer, self.choose()))


def behind_prompt(whole: str, prompt: str) -> str:
    """Return the part of a text after its prompt. If the text does not begin with the whole prompt, return the part
    after their common prefix: a prompt may open a thought that is not shown in a history.
    """
    same = len(commonprefix([prompt, whole]))
    return whole[same if same == len(prompt) else 1 + max(whole.rfind(each, 0, same) for each in "\n>]") :]


def _probes(id: str, count: int = 1) -> list[dict[str, Any]]:
    """Return probe messages: a system prompt, a question, an answer with `count` calls, and their results, all with one
    id.
    """
    call = {"type": "function", "id": id, "function": {"name": PROBED, "arguments": dict(PROBED_ARGUMENTS)}}
    return [
        {"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call] * count},
        *[{"role": "tool", "content": RESULT, "name": PROBED, "tool_call_id": id}] * count,
    ]  # fmt: skip


class _Compiled:
    """One compiled template: its function, the role words in its source, and its literals."""

    def __init__(self, text: str, where: str):
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            self.render: Callable[..., Traced] = environment.bounded(text)
            tree = environment.parse(text)
            self.words = ROLES | {each for each in _constants(tree) if each.isidentifier()}
        except Exception as error:  # raised by Jinja, or by Python when it compiles Jinja's code
            raise WorkbenchError(f"{where}: not a Jinja template ({_line(error)})") from None
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        self.literals = "\0".join([*data, *_constants(tree)])


def _message(message: Mapping[str, Any], number: int, words: frozenset[str]) -> dict[str, Any]:
    """Return a message for the template: strings with origins, no keys without value, and the thought under every known
    name.
    """
    if not isinstance(message, Mapping):
        raise WorkbenchError(f"messages.{number}: must be an object with a role and a content")
    system = number == 0 and message.get("role") in ("system", "developer")
    origin = Origin("system") if system else Origin("message", number)
    fields = _with_words(traced({k: v for k, v in message.items() if v is not None}, origin), words)
    thought = next((fields[key] for key in REASONING_FIELDS if fields.get(key) is not None), None)
    return fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought}


def _with_short_ids(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with call ids of nine letters or digits: other ids are mapped consistently, and a missing id is
    generated.
    """
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            waiting = [_short_id(call.get("id") or f"{number}.{place}") for place, call in enumerate(calls)]
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, waiting, strict=True)]}
        elif message.get("role") in ("tool", "function"):
            id, following = message.get("tool_call_id"), waiting.pop(0) if waiting else ""
            message = {**message, "tool_call_id": _short_id(id) if id else following}
        yield message


def _with_one_call_each(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with one call per answer: an answer with several calls becomes several answers, each followed by
    its result.
    """
    waiting: list[tuple[Any, dict[str, Any]]] = []  # open call ids, and answers that are not yielded yet
    for message in messages:
        if message.get("role") in ("tool", "function"):
            id = message.get("tool_call_id")
            answered = next((each for each in waiting if id and each[0] == id), *waiting[:1] or [None])
            if answered is not None:
                waiting.remove(answered)
                yield answered[1]
        else:
            yield from (each for _, each in waiting)
            calls = message.get("tool_calls") or ()
            rest = {"role": message.get("role"), "content": ""}  # the text and the thought stay with the first call
            answers = [{**(rest if n else message), "tool_calls": [call]} for n, call in enumerate(calls)]
            waiting = [(call.get("id"), each) for call, each in zip(calls, answers, strict=True)]
            if calls:
                continue
        yield message
    yield from (each for _, each in waiting)


def _short_id(id: str) -> str:
    made = hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]
    return id if SHORT_ID.fullmatch(id) else made


def _with_words(message: dict[str, Any], words: frozenset[str]) -> dict[str, Any]:
    """Return the message with origin ROLE for a role or part type that the template mentions in its source."""

    def named(value: dict[str, Any], key: str) -> dict[str, Any]:
        kind = value.get(key)
        return {**value, key: Traced(kind, ROLE)} if isinstance(kind, str) and kind in words else value

    lists = {key: message[key] for key in ("content", "tool_calls") if isinstance(message.get(key), list)}
    kinds = {key: [named(part, "type") if isinstance(part, dict) else part for part in lists[key]] for key in lists}
    return named({**message, **kinds}, "role")


def _with_all_shown(messages: Sequence[dict[str, Any]], render: Callable[..., Traced]) -> Traced:
    """Render messages; a content becomes a list of one part if the template shows only parts, as templates of vision
    models do.

    A content that is shown in neither form stays a string, and so does one of spaces only, which may be stripped. If
    the template refuses strings, all contents are tried as parts.
    """
    texts = {n: each["content"] for n, each in enumerate(messages) if isinstance(each.get("content"), str)}
    refusal: Exception | None = None
    try:
        text = render(messages=messages)
        parts = _hidden(text, texts)
    except Exception as error:  # a template can raise whatever Python can
        refusal, parts = error, set(texts)
    while any(texts[n].strip() for n in parts):
        try:
            shaped = render(messages=[_in_part(each, n) if n in parts else each for n, each in enumerate(messages)])
        except Exception as error:
            refusal = refusal or (error if isinstance(error, TemplateTooExpensive) else None)
            break
        as_data = {origin.index for _, origin in runs_of(shaped) if origin.part == FRAME}
        unread = parts & (_hidden(shaped, texts) | as_data)
        if not unread:
            return shaped
        parts -= unread
    if refusal is not None:
        raise refusal
    return text


def _hidden(shown: Traced, texts: Mapping[int, str]) -> set[int]:
    """Return the indices of the texts without a single rendered character; JSON punctuation belongs to no text."""
    shown_origins = {str(origin) for _, origin in runs_of(shown)}
    data = {
        n: {str(origin) for _, origin in runs_of(text) if not origin.is_written and origin.part != "computed"}
        for n, text in texts.items()
    }
    return {n for n in texts if data[n] and shown_origins.isdisjoint(data[n])}


def _in_part(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with its content as one part. Text that is made from the whole part has the origin of its keys.
    """
    frame = Origin(FRAME, number)
    part = {Traced("type", frame): Traced("text", ROLE), Traced("text", frame): message["content"]}
    return {**message, "content": [part]}


def _mark_end(messages: list[dict[str, Any]], field: str) -> None:
    """Append a mark to a field of the last message, or to the last text of its parts."""
    last = messages[-1] if messages else {}
    value, mark = last.get(field), Traced(CONTINUED, CONTINUED_ORIGIN)
    if isinstance(value, str):
        same = [name for name in REASONING_FIELDS if last.get(name) == value] if field in REASONING_FIELDS else [field]
        last.update({name: value + mark for name in same})
        return
    part = next((each for each in reversed(value or []) if isinstance(each, dict) and "text" in each), None)
    if part is None:
        raise WorkbenchError(f"continue_final_message: the last message has no {field} that is a text")
    part["text"] = part["text"] + mark


def _until_mark(text: Traced) -> Traced:
    """Return the text before the last mark, without trailing spaces if the template strips them."""
    place, mark = 0, -1
    for length, origin in runs_of(text):
        if origin.part == CONTINUED_ORIGIN.part:
            mark = place
        place += length
    if mark < 0:
        raise WorkbenchError("continue_final_message: the chat template does not show the last message as it is")
    has_space = str.startswith(text, CONTINUED, mark)  # transformers' rule, also if the template itself adds a space
    return text[:mark] if has_space else text[:mark].rstrip()


def _texts(value: Any, where: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every text in `value`, keys too, with its path."""
    if depth > MAX_NESTING:
        raise WorkbenchError(f"{where[:80]}: messages are nested more than {MAX_NESTING} deep; flatten them")
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str):
                yield where, key
            yield from _texts(each, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _texts(each, f"{where}.{number}", depth + 1)
    elif value is not None and not isinstance(value, int | float):
        raise WorkbenchError(f"{where[:80]}: a {type(value).__name__}; give texts, numbers, lists and mappings")


def _constants(template: nodes.Template) -> list[str]:
    return [node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)]


def _time_text(moment: datetime, format: str) -> str:
    spend(format_growth(format))
    return moment.strftime(format)


def _refuse(words: str) -> NoReturn:
    raise jinja2.TemplateError(words)


def _line(error: BaseException) -> str:
    return TRACED.sub(r"\1str\2\3", " ".join(str(error).split()))[:400] or type(error).__name__
