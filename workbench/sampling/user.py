"""Load user-defined filters and samplers by import path."""

from __future__ import annotations

from typing import cast

from workbench.errors import WorkbenchError
from workbench.request import CustomPart
from workbench.sampling.filters import Filter
from workbench.sampling.samplers import TokenSampler
from workbench.user_parts import load_custom, check_arity


def load_filter(part: CustomPart) -> Filter:
    """Build the filter that `part` names; WorkbenchError if it cannot be one."""
    made = load_custom(part)
    if callable(made):
        check_arity(made, 2, f"filter {part.path}", "(logits, histories)")
        return cast(Filter, made)
    raise WorkbenchError(f"filter {part.path}: not callable; it needs __call__(self, logits, histories)")


def load_sampler(part: CustomPart) -> TokenSampler:
    """Build the sampler that `part` names; WorkbenchError if it cannot be one."""
    made = load_custom(part)
    for verb, count, shape in (("start", 0, "()"), ("choose", 3, "(logits, uniform, state)")):
        method = getattr(made, verb, None)
        if not callable(method):
            raise WorkbenchError(f"sampler {part.path}: has no {verb}; a sampler needs {verb}{shape}")
        check_arity(method, count, f"sampler {part.path}: {verb}", shape)
    return made
