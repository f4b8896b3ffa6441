"""Cut the texts of a quality run, which are the same for the same seed: windows to score, prompts to continue,
identifiers to copy.

They are cut from held-out text of the demo model: modules of Python's standard library listed in the model's card.
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
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Workload
from workbench.measure.quality.corpora import read_corpus
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.settings import Count, Seed

BEGIN, END = "<|begin|>", "<|end|>"
# half of a corpus; "demo", or no files: the modules held out from the demo model's training; else text files
TextsSource = Literal["demo", "prose-shape", "prose-verdict", "code-shape", "code-verdict"] | tuple[str, ...]


@dataclass(frozen=True)
class HeldOutTexts:
    """Held-out texts by name. Modules whose bytes differ from those recorded in the model's card are left out."""

    texts: dict[str, str]
    num_listed: int

    @property
    def num_verified(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextWindow:
    """A window of one text. Tokens from index `first_scored` on are scored, and `num_bytes` is the number of bytes of
    their text."""

    ids: tuple[int, ...]
    first_scored: int
    num_bytes: int
    name: str


def held_out_modules(manifest: Path = DEMO_FOLDER / "corpus.json", library: Path | None = None) -> HeldOutTexts:
    """Return the held-out modules of the running Python, each verified by its SHA-256.

    Raises WorkbenchError if none is left, because another version of Python has other sources."""
    texts, listed = _modules("held_out", manifest, library, None)
    return HeldOutTexts(texts, listed)


def training_texts(max_bytes: int = 2**20) -> dict[str, str]:
    """Return texts that the demo models were trained on, by name: modules of Python's standard library, in the order of
    a hash of their names, up to `max_bytes` bytes in total.

    Raises WorkbenchError if the running Python has none of them."""
    return _modules("training", DEMO_FOLDER / "corpus.json", None, max_bytes)[0]


def _modules(
    side: Literal["held_out", "training"], manifest: Path, library: Path | None, max_bytes: int | None
) -> tuple[dict[str, str], int]:
    """Return the verified modules of one side of the split, and the number that the card lists."""
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
            "with that version, or pass your own text with --text"
        )
    return texts, len(listed)


def cut_windows(tokenizer: Tokenizer, texts: Mapping[str, str], context: int) -> list[TextWindow]:
    """Cut texts into windows of `context` + 1 tokens that overlap by half.

    Every token of a text but the first is scored in exactly one window. All but a text's first tokens are predicted
    from at least half a context."""
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
    """Draw `count` different windows of at least `min_tokens` tokens; the same for the same seed."""
    long = [window for window in windows if len(window.ids) >= min_tokens]
    if len(long) < count:
        raise WorkbenchError(
            f"{len(long)} windows of at least {min_tokens} tokens in these texts, but {count} are needed"
        )
    return random.Random(seed).sample(long, count)


def _ends(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after a text: the begin and end tokens of the demo models, else the begin token
    alone.
    """
    control = tokenizer.special_token_ids
    if BEGIN in control and END in control:
        return (control[BEGIN],), (control[END],)
    return tokenizer.bos_token_ids, ()


class HeldOutWorkload(Workload):
    """Continue prompts that are cut from texts outside the model's training data."""

    texts: TextsSource = "demo"
    prompts: Count = 8
    prompt_tokens: Count = 96
    seed: Seed = 0

    def draw_windows(self, runner: Runner, more_tokens: int = 0) -> tuple[Sequence[TextWindow], dict[str, Any]]:
        """Draw windows of a prompt and `more_tokens`, and describe their texts (WorkbenchError for a model without a
        tokenizer).
        """
        if runner.tokenizer is None:
            name = runner.config.model.name
            raise WorkbenchError(
                f"workload.kind {self.kind}: model {name!r} has no tokenizer, and the prompts are texts"
            )
        texts, about = read_texts(self.texts)
        length = self.prompt_tokens + more_tokens
        return sample_windows(cut_windows(runner.tokenizer, texts, length), self.prompts, self.seed, length), about


def read_texts(source: TextsSource) -> tuple[dict[str, str], dict[str, Any]]:
    """Return texts by name, and a description of their source."""
    if not source or source == "demo":
        modules = held_out_modules()
        return modules.texts, {"texts": "held-out modules", "known": modules.num_verified, "listed": modules.num_listed}
    if isinstance(source, str):
        return read_corpus(source)
    texts = {}
    for name in source:
        try:
            texts[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkbenchError(f"{name}: cannot be read as text ({type(error).__name__})") from None
    return texts, {"texts": "files", "known": len(texts), "listed": len(texts)}
