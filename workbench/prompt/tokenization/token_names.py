"""Name tokens in log-probabilities: by text, as OpenAI by their bytes where those are no text, or as vLLM by id."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.prompt.tokenization.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int, as_ids: bool = False) -> str:
    """Return a token's text by itself; its id where asked for, or where the tokenizer has none of it."""
    if as_ids or tokenizer is None or not tokenizer.has(token_id):
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer | None, token_id: int, as_ids: bool = False) -> str:
    """Return a token's text, its bytes (`bytes:\\xe2`) where they are no text, or its id where it has none."""
    raw = tokenizer.token_bytes(token_id) if tokenizer is not None and tokenizer.has(token_id) and not as_ids else b""
    try:
        return raw.decode() or token_text(tokenizer, token_id, as_ids=True)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in raw)


def top_by_name(
    tokenizer: Tokenizer | None,
    token_id: int,
    logprob: float,
    top: Iterable[tuple[int, float]],
    as_ids: bool = False,
) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens and of the token in their place, by name.

    A vocabulary may have several tokens of one text: the token itself has it as its name, the others have their ids.
    """
    chosen, named = token_name(tokenizer, token_id, as_ids), {}
    for other, value in {**dict(top), token_id: logprob}.items():
        name = token_name(tokenizer, other, as_ids)
        is_taken = other != token_id and (name == chosen or name in named)
        named[token_text(tokenizer, other, as_ids=True) if is_taken else name] = value
    return named
