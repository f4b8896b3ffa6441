"""Choose how much a law tries: in `make test` a quarter of what it does in `make test-thorough`. Both try every law."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("WORKBENCH_TESTS_THOROUGH"))  # set by `make test-thorough`
SHARE, FEWEST = 4, 3


def tries(thorough: int) -> int:
    """Return the number of examples of a law that has `thorough` in `make test-thorough`."""
    return thorough if THOROUGH else max(min(thorough, FEWEST), thorough // SHARE)
