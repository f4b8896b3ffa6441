"""Check a cache format, as a configuration has it, against the laws of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from compiled_kernels import Lane
from workbench.cache.format import CacheFormat, cache_format
from workbench.testing import kv_laws
from workbench.testing.holding import held
from workbench.testing.kv_scenes import folded, scenes
from workbench.testing.report import Report


def check_kv_format(
    format: str | Mapping[str, Any] | CacheFormat, examples: int = 6, lanes: Iterable[str] = tuple(Lane)
) -> Report:
    """Try `format` in small models, and report law by law whether it holds.

    Args:
        format: as for `load(cache=...)`: a name (`int4`) or settings (`{"format": "int4", "rotate": True}`). The model
            has layers of every kind that the format names.
        examples: sets of texts tried for each law, equal in every call, long enough that tokens are quantized.
        backends: compared with the einops reference as far as they support the format.

    Raises:
        WorkbenchError: an impossible format.
    """
    given = cache_format(format)
    tried = folded(given)
    drawn = scenes(tried)
    laws = [held(law, functools.partial(check, tried), examples, drawn) for law, check in kv_laws.LAWS.items()]
    laws += [kv_laws.lane_law(Lane(lane), tried, examples) for lane in lanes]
    return Report(f"cache format {given.model_dump(exclude_defaults=True)}", tuple(laws))
