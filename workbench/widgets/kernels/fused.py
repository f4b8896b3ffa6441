"""Mark with letters the lines of a stage that became one kernel or one loop nest.

On the backend inductor a letter means the same loop in every stage: its scheduler reports the operations of each.
Other compilers do not report them; letters count operations of linalg, loops and whole kernels of one stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.widgets.kernels.inductor_loops import mark_loops
from workbench.widgets.kernels.marked import LETTERS, FusedGroup, FusionMarks

LINALG = re.compile(r"^\s*(?:%\S+ = )?linalg\.(?!yield)(\w+)")
LOOP = re.compile(r"^\s*(?:%\S+ = )?(?:scf\.(?:for|forall|parallel)|affine\.for)\b")
INNER = re.compile(
    r"\b((?:arith|math)\.(?!constant)\w+|vector\.(?:reduction|multi_reduction|contract|outerproduct|fma))"
)
KERNEL = re.compile(r"^(?:#|//|;) (.+: \w+) sm_\d+ \((.*)$")


def mark_fusion(backend: str, stage: str, text: str, fusion: Mapping[str, Any] | None = None, graph: str = "") -> FusionMarks:
    """The groups of one stage's text. `fusion` is what the backend inductor tells of itself, `graph` its stage
    `post_grad`, by whose comments the lines of earlier graphs are found."""
    lines = text.split("\n")
    if backend == "inductor":
        return mark_loops(stage, lines, fusion, graph) if fusion else FusionMarks()
    if backend == "triton":
        return _sections(lines)
    if backend == "mlir" and stage in STRUCTURED:
        return _blocks(lines, *STRUCTURED[stage])
    return FusionMarks()


STRUCTURED = {
    "linalg": (LINALG, "operation of linalg"),
    "transformed": (LOOP, "loop nest"),
    "bufferized": (LOOP, "loop nest"),
    "vector": (LOOP, "loop nest"),
}


def summarize_fusion(backend: str, texts: Mapping[str, str], fusion: Mapping[str, Any] | None) -> str:
    """Summarize in one line how many operations became how many kernels or loops."""
    if backend == "inductor" and fusion:
        graph = texts.get("decomposed", "")
        nests = sum(len(kernel["fused"]) for kernel in fusion["kernels"])
        counts = [
            (sum(1 for line in graph.split("\n") if "torch.ops." in line), "operation"),
            (len(fusion["nodes"]), "loop before fusion"),
            (nests, "loop nest"),
            (len(fusion["kernels"]), "kernel"),
        ]
    elif backend == "mlir":
        counts = [(sum(1 for line in texts.get("torch", "").split("\n") if "torch.aten." in line), "torch operation")]
        found = [
            (mark_fusion(backend, name, texts[name]).groups, word) for name, (_, word) in STRUCTURED.items() if name in texts
        ]
        counts += [(len(groups), word) for groups, word in found if groups][:2]
        counts.append((1, "function"))
    elif backend == "triton":
        counts = [(len(_sections(texts.get("source", "").split("\n")).groups), "kernel written by hand")]
    else:
        return "as written: every operation of torch is a kernel of its own"
    return " → ".join(_count_text(count, word) for count, word in counts if count)


def _sections(lines: Sequence[str]) -> FusionMarks:
    groups: list[FusedGroup] = []
    letters: dict[int, str] = {}
    for number, line in enumerate(lines):
        if found := KERNEL.match(line):
            letter = LETTERS[len(groups) % len(LETTERS)]
            groups.append(FusedGroup(letter, f"kernel {found.group(1)}", found.group(2)))
        if groups and line.strip():
            letters[number] = groups[-1].letter
    return FusionMarks(tuple(groups), letters)


def _blocks(lines: Sequence[str], begins: re.Pattern[str], word: str) -> FusionMarks:
    """Operations with regions of their own, outermost ones, from their first line to the brace that closes them."""
    groups: list[FusedGroup] = []
    letters: dict[int, str] = {}
    end, held = "", []
    for number, line in enumerate(lines):
        first = not end and begins.match(line)
        if first:
            letter = LETTERS[len(groups) % len(LETTERS)]
            groups.append(FusedGroup(letter, f"{word} {len(groups) + 1}", ""))
            end, held = line[: len(line) - len(line.lstrip())] + "}", []
        if not end:
            continue
        letters[number] = groups[-1].letter
        held += INNER.findall(line)
        if (first and not line.rstrip().endswith("{")) or line.startswith(end):
            description = ", ".join(dict.fromkeys(held)) or first and first.group(0).strip() or "no arithmetic"
            groups[-1], end = replace(groups[-1], description=description), ""
    return FusionMarks(tuple(groups), letters)


def _count_text(count: int, word: str) -> str:
    if count == 1:
        return f"1 {word}"
    first, _, rest = word.partition(" ")
    if first in ("operation", "kernel", "loop") and rest.startswith(("of", "before", "written")):
        return f"{count} {first}s {rest}"
    return f"{count} {word}s"
