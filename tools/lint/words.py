"""Check that names, docstrings, comments, messages and Markdown use the field's words, as in the shared glossary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools.lint.tree import ROOT, texts

# Words that this project once used for the field's, each with what replaced it (shared glossary). Every text is cut
# into words at underscores and capitals: identifiers, docstrings, comments, messages, Markdown.
PRIVATE_WORDS = {
    "lane": "backend",
    "told": "emitted, reported",
    "nobody": "no request, no caller",
    "somebody": "a request, a caller",
    "anybody": "any caller, any process",
    "everybody": "every request, every caller",
    "whoever": "the request that",
    "wishes": "SchedulerDecision",
    "wished": "scheduled",
    "strays": "errors",
    "granting": "allocate",
    "unshare": "copy_on_write",
    "obstacle": "blocked_by",
    "seats": "slots_needed",
    "heir": "child",
    "heirs": "children",
    "mate": "beam",
    "mates": "beams, SequenceGroup",
    "follower": "child",
    "followers": "children",
    "leader": "parent",
    "spared": "starvation_limit",
    "overdue": "past the starvation limit",
    "holdings": "KVCacheManager",
    "rooms": "CPU pages: cpu_pools; code: packages",
    "company": "batch composition",
    "companion": "another request",
    "companions": "other requests",
    "coupled": "common random numbers",
    "foretold": "predicted",
    "crossings": "break-even points",
    "moods": "contention",
    "surroundings": "environment",
    "teller": "event adapter",
    "chooser": "Sampler",
    "knobs": "settings form",
    "pulse": "throttle",
}
# The same for names that are words of English, or mean something else in other cases: as they are written.
PRIVATE_PATTERNS = {
    r"(?i:set[-_ ]?backs?)(?![a-z])|SetBacks?": "preempt",
    r"\bServed\b": "Sequence",
    r"\bHeldBack\b": "DeferInterrupts",
    r"\blet_through\b": "allow",
    r"\bLookupDrafts\b": "PromptLookupProposer",
    r"\bRowsExecutor\b": "TokenParallelExecutor",
    r"\bCapturedExecutor\b": "CudaGraphExecutor",
    r"\bfitted_to\b": "select_backend",
    r"\bafter_sum\b": "add_and_norm",
    r"\bown_parts\b": "custom",
    r"\bturn_of\b": "apply_rotary",
    r"\bLatentAttention\b": "MLA",
    r"\b_?(?:FEW|MOST|ROOM|SPARE|DEAR|TOLD|HEARD)(?:_[A-Z]+)*\b": "a name with its unit: MAX_ROWS_PER_KERNEL",
    r"(?i:\bkept promises?\b)": "SLO attainment",
}
# Files that may hold such a word, with the words ("*": all).
EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "experiments/LOG.md": ("*",),  # the log of past days is not rewritten
    "tools/lint/words.py": ("*",),  # the list itself
    "tests/test_lint.py": ("*",),  # plants them
    "tests/measure/test_intact.py": ("unshare",),  # a command of Linux
    "workbench/widgets/attention/view.py": ("follower",),  # follows a generation
    "compiled_kernels/triton_code/ahead_of_time.py": ("knobs",),  # Triton's module
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PATTERN = re.compile("|".join(f"({pattern})" for pattern in PRIVATE_PATTERNS))


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield each private word that no exception allows, and each exception that its file no longer needs."""
    read = texts(root)
    for path, text in read.items():
        allowed = EXCEPTIONS.get(path, ())
        for line, word, better in private_words(text) if "*" not in allowed else ():
            if word not in allowed:
                yield f"{path}:{line}: {word!r} is no word of the field; say {better}"
    for path, allowed in EXCEPTIONS.items():
        held = {word for _, word, _ in private_words(read.get(path, ""))}
        if not held or not held >= {*allowed} - {"*"}:
            yield f"tools/lint/words.py:1: {path} holds no such word: {', '.join(allowed)}; take its row out"


def private_words(text: str) -> list[tuple[int, str, str]]:
    """Return (line, word, replacement) for each private word in a text, in an identifier or in a sentence."""
    found = []
    if not PRIVATE_WORDS.keys().isdisjoint(map(str.lower, set(_WORD.findall(text)))):
        for match in _WORD.finditer(text):
            if better := PRIVATE_WORDS.get(match[0].lower()):
                found.append((text.count("\n", 0, match.start()) + 1, match[0].lower(), better))
    for match in _PATTERN.finditer(text):
        better = list(PRIVATE_PATTERNS.values())[(match.lastindex or 1) - 1]
        found.append((text.count("\n", 0, match.start()) + 1, match[0], better))
    return sorted(found)
