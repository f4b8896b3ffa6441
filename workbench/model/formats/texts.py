"""A model's tokenizer and chat template, wherever its folder or file keeps them."""

from __future__ import annotations

from pathlib import Path

from workbench.model.formats.gguf import GGUFFile
from workbench.model.formats.open import gguf_file
from workbench.prompt.gguf_vocabulary import GGUFVocabulary
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenizer import Tokenizer
from workbench.prompt.tokenizer_files import read_tokenizer


def open_tokenizer(path: str | Path) -> Tokenizer | None:
    """Open the tokenizer of the model in the folder, or the GGUF file, `path`: tokenizer.json, tekken.json or
    tokenizer.model before a GGUF file's own. None where there is none."""
    path = Path(path)
    found = read_tokenizer(path) if path.is_dir() else None
    if found is None and (file := gguf_file(path)) is not None:
        return _vocabulary(file).tokenizer()
    return found


def open_chat_template(path: str | Path) -> ChatTemplate | None:
    """Open the chat template of the model in the folder, or the GGUF file, `path`; None where there is none."""
    path = Path(path)
    found = ChatTemplate.from_folder(path) if path.is_dir() else None
    if found is None and (file := gguf_file(path)) is not None:
        vocabulary = _vocabulary(file)
        tokenizer = vocabulary.tokenizer()
        return None if tokenizer is None else vocabulary.chat_template(tokenizer)
    return found


def _vocabulary(file: Path) -> GGUFVocabulary:
    return GGUFVocabulary(GGUFFile(file).metadata, str(file))
