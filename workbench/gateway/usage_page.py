"""Write one page of usage as JSON; a page ends with the group behind which the next one begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from workbench.gateway.accounting import Accounts
from workbench.serve.errors import ApiError

MAX_ROWS = 10_000  # of one page


def usage_page(
    accounts: Accounts,
    currency: str,
    names: Sequence[str],
    since: str,
    where: Mapping[str, str],
    limit: int,
    after: Sequence[str],
) -> bytes:
    """Return the JSON of one page of usage, with all that was entered so far. It takes long: not for the event loop.

    Raises:
        WorkbenchError: as `Accounts.sums`.
    """
    accounts.flush()
    rows = accounts.sums(names, since, where, limit + 1, after)
    page, has_more = rows[:limit], len(rows) > limit
    last = json.dumps(page[-1].group) if has_more else None
    values = {"data": [each.as_dict(names) for each in page], "has_more": has_more, "last": last}
    return json.dumps({"object": "list", "currency": currency, **values}).encode()


def read_group(after: str) -> Sequence[str]:
    """Return the group that a client sends back as `after` (ApiError for what is none)."""
    try:
        found = json.loads(after or "[]")
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ApiError("invalid_request_error", "after: is no `last` of an earlier answer", "after")
    return found
