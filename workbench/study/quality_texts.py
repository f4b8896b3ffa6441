"""Texts of a quality run: windows to score, prompts to continue, identifiers to copy; the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.copying import Snippet, generate_snippets
from workbench.study.forced import ForcedText
from workbench.study.held_out import TextWindow, held_out_modules, sample_windows, cut_windows
from workbench.study.quality_workload import QualityWorkload

MIN_PROMPT_TOKENS = 16


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
        return [ForcedText(window.ids, window.first_scored, len(window.ids) - self.num_decoded) for window in self.windows]

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
