"""Write a tokenizer as GGUF keys `tokenizer.ggml.*` for llama.cpp: the inverse of gguf_vocabulary.

Two kinds are supported: byte-level BPE with a split pattern that llama.cpp has a name for, and sentencepiece's BPE.
Source: convert_hf_to_gguf.py and src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.tokenization.byte_level import PRE_TOKENIZERS
from workbench.prompt.tokenization.gguf_vocabulary import KEYS, WHOLE_KEY, GGUFVocabulary
from workbench.prompt.tokenization.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieces,
)
from workbench.prompt.tokenization.tokenizer import FALLBACK, Tokenizer

BESIDE = {"lstrip": "spaces before it", "rstrip": "spaces after it", "single_word": "whole words alone"}
NFC_NOTE = "llama.cpp does not compose characters first (NFC)"
PREFIX_NOTE = "llama.cpp puts a space before a text that begins with one too, and after control tokens"
SYMBOL_NOTE = "llama.cpp puts a space after defined symbols too"
PREFIX = {"type": "Prepend", "prepend": SPACE}
MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def vocabulary_metadata(tokenizer: Tokenizer, rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return (GGUF keys of a tokenizer with their values, notes on differences in llama.cpp's behaviour).

    If reading the keys back does not give this tokenizer, its tokenizer.json is stored under a key too.

    Args:
        tokenizer: the tokenizer to write.
        rows: rows of the model's embedding; ids without an entry get placeholder entries.

    Raises:
        WorkbenchError: names the part of the tokenizer that has no key in llama.cpp.
    """
    state = json.loads(tokenizer.to_json())
    if state["model"]["type"] != "BPE":
        raise WorkbenchError(f"its model is {state['model']['type']}; only BPE is supported")
    if len(tokenizer.bos_token_ids) > 1:
        raise WorkbenchError(f"it puts {len(tokenizer.bos_token_ids)} tokens before a text; GGUF stores only one")
    if tokenizer.vocab_size > rows:
        raise WorkbenchError(f"it has {tokenizer.vocab_size} ids; the model's embedding has {rows} rows")
    entries, kinds = _entries(tokenizer, state, rows)
    rule = tokenizer.byte_rule
    if rule is None:
        raise WorkbenchError("a token's text depends on the tokens around it")
    metadata, notes = (_byte_level if rule.alphabet else _sentencepiece)(state, entries, kinds)
    metadata |= {
        f"{KEYS}.tokens": entries,
        f"{KEYS}.token_type": kinds,
        f"{KEYS}.add_bos_token": bool(tokenizer.bos_token_ids),
    }
    begin = {f"{KEYS}.bos_token_id": id for id in tokenizer.bos_token_ids}
    again = GGUFVocabulary(metadata | begin, "what was written").tokenizer()
    if again is None or _compared(again) != _compared(tokenizer):
        metadata[WHOLE_KEY] = tokenizer.to_json()
    return metadata | begin, notes


def _entries(tokenizer: Tokenizer, state: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the entries and their kinds by id; ids without an entry get placeholders."""
    entries = [tokenizer.id_to_token(id) if id < tokenizer.vocab_size else "" for id in range(rows)]
    kinds, taken = [NORMAL] * rows, set(entries)
    for id, entry in enumerate(entries):
        if not entry:
            entry = f"[PAD{id}]"
            while entry in taken:
                entry = f"[{entry}]"
            entries[id], kinds[id] = entry, UNUSED
    for token in state["added_tokens"]:
        for flag, what in BESIDE.items():
            if token[flag]:
                raise WorkbenchError(f"its token {token['content']!r} takes {what} ({flag})")
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    return entries, kinds


def _byte_level(state: Mapping[str, Any], entries: list[str], kinds: list[int]) -> tuple[dict[str, Any], list[str]]:
    model = state["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise WorkbenchError("its entries have a prefix or suffix that shows their place in a word")
    rule = {"normalizer": state["normalizer"], "words": _words(state["pre_tokenizer"])}
    name = next((name for name, known in _named_rules().items() if known == (rule, model["ignore_merges"])), None)
    if name is None:
        raise WorkbenchError("GGUF has no name for the pattern that splits its words")
    merges = [" ".join(pair) for pair in _merges(state)]
    notes = [NFC_NOTE] if PRE_TOKENIZERS[name].composed else []
    return {f"{KEYS}.model": "gpt2", f"{KEYS}.pre": name, f"{KEYS}.merges": merges}, notes


def _named_rules() -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the split rules by name, in the form of tokenizer.json."""
    rules = {}
    for name, pre in PRE_TOKENIZERS.items():
        words = _words(json.loads(pre.steps().__getstate__()))
        rules[name] = ({"normalizer": {"type": "NFC"} if pre.composed else None, "words": words}, pre.ignore_merges)
    return rules


def _words(step: Any) -> list[dict[str, Any]]:
    """Return the steps that split words, without settings that only affect offsets."""
    return [{key: value for key, value in each.items() if key != "trim_offsets"} for each in _steps(step)]


def _steps(step: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder: itself, or the members of a sequence."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = next(value for value in step.values() if isinstance(value, list))
    return [each for one in inner for each in _steps(one)]


def _sentencepiece(state: Mapping[str, Any], entries: list[str], kinds: list[int]) -> tuple[dict[str, Any], list[str]]:
    model = state["model"]
    if not model["byte_fallback"]:
        raise WorkbenchError("it has no bytes for characters that its vocabulary lacks (byte_fallback)")
    prefix, notes = _space_prefix(state)
    for id, entry in enumerate(entries):
        if entry == model["unk_token"]:
            kinds[id] = UNKNOWN
        elif kinds[id] == NORMAL and FALLBACK.fullmatch(entry):
            kinds[id] = BYTE
    merges = _merges(state)
    if model["ignore_merges"]:  # symbols that are matched anywhere are pieces without a merge
        made = {left + right for left, right in merges}
        for id, entry in enumerate(entries):
            if kinds[id] == NORMAL and len(entry) > 1 and entry not in made:
                kinds[id] = USER_DEFINED
                notes = [SYMBOL_NOTE] if prefix else []
    scores = _scores(entries, kinds, merges)
    for id, kind in enumerate(kinds):
        if kind == USER_DEFINED:
            entries[id] = entries[id].replace(SPACE, " ")
    return {
        f"{KEYS}.model": "llama", f"{KEYS}.pre": "default", f"{KEYS}.scores": scores,
        f"{KEYS}.add_space_prefix": prefix,
    }, notes  # fmt: skip


def _space_prefix(state: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a space is put before a text, and notes on differences in llama.cpp's behaviour."""
    normalizer, words = _steps(state["normalizer"]), _steps(state["pre_tokenizer"])
    is_whole = state["model"]["ignore_merges"] and [each["type"] for each in words] == ["Split"]
    if normalizer in ([PREFIX, MARKS], [MARKS]) and (is_whole or words in ([], _gemma_words())):
        return normalizer[0] == PREFIX, []
    if not normalizer and [each["type"] for each in words] == ["Metaspace"]:
        step = words[0]
        if step["replacement"] == SPACE and not step.get("split", True):
            prefix = step["prepend_scheme"] != "never"
            return prefix, [PREFIX_NOTE] if prefix else []
    raise WorkbenchError("it changes a text in more ways than by marks for its spaces and its beginning")


def _gemma_words() -> list[dict[str, Any]]:
    """Return the split at spaces of Gemma's files; it never applies because marks have replaced all spaces."""
    return [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]


def _merges(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a model's merges as pairs; older files join the two by a space."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in state["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _scores(entries: list[str], kinds: Sequence[int], merges: list[tuple[str, str]]) -> list[float]:
    """Return piece scores that give these merges in sentencepiece, which first merges to the piece with the highest
    score.

    Pieces with interleaved merges get the same score.

    Raises:
        WorkbenchError: if no scores give these merges.
    """
    ids = {entry: id for id, entry in enumerate(entries)}
    spelled = [pair for pair in merges if kinds[ids[pair[0] + pair[1]]] == NORMAL]
    last = {left + right: at for at, (left, right) in enumerate(spelled)}
    scores, until, level = [0.0] * len(entries), -1, 0
    for at, (left, right) in enumerate(spelled):
        if at > until:
            level += 1
        until = max(until, last[left + right])
        scores[ids[left + right]] = -float(level)
    again = SentencePieces(entries, scores, list(kinds)).merges(ids)
    if set(again) != set(spelled):
        pair = next(iter(set(again) ^ set(spelled)))
        raise WorkbenchError(f"its merges do not follow from a score for each piece: {' + '.join(pair)!r}")
    return scores


def _compared(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parts of a tokenizer that determine the ids of a text, without unreachable entries."""
    state = json.loads(tokenizer.to_json())
    model, added = state["model"], state["added_tokens"]
    return {
        "merges": _merges(state),
        "rules": [model[key] for key in ("ignore_merges", "byte_fallback")],
        "normalizer": _steps(state["normalizer"]),
        "words": _words(state["pre_tokenizer"]),
        "decoder": tokenizer.byte_rule,
        "added": [[each[key] for key in ("id", "content", "special")] for each in added],
        "begin": tokenizer.bos_token_ids,
    }
