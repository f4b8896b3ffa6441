"""Read the tokenizer of a model's folder: tokenizer.json, Mistral's tekken.json, or sentencepiece's tokenizer.model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from workbench.errors import WorkbenchError
from workbench.files import read_bytes, read_json_object
from workbench.prompt.tokenization.sentencepiece_model import MODEL_FILE, read_model_file
from workbench.prompt.tokenization.tekken import TEKKEN_FILE, read_tekken
from workbench.prompt.tokenization.tokenizer import FILE, Tokenizer

CONFIG = "tokenizer_config.json"


def read_tokenizer(folder: Path | str) -> Tokenizer | None:
    """Read the tokenizer of a folder: `tokenizer.json`, Tekken's file or a SentencePiece model; None without these."""
    folder = Path(folder)
    if (folder / FILE).exists():
        return Tokenizer.from_file(folder / FILE)
    if (folder / TEKKEN_FILE).exists():
        return Tokenizer(read_tekken(folder / TEKKEN_FILE))
    if (folder / MODEL_FILE).exists():
        config = folder / CONFIG
        values = read_json_object(read_bytes(config), str(config)) if config.exists() else {}
        pieces = read_model_file(folder / MODEL_FILE)
        begin = values.get("add_bos_token")
        if begin is not None and not isinstance(begin, bool):
            raise WorkbenchError(f"{config}: add_bos_token is {begin!r}; it must be true or false")
        inner = (replace(pieces, bos_token_id=None) if begin is False else pieces).tokenizer()
        _add_tokens(inner, values, config)
        return Tokenizer(inner)
    return None


def _add_tokens(inner: tokenizers.Tokenizer, values: dict[str, Any], config: Path) -> None:
    """Add the further tokens of `added_tokens_decoder` in tokenizer_config.json (a template's marks), under their given
    ids.
    """
    listed: Any = values.get("added_tokens_decoder") or {}
    try:
        tokens = {int(id): each for id, each in listed.items()}
        flags = ("single_word", "lstrip", "rstrip", "special")
        for id in sorted(tokens):
            flag_values = {flag: bool(tokens[id].get(flag, False)) for flag in flags}
            token = AddedToken(str(tokens[id]["content"]), normalized=False, **flag_values)
            (inner.add_special_tokens if token.special else inner.add_tokens)([token])
            if inner.token_to_id(token.content) != id:
                raise WorkbenchError(
                    f"{config}: added_tokens_decoder gives {token.content!r} id {id}; after the tokens before it is "
                    f"{inner.token_to_id(token.content)}: use the files that were saved with this model"
                )
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        if isinstance(error, WorkbenchError):
            raise
        raise WorkbenchError(f"{config}: added_tokens_decoder is no table of tokens by id ({error})") from None
