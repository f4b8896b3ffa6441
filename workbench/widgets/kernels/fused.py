"""Which lines of a stage became one kernel or one loop nest, marked with letters.

On the lane inductor letters stand for the same loops in every stage: the scheduler tells which operations are in each.
Other compilers do not tell, and letters count what a stage itself has: operations of linalg, loops, whole kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPERATION = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")
WHERE = re.compile(r"^\s*# File: ")
NODES = re.compile(r"^(?:class )?((?:op\d+_?)+)")
LINALG = re.compile(r"^\s*(?:%\S+ = )?linalg\.(?!yield)(\w+)")
LOOP = re.compile(r"^\s*(?:%\S+ = )?(?:scf\.(?:for|forall|parallel)|affine\.for)\b")
INNER = re.compile(
    r"\b((?:arith|math)\.(?!constant)\w+|vector\.(?:reduction|multi_reduction|contract|outerproduct|fma))"
)
KERNEL = re.compile(r"^(?:#|//|;) (.+: \w+) sm_\d+ \((.*)$")


@dataclass(frozen=True)
class Group:
    """What was joined: `letter` marks its lines, `name` says what it is, `told` what it holds."""

    letter: str
    name: str
    told: str


@dataclass(frozen=True)
class Marked:
    """`letters` of each line by its number, from 0 on: none, one, or several where an operation went into several."""

    groups: tuple[Group, ...] = ()
    letters: Mapping[int, str] | None = None

    def of(self, line: int) -> str:
        return (self.letters or {}).get(line, "")


def marked(lane: str, stage: str, text: str, fusion: Mapping[str, Any] | None = None, graph: str = "") -> Marked:
    """The groups of one stage's text. `fusion` is what the lane inductor tells of itself, `graph` its stage
    `post_grad`, by whose comments the lines of earlier graphs are found."""
    lines = text.split("\n")
    if lane == "inductor":
        return _inductor(stage, lines, fusion, graph) if fusion else Marked()
    if lane == "triton":
        return _sections(lines)
    if lane == "mlir" and stage in STRUCTURED:
        return _blocks(lines, *STRUCTURED[stage])
    return Marked()


STRUCTURED = {
    "linalg": (LINALG, "operation of linalg"),
    "transformed": (LOOP, "loop nest"),
    "bufferized": (LOOP, "loop nest"),
    "vector": (LOOP, "loop nest"),
}


def summary(lane: str, texts: Mapping[str, str], fusion: Mapping[str, Any] | None) -> str:
    """What became of how many operations, in one line."""
    if lane == "inductor" and fusion:
        graph = texts.get("decomposed", "")
        nests = sum(len(kernel["fused"]) for kernel in fusion["kernels"])
        counts = [
            (sum(1 for line in graph.split("\n") if "torch.ops." in line), "operation"),
            (len(fusion["nodes"]), "loop before fusion"),
            (nests, "loop nest"),
            (len(fusion["kernels"]), "kernel"),
        ]
    elif lane == "mlir":
        counts = [(sum(1 for line in texts.get("torch", "").split("\n") if "torch.aten." in line), "torch operation")]
        found = [
            (marked(lane, name, texts[name]).groups, word) for name, (_, word) in STRUCTURED.items() if name in texts
        ]
        counts += [(len(groups), word) for groups, word in found if groups][:2]
        counts.append((1, "function"))
    elif lane == "triton":
        counts = [(len(_sections(texts.get("source", "").split("\n")).groups), "kernel written by hand")]
    else:
        return "as written: every operation of torch is a kernel of its own"
    return " → ".join(_counted(count, word) for count, word in counts if count)


def _inductor(stage: str, lines: Sequence[str], fusion: Mapping[str, Any], graph: str) -> Marked:
    origins = {node["name"]: node["origins"] for node in fusion["nodes"]}
    loops = {node["name"]: node["iteration"] for node in fusion["nodes"]}
    groups, homes, kernels = [], {}, {}
    for kernel in fusion["kernels"]:
        for number, parts in enumerate(kernel["fused"]):
            letter = LETTERS[len(groups) % len(LETTERS)]
            inside = sorted({name for part in parts for name in origins.get(part, ())})
            over = " and ".join(dict.fromkeys(each for part in parts for each in loops.get(part, ())))
            name = f"{kernel['kernel']}, loop nest {number + 1} of {len(kernel['fused'])}"
            groups.append(Group(letter, name, f"{', '.join(inside) or '-'}; over {over or 'nothing'}"))
            homes |= dict.fromkeys(parts, letter)
            kernels[kernel["kernel"]] = kernels.get(kernel["kernel"], "") + letter
    by_operation: dict[str, str] = {}
    for part, letter in homes.items():
        for name in origins.get(part, ()):
            by_operation[name] = "".join(sorted({*by_operation.get(name, ""), letter}))
    find: Callable[[Sequence[str]], Iterable[str]]
    if stage in ("decomposed", "post_grad"):
        find = lambda lines: (by_operation.get(_operation(line), "") for line in lines)  # noqa: E731
    elif stage == "graph":
        find = lambda lines: _by_place(lines, graph.split("\n"), by_operation)  # noqa: E731
    elif stage in ("ir", "fused_ir", "fusion"):
        find = lambda lines: _by_node(lines, homes, kernels)  # noqa: E731
    else:
        find = lambda lines: _by_kernel(lines, kernels)  # noqa: E731
    return Marked(tuple(groups), {n: letters for n, letters in enumerate(find(lines)) if letters})


def _operation(line: str) -> str:
    found = OPERATION.match(line)
    return found.group(1) if found else ""


def _by_place(lines: Sequence[str], later: Sequence[str], by_operation: Mapping[str, str]) -> Iterable[str]:
    """What a line of the source became is told by the later graph, under the same comment."""
    known: dict[str, str] = {}
    place = ""
    for line in later:
        place = line.strip() if WHERE.match(line) else place
        known[place] = "".join(sorted({*known.get(place, ""), *by_operation.get(_operation(line), "")}))
    place = ""
    for line in lines:
        place = line.strip() if WHERE.match(line) else place
        yield known.get(place, "") if place and OPERATION.match(line) else ""


def _by_node(lines: Sequence[str], homes: Mapping[str, str], kernels: Mapping[str, str]) -> Iterable[str]:
    letter = ""
    for line in lines:
        found = NODES.match(line.removeprefix("  loop nest "))
        if found:
            letter = homes.get(found.group(1).split("_")[0], "")
        elif line and not line[0].isspace():
            letter = kernels.get(line, letter if line[0] in "])" or "_layout" in line else "")
        yield letter if line.strip() else ""


def _by_kernel(lines: Sequence[str], kernels: Mapping[str, str]) -> Iterable[str]:
    """A kernel's source, its loop nests told apart where it has a block for each; and the lines that call it."""
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


def _sections(lines: Sequence[str]) -> Marked:
    groups: list[Group] = []
    letters: dict[int, str] = {}
    for number, line in enumerate(lines):
        if found := KERNEL.match(line):
            letter = LETTERS[len(groups) % len(LETTERS)]
            groups.append(Group(letter, f"kernel {found.group(1)}", found.group(2)))
        if groups and line.strip():
            letters[number] = groups[-1].letter
    return Marked(tuple(groups), letters)


def _blocks(lines: Sequence[str], begins: re.Pattern[str], word: str) -> Marked:
    """Operations with regions of their own, outermost ones, from their first line to the brace that closes them."""
    groups: list[Group] = []
    letters: dict[int, str] = {}
    end, held = "", []
    for number, line in enumerate(lines):
        first = not end and begins.match(line)
        if first:
            letter = LETTERS[len(groups) % len(LETTERS)]
            groups.append(Group(letter, f"{word} {len(groups) + 1}", ""))
            end, held = line[: len(line) - len(line.lstrip())] + "}", []
        if not end:
            continue
        letters[number] = groups[-1].letter
        held += INNER.findall(line)
        if (first and not line.rstrip().endswith("{")) or line.startswith(end):
            told = ", ".join(dict.fromkeys(held)) or first and first.group(0).strip() or "no arithmetic"
            groups[-1], end = replace(groups[-1], told=told), ""
    return Marked(tuple(groups), letters)


def _counted(count: int, word: str) -> str:
    if count == 1:
        return f"1 {word}"
    first, _, rest = word.partition(" ")
    if first in ("operation", "kernel", "loop") and rest.startswith(("of", "before", "written")):
        return f"{count} {first}s {rest}"
    return f"{count} {word}s"
