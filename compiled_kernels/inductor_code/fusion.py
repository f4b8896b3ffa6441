"""Report fused kernels: the operations that became one kernel, and the reasons why other pairs were not fused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from compiled_kernels.inductor_code.watch import CompilationTrace

NO_REASON = "the scheduler logged no reason: the backend does not fuse loops over {first} with loops over {second}"


def fusion(seen: CompilationTrace) -> dict:
    """Return a report with three keys: `kernels` (name, groups of scheduler nodes, their operations in the graph, bytes
    of the buffers they read and write), `nodes`, and `apart` (pairs of groups that were not fused, with the scheduler's
    reason)."""
    homes = {part: kernel for kernel, parts in seen.nodes_of_kernel.items() for part in parts}
    kernels: dict[str, list[dict]] = {}
    for group in seen.groups:
        home = next((homes[part] for part in group["parts"] if part in homes), group["library"] or "(no kernel)")
        kernels.setdefault(home, []).append(group)
    return {
        "kernels": [
            {
                "kernel": kernel,
                "fused": [group["parts"] for group in groups],
                "operations": sorted({origin for group in groups for origin in group["origins"]}),
                "bytes": sum(group["bytes"] or 0 for group in groups),
            }
            for kernel, groups in kernels.items()
        ],
        "nodes": [{key: node[key] for key in ("name", "kind", "origins", "iteration")} for node in seen.nodes],
        "apart": _apart(seen),
    }


def fusion_text(found: Mapping) -> str:
    lines = []
    for kernel in found["kernels"]:
        lines.append(kernel["kernel"])
        lines.append(f"  operations: {', '.join(kernel['operations']) or '-'}")
        lines.append(f"  reads and writes {kernel['bytes']:,} bytes of buffers")
        lines += [f"  loop nest {' + '.join(parts)}" for parts in kernel["fused"]]
    lines.append("")
    for node in found["nodes"]:
        lines.append(f"{node['name']} {', '.join(node['origins'])} over {' and '.join(node['iteration'])}")
    lines.append("")
    lines += [f"{pair['first']} and {pair['second']} apart: {pair['reason']}" for pair in found["apart"]]
    return "\n".join(lines if found["apart"] else [*lines, "nothing that shares a buffer was left apart"])


def _apart(seen: CompilationTrace) -> list[dict]:
    """Return groups that share a buffer first, then others that the scheduler tried."""
    group_of = {part: group["name"] for group in seen.groups for part in group["parts"]}
    reasons: dict[frozenset[str], list[str]] = {}
    exact: set[frozenset[str]] = set()  # pairs of groups, as they are in the end, that a reason names
    for first, second, reason in seen.reasons:
        names = [next((group_of[p] for p in name.split("_") if p in group_of), name) for name in (first, second)]
        pair = frozenset(names)
        if len(pair) == 2:
            whole = names == [first, second]
            exact |= {pair} if whole else set()
            words = reason if whole else f"{first} with {second}: {reason}"
            reasons[pair] = list(dict.fromkeys([*reasons.get(pair, ()), words]))
    found = []
    for first, second in itertools.combinations(seen.groups, 2):
        pair = frozenset((first["name"], second["name"]))
        shared = {*first["reads"], *first["writes"]} & {*second["reads"], *second["writes"]}
        if shared and pair not in exact:
            untold = NO_REASON.format(first=_loops(first), second=_loops(second))
            reasons[pair] = [*reasons.get(pair, ()), untold]
        if pair in reasons:
            reason = "; ".join(reasons[pair])
            found.append({"first": first["name"], "second": second["name"], "shared": sorted(shared), "reason": reason})
    return sorted(found, key=lambda each: not each["shared"])


def _loops(group: Mapping) -> str:
    return " and ".join(dict.fromkeys(group["iteration"]))
