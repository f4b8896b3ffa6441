"""Mark lines of inductor's stages by the loop nest they became, as its scheduler reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.widgets.kernels.marked import LETTERS, FusedGroup, FusionMarks

OPERATION = re.compile(r"^\s*(\w+)(?:: \"[^\"]*\")? = ")
SOURCE_COMMENT = re.compile(r"^\s*# File: ")
NODE_NAMES = re.compile(r"^(?:class )?((?:op\d+_?)+)")


def mark_loops(stage: str, lines: Sequence[str], fusion: Mapping[str, Any], graph: str) -> FusionMarks:
    """`fusion` is what the backend tells of itself, `graph` its stage `post_grad`."""
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
    """Mark lines of the source by the later graph, which repeats their comments."""
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
    """A kernel's source, its loop nests separate where it has a block for each; and the lines that call it."""
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
