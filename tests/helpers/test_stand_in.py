"""A stand-in has what its class has, and nothing else."""

from __future__ import annotations

import pytest

from tests.helpers.stand_in import stand_in


class Base:
    kind: str

    def close(self, seconds: float, again: bool = False) -> None: ...


class Real(Base):
    def __init__(self) -> None:
        self.number, self._places = 3, []


def test_a_name_that_the_class_has_not_fails() -> None:
    made = stand_in(Real, number=7, kind="x", close=lambda seconds: seconds, _places=[])
    assert (made.number, made.close(2)) == (7, 2)
    with pytest.raises(AssertionError, match="Real has no 'size'"):
        made.size = 3
    with pytest.raises(AssertionError, match="Real has no 'num'"):
        stand_in(Real, num=3)
    assert not hasattr(made, "size")
    with pytest.raises(TypeError, match="too many positional"):
        stand_in(Real, close=lambda: None)
