"""Check a cache format, as a configuration has it, against the laws of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from compiled_kernels import Backend
from workbench.cache.format import CacheFormat, parse_cache_format
from workbench.testing import kv_laws
from workbench.testing.holding import check_law
from workbench.testing.kv_scenes import shrink_to_test_layers, kv_scenarios
from workbench.testing.report import ConformityReport


def check_kv_format(
    format: str | Mapping[str, Any] | CacheFormat, examples: int = 6, backends: Iterable[str] = tuple(Backend)
) -> ConformityReport:
    """Try `format` in small models, and report law by law whether it holds.

    Args:
        format: as for `load(cache=...)`: a name (`int4`) or settings (`{"format": "int4", "rotate": True}`). The model
            has layers of every kind that the format names.
        examples: sets of texts tried for each law, equal in every call, long enough that tokens are quantized.
        backends: compared with the einops reference as far as they support the format.

    Raises:
        WorkbenchError: an impossible format.
    """
    given = parse_cache_format(format)
    tried = shrink_to_test_layers(given)
    drawn = kv_scenarios(tried)
    laws = [check_law(law, functools.partial(check, tried), examples, drawn) for law, check in kv_laws.LAWS.items()]
    laws += [kv_laws.backend_law(Backend(backend), tried, examples) for backend in backends]
    return ConformityReport(f"cache format {given.model_dump(exclude_defaults=True)}", tuple(laws))
