"""Build a tokenizer from Mistral's `tekken.json`: ranks of byte strings after a block of control tokens.

Source: mistral-common's tokens/tokenizers/tekken.py.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import tokenizers

from workbench.errors import WorkbenchError
from workbench.files import read_bytes, read_json_object
from workbench.prompt.tokenization.byte_level import (
    PreTokenizer,
    byte_level_tokenizer,
    in_byte_alphabet,
    merges_of_ranks,
)
from workbench.prompt.tokenization.sentencepiece_model import begin_with

TEKKEN_FILE = "tekken.json"
MAX_TEKKEN_BYTES = 256 << 20
MAX_ENTRIES = 10_000_000
# Control tokens of files that do not list them; these all have the same version.
CONTROL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(path: Path | str) -> tokenizers.Tokenizer:
    """Read a `tekken.json` and return its tokenizer, whose template puts `<s>` before a text.

    Raises:
        WorkbenchError: for a file that is damaged or not a tekken file.
    """
    values = read_json_object(read_bytes(path, MAX_TEKKEN_BYTES), str(path), max_bytes=MAX_TEKKEN_BYTES)
    try:
        return _tokenizer(values)
    except Exception as error:  # the library raises bare Exception for an invalid pattern
        raise WorkbenchError(f"{path}: is no tekken file, or damaged ({error}); fetch the file again") from None


def _tokenizer(values: dict[str, Any]) -> tokenizers.Tokenizer:
    config = values["config"]
    controls, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    if not 0 < controls < size <= MAX_ENTRIES:
        raise ValueError(f"{controls} control tokens in a vocabulary of {size}")
    listed = values.get("special_tokens") or [{"rank": i, "token_str": t} for i, t in enumerate(CONTROL_TOKENS)]
    names = {int(each["rank"]): str(each["token_str"]) for each in listed}
    entries = [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(controls)]
    ranks: dict[bytes, int] = {}
    for rank, each in enumerate(values["vocab"][: size - controls]):
        data = base64.b64decode(each["token_bytes"], validate=True)
        if each["rank"] != rank or data in ranks or not data:
            raise ValueError(f"entry {rank} of the vocabulary has another rank, occurs twice or is empty")
        ranks[data] = rank
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("a byte is missing")
    entries += map(in_byte_alphabet, ranks)
    if len(set(entries)) < len(entries):
        raise ValueError("an entry occurs twice")
    pre = PreTokenizer((str(config["pattern"]),), ignore_merges=True)
    inner = byte_level_tokenizer(entries, merges_of_ranks(ranks), pre, special=range(controls))
    begin = entries.index("<s>")
    inner.post_processor = begin_with("<s>", begin)
    return inner
