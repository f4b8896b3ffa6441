"""List the entries of the peer benchmark: each workload, weight format and peer, with the reason why an entry is not
timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.catalog import DENSE_FORMATS, FILE, Peer
from benchmarks.peers.works import PeerWorkload
from workbench.model.spec import ModelSpec


@dataclass(frozen=True)
class PeerEntry:
    """One measurement to make: a peer, a weight format and a workload, with a status ("ok": it is timed) and the reason
    for any other status."""

    peer: Peer
    format: str
    workload: PeerWorkload
    status: str = "ok"
    reason: str = ""


def check_supported(entry: PeerEntry, spec: ModelSpec) -> PeerEntry:
    """Return the entry, marked as unsupported with a reason if the peer or the model cannot run its format or
    workload."""
    peer, format, work = entry.peer, entry.format, entry.workload
    reason = ""
    if format not in peer.formats:
        reason = f"no {format} here; it has {', '.join(peer.formats)}"
    elif work.kind not in peer.kinds:
        reason = f"does no {work.kind} here"
    elif work.longest > spec.max_position_embeddings:
        reason = f"{work.longest} tokens, the model's context is {spec.max_position_embeddings}"
    return replace(entry, status="unsupported", reason=reason) if reason else entry


def formats_to_compare(entry: PeerEntry) -> tuple[str, ...]:
    """Return the weight formats whose logits are compared before an entry is timed: its own, and for a quantized format
    also a dense one, whose bound is narrow."""
    if entry.format in (*DENSE_FORMATS, FILE):
        return (entry.format,)
    return "bfloat16" if "bfloat16" in entry.peer.formats else "float32", entry.format


def comparisons(entries: Sequence[PeerEntry]) -> list[tuple[Peer, str]]:
    """Return each pair of peer and weight format whose logits must be compared before timing, without duplicates."""
    pairs = [(entry.peer, format) for entry in entries if entry.status == "ok" for format in formats_to_compare(entry)]
    return list({(peer.name, format): (peer, format) for peer, format in pairs}.values())


def check_agreement(entry: PeerEntry, agreement: Sequence[dict]) -> PeerEntry:
    """Return the entry, marked as not timed with a reason if the peer's logits did not agree with ours."""
    if entry.status != "ok":
        return entry
    found = {each["format"]: each for each in agreement if each["peer"] == entry.peer.name}
    for each in (found[format] for format in reversed(formats_to_compare(entry))):
        if each["status"] != "ok":
            other = f"with {each['format']} weights: " if each["format"] != entry.format else ""
            return replace(entry, status=each["status"], reason=other + each["reason"])
    return entry


def entry_row(entry: PeerEntry) -> dict:
    return {
        "peer": entry.peer.name, "format": entry.format, "work": entry.workload.name, "status": entry.status,
        "reason": entry.reason,
    }  # fmt: skip
