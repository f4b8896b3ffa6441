"""Open a model's tokenizer and chat template from its folder or file."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.files import write_atomically
from workbench.model.formats.gguf.file import open_gguf
from workbench.model.formats.open import gguf_file
from workbench.prompt.templates import CONFIG, FOLDER, ChatTemplate
from workbench.prompt.templates import FILE as TEMPLATE_FILE
from workbench.prompt.tokenization.gguf_vocabulary import GGUFVocabulary
from workbench.prompt.tokenization.tokenizer import FILE, Tokenizer
from workbench.prompt.tokenization.tokenizer_files import read_tokenizer


def open_tokenizer(path: str | Path) -> Tokenizer | None:
    """Open the tokenizer of the model at `path` (a folder or GGUF file): tokenizer.json, tekken.json or tokenizer.model
    take precedence over a GGUF file's own. None if there is none.
    """
    path = Path(path)
    found = read_tokenizer(path) if path.is_dir() else None
    if found is None and (file := gguf_file(path)) is not None:
        return _vocabulary(file).tokenizer()
    return found


def open_chat_template(path: str | Path) -> ChatTemplate | None:
    """Open the chat template of the model at `path` (a folder or GGUF file); None if there is none."""
    path = Path(path)
    found = ChatTemplate.from_folder(path) if path.is_dir() else None
    if found is None and (file := gguf_file(path)) is not None:
        vocabulary = _vocabulary(file)
        tokenizer = vocabulary.tokenizer()
        return None if tokenizer is None else vocabulary.chat_template(tokenizer)
    return found


def absent_token_ids(path: str | Path) -> list[str]:
    """Return the special tokens (end tokens excepted) whose id is outside of a GGUF file's vocabulary; empty for other
    models.
    """
    file = gguf_file(Path(path))
    return [] if file is None else [f"{file.name}: {each}" for each in _vocabulary(file).absent_token_ids()]


def save_texts(source: str | Path, target: Path) -> None:
    """Write the tokenizer and the chat template of the model at `source` into the folder `target`, unless it has them.
    The files are tokenizer.json, chat_template.jinja, additional_chat_templates/ and, with the names of the template's
    tokens, tokenizer_config.json."""
    tokenizer, template = open_tokenizer(source), open_chat_template(source)
    texts: dict[str, str] = {}
    if tokenizer is not None and read_tokenizer(target) is None:
        texts[FILE] = tokenizer.to_json()
    if template is not None and ChatTemplate.from_folder(target) is None:
        texts[TEMPLATE_FILE] = template.text
        texts |= {f"{FOLDER}/{name}.jinja": text for name, text in template.texts.items() if text != template.text}
    if texts and not (target / CONFIG).exists():
        names = template.names if template is not None else {}
        texts[CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, ensure_ascii=False)
    if any(name.startswith(FOLDER) for name in texts):
        (target / FOLDER).mkdir(exist_ok=True)
    for name, text in texts.items():
        write_atomically(target / name, lambda file, text=text: file.write(text.encode()))


def _vocabulary(file: Path) -> GGUFVocabulary:
    return GGUFVocabulary(open_gguf(file).metadata, str(file))
