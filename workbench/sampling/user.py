"""A filter or a sampler of the user's own, that comes in by import path."""

from __future__ import annotations

from typing import cast

from workbench.errors import WorkbenchError
from workbench.request import UserPart
from workbench.sampling.filters import Filter
from workbench.sampling.samplers import Sampler
from workbench.user_parts import load, takes


def load_filter(part: UserPart) -> Filter:
    """The filter that `part` names, built anew. Errors: WorkbenchError when it cannot be one."""
    made = load(part)
    if callable(made):
        takes(made, 2, f"filter {part.path}", "(logits, histories)")
        return cast(Filter, made)
    raise WorkbenchError(f"filter {part.path}: not callable; it needs __call__(self, logits, histories)")


def load_sampler(part: UserPart) -> Sampler:
    """The sampler that `part` names, built anew. Errors: WorkbenchError when it cannot be one."""
    made = load(part)
    for verb, count, shape in (("start", 0, "()"), ("choose", 3, "(logits, uniform, state)")):
        method = getattr(made, verb, None)
        if not callable(method):
            raise WorkbenchError(f"sampler {part.path}: has no {verb}; a sampler needs {verb}{shape}")
        takes(method, count, f"sampler {part.path}: {verb}", shape)
    return made
