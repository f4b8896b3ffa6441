"""The built-in workloads by kind, and the measures of every workload.

No workload is imported here, so that a listing of runs has headings and units without torch.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from workbench import units
from workbench.units import Measure

# Class of each kind. Its file is imported when an experiment has a workload of this kind.
WORKLOADS = {
    "prompts": "workbench.measure.serving:PromptsWorkload",
    "random": "workbench.measure.serving:RandomWorkload",
    "traffic": "workbench.measure.serving:TrafficWorkload",
    "quality": "workbench.measure.quality.quality:QualityWorkload",
    "shared_prefix": "workbench.measure.shared_prefix:SharedPrefixWorkload",
    "determinism": "workbench.measure.determinism:DeterminismWorkload",
    "speculation": "workbench.measure.speculation:SpeculationWorkload",
    "prefill_interference": "workbench.measure.prefill_interference:PrefillInterferenceWorkload",
    "streaming": "workbench.measure.streaming:StreamingWorkload",
    "lengths": "workbench.measure.lengths:LengthsWorkload",
    "texts": "workbench.measure.sampled_texts:TextsWorkload",
    "text_agreement": "workbench.measure.text_agreement:TextAgreementWorkload",
    "agent": "workbench.measure.agent:AgentWorkload",
}
# measures of the workloads that this process has imported, user-defined ones included
LOADED_MEASURES: list[Measure] = []


@cache
def built_in_measures() -> tuple[Measure, ...]:
    """Return the measures of the built-in workloads, read from the sources of their classes."""
    specs = [importlib.util.find_spec(module) for module in {path.partition(":")[0]: 0 for path in WORKLOADS.values()}]
    trees = [ast.parse(Path(spec.origin).read_text("utf-8")) for spec in specs if spec and spec.origin]
    found: list[Measure] = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "measures" and node.value:
            found += eval(compile(ast.Expression(node.value), "measures", "eval"), {**vars(units)})
    return tuple(found)
