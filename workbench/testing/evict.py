"""Check an eviction policy against the laws that hold although tokens are lost."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from workbench.cache.evict import EvictionPolicy, parse_eviction
from workbench.errors import WorkbenchError
from workbench.testing import evict_laws
from workbench.testing.holding import check_law
from workbench.testing.report import Law, ConformityReport


def check_evict(policy: Mapping[str, Any] | EvictionPolicy, examples: int = 6) -> ConformityReport:
    """Try `policy` in small models, and report law by law whether it holds.

    Args:
        policy: as for `load(evict=...)`: settings (`{"kind": "heavy_hitters", "budget": 256}`) or a custom policy (see
            `workbench.cache.evict.Evict`). It is tried under small budgets of many sizes.
        examples: sets of texts tried for each law, equal in every call.

    Returns:
        A report; laws that the policy `gives_up` are listed as such.

    Raises:
        WorkbenchError: `policy` is none.
    """
    given = parse_eviction(policy)
    if given is None:
        raise WorkbenchError("check_evict: None evicts nothing; give settings or a policy")
    law = "keeps as many as the budget says, in order, the newest among them, and the same when asked again"
    laws = [check_law(law, functools.partial(evict_laws.check_choice, given), 20 * examples, evict_laws.mass_and_budget())]
    drawn = evict_laws.eviction_scenarios()
    for law, check in evict_laws.EVICTION_LAWS.items() if laws[0].ok else ():
        if law in given.gives_up:
            laws.append(Law(law, True, "given up", tried=False))
        else:
            laws.append(check_law(law, functools.partial(check, given), examples, drawn))
    for law in sorted(given.gives_up - evict_laws.EVICTION_LAWS.keys()):
        refused = evict_laws.REFUSALS.get(law)
        if refused is None:
            laws.append(Law(law, True, "given up", tried=False))
        else:
            laws.append(check_law(f"{law}: given up, and refused", functools.partial(refused, given), 1, drawn))
    return ConformityReport(f"eviction {given!r}", tuple(laws))
