"""Texts of a quality run: windows to score, prompts to continue, identifiers to copy; the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.copying import Snippet, snippets
from workbench.study.forced import Text
from workbench.study.held_out import Window, held_out_modules, sample, windows
from workbench.study.quality_workload import QualityWorkload

LEAST_PROMPT = 16


@dataclass(frozen=True)
class QualityTexts:
    """Texts of a quality run. `metadata` names their sources, for the record."""

    windows: Sequence[Window]
    prompts: Sequence[tuple[int, ...]]
    snippets: Sequence[Snippet]
    about: dict[str, Any]
    decode: int

    @classmethod
    def of(cls, work: QualityWorkload, tokenizer: Tokenizer, context: int) -> QualityTexts:
        """Build the texts of a workload for a model with this `context`. Raises WorkbenchError where they are too short
        or unreadable."""
        if (work.context or 0) > context:
            raise WorkbenchError(f"workload.context {work.context}: above the model's own, {context}")
        context = work.context or context
        texts, about = texts_of(work.texts)
        if work.decode + 2 > context:
            raise WorkbenchError(f"workload.decode {work.decode}: must be below the model's context of {context}")
        least = max(work.decode + 2, context // 2)
        every = windows(tokenizer, texts, context - 1)
        scored = sample(every, work.windows, work.seed, least)
        length = max(1, min(context // 2, context - work.greedy_tokens))
        beginnings = sample(every, work.greedy_prompts, work.seed + 1, LEAST_PROMPT)
        asked: Sequence[Snippet] = ()
        if work.copying is not None:
            tokens = context * 9 // 10 if work.copying.tokens == "auto" else work.copying.tokens
            if tokens >= context:
                raise WorkbenchError(
                    f"workload.copying.tokens {tokens}: must be below the model's context of {context}"
                )
            asked = snippets(tokenizer, work.copying.names, tokens, work.copying.depths, work.seed)
        about |= {"windows": sorted({window.name for window in scored}), "context": context}
        return cls(scored, [window.ids[:length] for window in beginnings], asked, about, work.decode)

    @property
    def scored(self) -> list[Text]:
        """Return the windows to score; the last tokens of each are decoded one at a time."""
        return [Text(window.ids, window.first, len(window.ids) - self.decode) for window in self.windows]

    @property
    def scored_bytes(self) -> int:
        return sum(window.bytes for window in self.windows)


def texts_of(files: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return texts by name, and their sources: the held-out modules where no files are given."""
    if not files:
        modules = held_out_modules()
        return modules.texts, {"texts": "held-out modules", "known": modules.known, "listed": modules.listed}
    texts = {}
    for name in files:
        try:
            texts[name] = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WorkbenchError(f"{name}: cannot be read as text ({type(error).__name__})") from None
    return texts, {"texts": "files", "known": len(texts), "listed": len(texts)}
