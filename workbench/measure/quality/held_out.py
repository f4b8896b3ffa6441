"""Texts of a quality run, the same for the same seed: windows to score, prompts to continue, identifiers to copy.

They are cut from held-out text for the demo model: modules of Python's standard library listed in the model's card.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from workbench.engine.loaded_model import DEMO_FOLDER
from workbench.errors import WorkbenchError
from workbench.experiment.settings import QualityWorkload
from workbench.measure.quality.copying import Snippet, generate_snippets
from workbench.measure.quality.teacher_forcing import ForcedText
from workbench.prompt.tokenization.tokenizer import Tokenizer

BEGIN, END = "<|begin|>", "<|end|>"
MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class HeldOutTexts:
    """Held-out texts by name. Modules whose bytes differ from those of the card are left out."""

    texts: dict[str, str]
    num_listed: int

    @property
    def num_verified(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextWindow:
    """A window of one text. Tokens from index `first_scored` on are scored; they have `num_bytes` bytes of text."""

    ids: tuple[int, ...]
    first_scored: int
    num_bytes: int
    name: str


def held_out_modules(manifest: Path = DEMO_FOLDER / "corpus.json", library: Path | None = None) -> HeldOutTexts:
    """Return the held-out modules of this Python, each verified by its SHA-256.

    Raises WorkbenchError where none is left: another version of Python has other sources."""
    texts, listed = _modules("held_out", manifest, library, None)
    return HeldOutTexts(texts, listed)


def training_texts(max_bytes: int = 2**20) -> dict[str, str]:
    """Return texts that the demo models were trained on, by name: modules of Python's standard library, in the order of
    a hash of their names, until `max_bytes` bytes are full.

    Raises WorkbenchError where this Python has none of them."""
    return _modules("training", DEMO_FOLDER / "corpus.json", None, max_bytes)[0]


def _modules(
    side: Literal["held_out", "training"], manifest: Path, library: Path | None, max_bytes: int | None
) -> tuple[dict[str, str], int]:
    """Return the verified modules of one side of the split, and how many the card lists."""
    library = library or Path(sysconfig.get_path("stdlib"))
    corpus = json.loads(manifest.read_text())
    listed = [entry for entry in corpus["files"] if entry["side"] == side]
    if max_bytes is not None:
        listed.sort(key=lambda entry: hashlib.sha256(entry["name"].encode()).digest())
    texts, left = {}, max_bytes
    for entry in listed:
        if left is not None:
            if entry["bytes"] > left:
                continue
            left -= entry["bytes"]
        path = library / entry["name"]
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() == entry["sha256"]:
            texts[entry["name"]] = content.decode("utf-8")
    if not texts:
        raise WorkbenchError(
            f"none of the {len(listed)} {side.replace('_', '-')} modules of Python {corpus['python']} is here; run "
            "with that version, or give a text of your own with --text"
        )
    return texts, len(listed)


def cut_windows(tokenizer: Tokenizer, texts: Mapping[str, str], context: int) -> list[TextWindow]:
    """Cut texts into windows of `context` + 1 tokens, half of them new.

    Every token but the first of a text is scored in exactly one window. Only a text's first tokens are predicted from
    less than half a context."""
    size = cache(lambda token: len(tokenizer.token_bytes(token)))
    return [window for name, text in sorted(texts.items()) for window in _cut(tokenizer, name, text, context, size)]


def _cut(tokenizer: Tokenizer, name: str, text: str, context: int, size: Callable[[int], int]) -> Iterator[TextWindow]:
    begin, end = _ends(tokenizer)
    body = tokenizer.encode(text)
    ids = (*begin, *body, *end)
    sizes = [*[0] * len(begin), *map(size, body), *[0] * len(end)]
    known = max(1, len(begin))
    for start in range(0, len(ids) - 1, context // 2):
        cut = ids[start : start + context + 1]
        if known < start + len(cut):
            yield TextWindow(cut, known - start, sum(sizes[known : start + len(cut)]), name)
        known = start + len(cut)
        if known == len(ids):
            return


def sample_windows(windows: Sequence[TextWindow], count: int, seed: int, min_tokens: int = 0) -> Sequence[TextWindow]:
    """Draw `count` windows of at least `min_tokens` tokens without repetition; the same for the same seed."""
    long = [window for window in windows if len(window.ids) >= min_tokens]
    if len(long) < count:
        raise WorkbenchError(
            f"{len(long)} windows of at least {min_tokens} tokens in these texts, {count} are asked for"
        )
    return random.Random(seed).sample(long, count)


def _ends(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after a text; a model in use gets its tokenizer's own begin token."""
    control = tokenizer.special_token_ids
    if BEGIN in control and END in control:
        return (control[BEGIN],), (control[END],)
    return tokenizer.bos_token_ids, ()


@dataclass(frozen=True)
class QualityTexts:
    """Texts of a quality run. `metadata` names their sources, for the record."""

    windows: Sequence[TextWindow]
    prompts: Sequence[tuple[int, ...]]
    snippets: Sequence[Snippet]
    metadata: dict[str, Any]
    num_decoded: int

    @classmethod
    def from_workload(cls, workload: QualityWorkload, tokenizer: Tokenizer, context: int) -> QualityTexts:
        """Build the texts of a workload for a model with this `context`. Raises WorkbenchError where they are too short
        or unreadable."""
        if (workload.context or 0) > context:
            raise WorkbenchError(f"workload.context {workload.context}: above the model's own, {context}")
        context = workload.context or context
        texts, about = read_texts(workload.texts)
        if workload.decode + 2 > context:
            raise WorkbenchError(f"workload.decode {workload.decode}: must be below the model's context of {context}")
        least = max(workload.decode + 2, context // 2)
        every = cut_windows(tokenizer, texts, context - 1)
        scored = sample_windows(every, workload.windows, workload.seed, least)
        length = max(1, min(context // 2, context - workload.greedy_tokens))
        beginnings = sample_windows(every, workload.greedy_prompts, workload.seed + 1, MIN_PROMPT_TOKENS)
        asked: Sequence[Snippet] = ()
        if workload.copying is not None:
            tokens = context * 9 // 10 if workload.copying.tokens == "auto" else workload.copying.tokens
            if tokens >= context:
                raise WorkbenchError(
                    f"workload.copying.tokens {tokens}: must be below the model's context of {context}"
                )
            asked = generate_snippets(tokenizer, workload.copying.names, tokens, workload.copying.depths, workload.seed)
        about |= {"windows": sorted({window.name for window in scored}), "context": context}
        return cls(scored, [window.ids[:length] for window in beginnings], asked, about, workload.decode)

    @property
    def scored(self) -> list[ForcedText]:
        """Return the windows to score; the last tokens of each are decoded one at a time."""
        return [
            ForcedText(window.ids, window.first_scored, len(window.ids) - self.num_decoded) for window in self.windows
        ]

    @property
    def scored_bytes(self) -> int:
        return sum(window.num_bytes for window in self.windows)


def read_texts(files: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return texts by name, and their sources: the held-out modules where no files are given."""
    if not files:
        modules = held_out_modules()
        return modules.texts, {"texts": "held-out modules", "known": modules.num_verified, "listed": modules.num_listed}
    texts = {}
    for name in files:
        try:
            texts[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkbenchError(f"{name}: cannot be read as text ({type(error).__name__})") from None
    return texts, {"texts": "files", "known": len(texts), "listed": len(texts)}
