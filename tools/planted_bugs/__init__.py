"""Plant bugs in a copy of the tree, one at a time, and report the test that catches each: a measure of the test suite.

    python -m tools.planted_bugs             # for each bug the test files nearest to it, as `make test` runs them
    python -m tools.planted_bugs draft       # those bugs with this word in their description
    python -m tools.planted_bugs --whole     # then, where these catch nothing, all of `make test`
    python -m tools.planted_bugs --thorough  # as `make test-thorough` runs them

It takes half an hour and more; `problems()` lists the bugs that no longer apply, and is quick.
"""

from tools.planted_bugs.bugs import BUGS, PlantedBug
from tools.planted_bugs.run import problems

__all__ = ["BUGS", "PlantedBug", "problems"]
