"""Name tokens in log-probabilities: by text; by bytes if they are not valid text (as OpenAI does); or by id (as vLLM
does).
"""

from __future__ import annotations

from collections.abc import Iterable

from workbench.prompt.tokenization.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int, as_ids: bool = False) -> str:
    """Return the text of a single token; or its id, if ids are requested or the tokenizer has no such token."""
    if as_ids or tokenizer is None or not tokenizer.has(token_id):
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer | None, token_id: int, as_ids: bool = False) -> str:
    """Return the name of a token: its text; its bytes (`bytes:\\xe2`), if they are not valid text; or its id, if it has
    no bytes.
    """
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
    """Return the log-probabilities of the most likely tokens and of the sampled token, by name.

    If several tokens have the same text, the sampled token is named by it and the others by id.
    """
    chosen, named = token_name(tokenizer, token_id, as_ids), {}
    for other, value in {**dict(top), token_id: logprob}.items():
        name = token_name(tokenizer, other, as_ids)
        is_taken = other != token_id and (name == chosen or name in named)
        named[token_text(tokenizer, other, as_ids=True) if is_taken else name] = value
    return named
