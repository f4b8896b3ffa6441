"""Chat messages to the ids of a prompt, by the template that a model's folder brings (Hugging Face, Jinja)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workbench.errors import WorkbenchError
from workbench.files import read_bytes, read_json_object
from workbench.prompt.tokenizer import Tokenizer

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"


class ChatTemplate:
    """`ids` of messages: what the template writes is read with its control tokens. A message that holds one is refused,
    for read the same way it would forge a turn."""

    def __init__(self, text: str, names: Mapping[str, str], where: str = "chat template"):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise WorkbenchError(f"{where}: not a Jinja template ({' '.join(str(error).split())})") from None
        self._names = dict(names)

    @classmethod
    def from_folder(cls, folder: Path | str) -> ChatTemplate | None:
        """The template in `chat_template.jinja` or, before it came, `tokenizer_config.json`; None without one."""
        file, config = Path(folder) / FILE, Path(folder) / CONFIG
        try:
            values = read_json_object(read_bytes(config), str(config)) if config.exists() else {}
            text = read_bytes(file).decode("utf-8") if file.exists() else values.get("chat_template")
        except ValueError as error:
            raise WorkbenchError(f"{folder}: its chat template cannot be read ({error})") from None
        if isinstance(text, list):  # several by name
            text = next((each.get("template") for each in text if each.get("name") == "default"), None)
        if not isinstance(text, str):
            return None
        tokens = {name: values.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        plain = {name: each["content"] if isinstance(each, dict) else each for name, each in tokens.items() if each}
        return cls(text, plain, str(file if file.exists() else config))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant begins. WorkbenchError for what the template refuses."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise WorkbenchError(f"messages: the chat template refuses them ({' '.join(str(error).split())})") from None

    def ids(self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[int, ...]:
        for number, message in enumerate(messages):
            forged = next((name for name in tokenizer.control_ids if name in str(message["content"])), None)
            if forged is not None:
                raise WorkbenchError(f"messages.{number}: holds the control token {forged!r}; take it out")
        return tuple(tokenizer.encode(self.render(messages), special=True))


def _refuse(words: str) -> NoReturn:
    raise jinja2.TemplateError(words)
