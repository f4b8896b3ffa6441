"""One Ray on this machine for all tests of a run: started as launchers start it, shared with those that tests open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

WITHOUT_RAY = "pip install 'ray>=2.40'"


def own_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that has a process with a Ray of its own, or with none."""
    return pytest.mark.ray(pytest.mark.skipif(find_spec("ray") is None, reason=WITHOUT_RAY)(test))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The module `ray`, connected; a test of a process without Ray forks one (`python`)."""
    ray = pytest.importorskip("ray", reason=WITHOUT_RAY)
    from workbench.cluster.ray_replicas import RayLauncher

    launcher = RayLauncher(None, 1, 0.0, 2)
    yield ray
    launcher.close()
    assert not ray.is_initialized(), "a test has left a launcher open"
