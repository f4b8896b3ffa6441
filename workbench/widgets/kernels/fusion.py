"""Mark, with a letter for each, the lines of a stage that became the same kernel or loop nest.

For the backend inductor a letter means the same loop nest in every stage, because its scheduler reports the operations
of each. Other compilers do not: there the letters count linalg operations, loop nests or kernels within one stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LINALG = re.compile(r"^\s*(?:%\S+ = )?linalg\.(?!yield)(\w+)")
LOOP = re.compile(r"^\s*(?:%\S+ = )?(?:scf\.(?:for|forall|parallel)|affine\.for)\b")
INNER = re.compile(
    r"\b((?:arith|math)\.(?!constant)\w+|vector\.(?:reduction|multi_reduction|contract|outerproduct|fma))"
)
KERNEL = re.compile(r"^(?:#|//|;) (.+: \w+) sm_\d+ \((.*)$")
STRUCTURED = {
    "linalg": (LINALG, "operation of linalg"),
    "transformed": (LOOP, "loop nest"),
    "bufferized": (LOOP, "loop nest"),
    "vector": (LOOP, "loop nest"),
}
OPERATION = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")
SOURCE_COMMENT = re.compile(r"^\s*# File: ")
NODE_NAMES = re.compile(r"^(?:class )?((?:op\d+_?)+)")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def mark_fusion(
    backend: str, stage: str, text: str, fusion: Mapping[str, Any] | None = None, graph: str = ""
) -> FusionMarks:
    """Return the fused groups in one stage's text, with the letters of its lines.

    For inductor, `fusion` is the report of its scheduler and `graph` the text of its stage `post_grad`; the source
    comments of the latter identify lines of the earlier graph."""
    lines = text.split("\n")
    if backend == "inductor":
        return mark_loops(stage, lines, fusion, graph) if fusion else FusionMarks()
    if backend == "triton":
        return _sections(lines)
    if backend == "mlir" and stage in STRUCTURED:
        return _blocks(lines, *STRUCTURED[stage])
    return FusionMarks()


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
            (mark_fusion(backend, name, texts[name]).groups, word)
            for name, (_, word) in STRUCTURED.items()
            if name in texts
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
    """Mark the outermost operations that match `begins`, each from its first line to its closing brace."""
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


def mark_loops(stage: str, lines: Sequence[str], fusion: Mapping[str, Any], graph: str) -> FusionMarks:
    """Return the loop nests of a stage of inductor, with the letters of its lines; `fusion` and `graph` are as in
    `mark_fusion`."""
    origins = {node["name"]: node["origins"] for node in fusion["nodes"]}
    loops = {node["name"]: node["iteration"] for node in fusion["nodes"]}
    groups, homes, kernels = [], {}, {}
    for kernel in fusion["kernels"]:
        for number, parts in enumerate(kernel["fused"]):
            letter = LETTERS[len(groups) % len(LETTERS)]
            inside = sorted({name for part in parts for name in origins.get(part, ())})
            over = " and ".join(dict.fromkeys(each for part in parts for each in loops.get(part, ())))
            name = f"{kernel['kernel']}, loop nest {number + 1} of {len(kernel['fused'])}"
            groups.append(FusedGroup(letter, name, f"{', '.join(inside) or '-'}; over {over or 'nothing'}"))
            homes |= dict.fromkeys(parts, letter)
            kernels[kernel["kernel"]] = kernels.get(kernel["kernel"], "") + letter
    by_operation: dict[str, str] = {}
    for part, letter in homes.items():
        for name in origins.get(part, ()):
            by_operation[name] = "".join(sorted({*by_operation.get(name, ""), letter}))
    found: Iterable[str]
    if stage in ("decomposed", "post_grad"):
        found = (by_operation.get(_operation(line), "") for line in lines)
    elif stage == "graph":
        found = _by_place(lines, graph.split("\n"), by_operation)
    elif stage in ("ir", "fused_ir", "fusion"):
        found = _by_node(lines, homes, kernels)
    else:
        found = _by_kernel(lines, kernels)
    return FusionMarks(tuple(groups), {n: letters for n, letters in enumerate(found) if letters})


def _operation(line: str) -> str:
    found = OPERATION.match(line)
    return found.group(1) if found else ""


def _by_place(lines: Sequence[str], later: Sequence[str], by_operation: Mapping[str, str]) -> Iterable[str]:
    """Yield the letters of an early graph's lines: those of the later graph's lines below the same source comment."""
    known: dict[str, str] = {}
    place = ""
    for line in later:
        place = line.strip() if SOURCE_COMMENT.match(line) else place
        known[place] = "".join(sorted({*known.get(place, ""), *by_operation.get(_operation(line), "")}))
    place = ""
    for line in lines:
        place = line.strip() if SOURCE_COMMENT.match(line) else place
        yield known.get(place, "") if place and OPERATION.match(line) else ""


def _by_node(lines: Sequence[str], homes: Mapping[str, str], kernels: Mapping[str, str]) -> Iterable[str]:
    letter = ""
    for line in lines:
        found = NODE_NAMES.match(line.removeprefix("  loop nest "))
        if found:
            letter = homes.get(found.group(1).split("_")[0], "")
        elif line and not line[0].isspace():
            letter = kernels.get(line, letter if line[0] in "])" or "_layout" in line else "")
        yield letter if line.strip() else ""


def _by_kernel(lines: Sequence[str], kernels: Mapping[str, str]) -> Iterable[str]:
    """Yield the letters of each line of kernel sources, by loop nest if each has a block, and of calls."""
    whole, nests, number = "", "", 0
    for line in lines:
        named = next((name for name in kernels if name and re.search(rf"\b{re.escape(name)}\b", line)), None)
        if named is not None and ("r'''" in line or line.startswith(("// ", "# "))):
            whole, number = kernels[named], 0
            yield whole
            continue
        if line.startswith("    {"):
            nests = whole[number : number + 1]
        yield nests or whole or (kernels[named] if named is not None else "")
        if line.startswith("    }") and nests:
            nests, number = "", number + 1
        if line.startswith("'''") or line == "}":
            whole = ""


@dataclass(frozen=True)
class FusedGroup:
    """A group of operations that were fused: `letter` marks its lines, `description` lists the operations."""

    letter: str
    name: str
    description: str


@dataclass(frozen=True)
class FusionMarks:
    """The fused groups of a text, and the `letters` of each line by its index: several if an operation went into
    several groups."""

    groups: tuple[FusedGroup, ...] = ()
    letters: Mapping[int, str] | None = None

    def letters_of_line(self, line: int) -> str:
        return (self.letters or {}).get(line, "")
