"""Choose how many examples a law tries: in `make test` a third of those in `make test-thorough`. Both try every law."""

from __future__ import annotations

import os

THOROUGH = "WORKBENCH_TESTS_THOROUGH"  # set by `make test-thorough`
SHARE, FEWEST = 3, 4


def tries(thorough: int) -> int:
    """Return the number of examples of a law that has `thorough` in `make test-thorough`."""
    return thorough if os.environ.get(THOROUGH) else max(min(thorough, FEWEST), thorough // SHARE)
