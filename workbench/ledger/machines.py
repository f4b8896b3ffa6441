"""Describe a record's machine in a few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30


def describe_machine(environment: Mapping[str, Any], experiment: Mapping[str, Any] | None = None) -> str:
    """Describe the machine of a record: processor, cores and memory, or the GPU of the model, or the simulated
    hardware.
    """
    if simulated := _simulated(experiment or {}):
        return simulated
    device = (experiment or {}).get("model", {}).get("device", "cpu")
    if device != "cpu" and environment.get("gpu"):
        return ", ".join(environment["gpu"])
    cpu, size = environment["cpu"], environment.get("memory_bytes")
    words = [cpu["model"], f"{cpu['usable_cores']} cores"]
    return ", ".join(words + ([f"{size / GIB:.0f} GiB"] if size else []))


def _simulated(experiment: Mapping[str, Any]) -> str:
    executor = experiment.get("executor") or {}
    if executor.get("kind") != "simulated":
        return ""
    count = executor.get("instances", 1) * executor.get("gpus", 1)
    hardware = executor["hardware"]
    name = hardware if isinstance(hardware, str) else hardware.get("name", "given hardware")
    return f"simulated: {count} x {name}"
