"""Turn chat messages into a prompt's token ids, by the Jinja template of a model's folder (Hugging Face)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

from workbench.errors import WorkbenchError
from workbench.files import read_bytes, read_json_object
from workbench.prompt.template_sandbox import BoundedEnvironment
from workbench.prompt.tokenizer import Tokenizer

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"
ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])  # as at OpenAI
MAX_NESTING = 64  # objects and lists within a message
CHARACTERS_PER_TEXT = 32  # characters that a text counts for besides its own: a template has work with every message
KEYWORD_FIELDS = ("role", "type")  # fields whose values are words of the template's, not texts
FILLERS = "xqzjkw·一あ"  # for characters of texts, in whatever a vocabulary's control tokens are not written


class ChatTemplate:
    """A chat template. Its own control tokens are read as such; no text of the messages can make one.

    `text` is the Jinja template, `names` the tokens that it can name: `bos_token`, `eos_token`, ...
    """

    def __init__(self, text: str, names: Mapping[str, str], where: str = "chat template"):
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _refuse
        environment.add_filter("tojson", _to_json)
        try:
            self._render = environment.bounded(text)
            self._words = ROLES | _words(environment.parse(text))
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise WorkbenchError(f"{where}: not a Jinja template ({_line(error)})") from None
        self.text, self.names = text, dict(names)

    @classmethod
    def from_folder(cls, folder: Path | str) -> ChatTemplate | None:
        """Return the template in `chat_template.jinja` or `tokenizer_config.json`; None without one."""
        file, config = Path(folder) / FILE, Path(folder) / CONFIG
        try:
            values = read_json_object(read_bytes(config), str(config)) if config.exists() else {}
            text = read_bytes(file).decode("utf-8") if file.exists() else values.get("chat_template")
            if isinstance(text, list):  # several by name
                text = next((each.get("template") for each in text if each.get("name") == "default"), None)
            tokens = {name: values.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
            plain = {name: each["content"] if isinstance(each, dict) else each for name, each in tokens.items() if each}
        except (ValueError, AttributeError, LookupError) as error:
            raise WorkbenchError(f"{folder}: its chat template cannot be read ({_line(error)})") from None
        if not isinstance(text, str):
            return None
        return cls(text, plain, str(file if file.exists() else config))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt's text, up to where the assistant begins.

        Raises:
            WorkbenchError: if the template refuses the messages, or would loop or grow without end.
        """
        characters = sum(CHARACTERS_PER_TEXT + len(text) for _, text in _texts(messages, "messages"))
        try:
            return self._render(characters, messages=list(messages), add_generation_prompt=True, **self.names)
        except Exception as error:  # a template can raise whatever Python can
            raise WorkbenchError(f"messages: the chat template refuses them ({_line(error)})") from None

    def ids(self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Raises:
            WorkbenchError: if a text of the messages (content, role, name, tool argument) makes a control token, or
                `render` fails.
        """
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise WorkbenchError(f"messages.{number}: must be an object with a role and a content")
        for where, text in _texts(messages, "messages"):
            try:
                forged = tokenizer.special_tokens_in(text)
            except WorkbenchError as error:
                raise WorkbenchError(f"{where}: {error}") from None
            if forged:
                raise WorkbenchError(
                    f"{where}: holds the control token {tokenizer.id_to_token(forged[0])!r}; take it out"
                )
        for number, message in enumerate(messages):
            if message.get("content") is None and not message.get("tool_calls"):
                where = f"messages.{number}.content"
                raise WorkbenchError(f"{where}: must be a text or a list of parts, where there are no tool_calls")
        text = self.render(messages)
        written = self.render(_MaskedMessages(tokenizer, self._words).mask(messages))
        if tokenizer.special_tokens_in(text) != tokenizer.special_tokens_in(written):
            raise WorkbenchError(
                "messages: a role, a name or the end of a text makes a control token of what the template writes "
                f"around it; roles are {', '.join(sorted(ROLES))}, or those that the template names"
            )
        return tuple(tokenizer.encode(text, special=True))


class _MaskedMessages:
    """Messages with masked texts of the same length and spaces, to find the control tokens that the template itself
    writes.

    Words that the template uses stay: keys, and values of `KEYWORD_FIELDS`.
    """

    def __init__(self, tokenizer: Tokenizer, words: frozenset[str]):
        self._words = words
        names = "".join(tokenizer.special_token_ids)
        self._letters = {*names, *names.lower(), *names.upper()}
        self._filler = next((each for each in FILLERS if each not in self._letters), FILLERS[-1])

    def mask(self, value: Any, kind: bool = False) -> Any:
        if isinstance(value, str):
            return value if kind and value in self._words else "".join(map(self._character, value))
        if isinstance(value, Mapping):
            made: dict[Any, Any] = {}
            for key, each in value.items():
                name = self.mask(key, kind=True)
                while name in made:
                    name += self._filler
                made[name] = self.mask(each, kind=key in KEYWORD_FIELDS)
            return made
        return [self.mask(each) for each in value] if isinstance(value, list | tuple) else value

    def _character(self, character: str) -> str:
        plain = character.isascii() and character not in self._letters
        return character if character.isspace() or plain else self._filler


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


def _words(template: nodes.Template) -> frozenset[str]:
    """Return every text that a template names: constants that it compares with, and fields that it reads."""
    constants = {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(constants | {node.attr for node in template.find_all(nodes.Getattr)})


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(words: str) -> NoReturn:
    raise jinja2.TemplateError(words)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
