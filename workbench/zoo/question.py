"""Build the experiment that measures an entry: the workload of its kind, with variants `baseline` and `technique`."""

from __future__ import annotations

import copy
from typing import Any

from workbench.experiment.experiment import Experiment
from workbench.zoo.entry import LoadedEntry
from workbench.zoo.figures import Kind

BASELINE, TECHNIQUE = "baseline", "technique"
_QUALITY: dict[str, Any] = {
    "model": {"name": "demo", "dtype": "float32"},
    "backend": "auto",
    "workload": {
        "kind": "quality",
        "windows": 6,
        "greedy_prompts": 2,
        "greedy_tokens": 16,
        "copying": {"names": 4, "depths": [0.0, 0.5, 0.75, 1.0]},
        "speed": {"model": "shape:smollm2-135m", "contexts": [4096], "tokens": 8, "rounds": 3},
        "pool": None,
    },
}
_TRAFFIC: dict[str, Any] = {
    "model": {"name": "shape:llama-3.1-8b"},
    "schedule": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "policy": "fcfs"},
    "executor": {"kind": "simulated", "hardware": "h100"},
    "workload": {
        "kind": "traffic",
        "lengths": {"kind": "azure"},
        "arrivals": {"kind": "bursts", "rate": 36, "size": 128},
        "requests": 3000,
        "tenants": {"a": 4, "b": 1, "c": 1},
    },
    "measure": {"slo": {"ttft": 2.0, "tpot": 0.05}},
}
SETTINGS: dict[Kind, dict[str, Any]] = {
    "attention": _QUALITY,
    "format": _QUALITY,
    "eviction": {**_QUALITY, "cache": {"page_size": 16}},
    "sampling": {
        "model": {"name": "demo"},
        "workload": {"kind": "texts", "prompts": 16, "prompt_tokens": 96, "output_tokens": 256, "repeats": 3},
    },
    "draft": {
        "model": {"name": "demo"},
        "sampling": {"temperature": 0},
        "workload": {"kind": "speculation", "prompts": 8, "prompt_tokens": 384, "output_tokens": 96, "loads": [1],
                     "rounds": 3},
    },
    "schedule": _TRAFFIC,
}  # fmt: skip
QUICK: dict[Kind, tuple[str, ...]] = {  # settings for a first look; its figures are not recorded
    **dict.fromkeys(
        ("attention", "format", "eviction"),
        ("workload.windows=1", "workload.greedy_prompts=1", "workload.copying.names=1", "workload.speed=null"),
    ),
    "sampling": ("workload.prompts=2", "workload.output_tokens=48", "workload.repeats=2"),
    "draft": ("workload.prompts=1", "workload.output_tokens=32", "workload.rounds=1"),
    "schedule": ("workload.requests=200",),
}


def experiment_of(entry: LoadedEntry, quick: bool = False) -> Experiment:
    """Return the experiment that measures `entry`.

    Raises:
        WorkbenchError: for wrong settings of the entry, its workload or a variant, named by their path.
    """
    where, kind = f"zoo/{entry.yaml_file.name}", entry.settings.kind
    values = copy.deepcopy(SETTINGS[kind]) | {
        "question": f"{entry.settings.technique}: {entry.settings.claim}",
        "variants": {BASELINE: entry.settings.baseline, TECHNIQUE: entry.settings.use},
    }
    values["workload"] = _merged(values["workload"], entry.settings.workload)
    values["model"] = _merged(values["model"], entry.settings.model)
    experiment = Experiment.from_values(values, where)
    if quick:
        experiment = experiment.with_(*QUICK[kind])
    experiment.single(entry.settings.baseline, f"{where}: baseline")
    experiment.single(entry.settings.use, f"{where}: use")
    return experiment


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the settings of `above` on top, group by group; another kind of settings replaces a group."""
    if "kind" in above and above["kind"] != below.get("kind"):
        return above
    found = dict(below)
    for name, value in above.items():
        inner = found.get(name)
        found[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found
