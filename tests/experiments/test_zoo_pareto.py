"""Techniques of three kinds, crossed: the file is what the script says, and a refused pair is really refused."""

from __future__ import annotations

from typing import Any

import pytest

from experiments import zoo_pareto
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment

FILE = zoo_pareto.FILE


def test_the_file_is_as_the_script_writes_it() -> None:
    assert zoo_pareto.written(FILE.read_text()) == FILE.read_text(), "run `python -m experiments.zoo_pareto`"
    assert Experiment.from_file(FILE).variants == zoo_pareto.variants()
    assert len(zoo_pareto.variants()) + sum(map(zoo_pareto.is_refused, zoo_pareto.combinations().values())) == 36
    assert any(len(parts) == 3 and not zoo_pareto.is_refused(parts) for parts in zoo_pareto.combinations().values())


def test_the_engine_carries_out_each_combination_and_refuses_each_refused_pair() -> None:
    experiment = Experiment.from_file(FILE)
    for name in experiment.variants:
        assert runner_for(experiment.variant(name)), name
    changes = {name: change for names in zoo_pareto.KINDS.values() for name, change in names.items()}
    for pair, reason in zoo_pareto.REFUSED.items():
        assert reason
        with pytest.raises(WorkbenchError):
            runner_for(experiment.single({**changes[pair[0]], **changes[pair[1]]}, " + ".join(pair)))


def row(name: str, size: float, kl: float) -> dict[str, Any]:
    return {"variant": name, "bytes_per_token": size, "kl_mean": kl}


PLAIN = [row("float32", 6000, 0.0), row("as trained", 6000, 0.0)]
SINGLES = [row("NF4", 1000, 0.01), row("H2O 192", 1500, 0.1), row("last two share", 5000, 0.1)]


@pytest.mark.parametrize(
    ("more", "of_three", "of_two"),
    [
        ([], 0, 0),
        ([row("NF4 + H2O 192", 900, 0.2)], 0, 1),
        ([row("NF4 + H2O 192", 1100, 0.2)], 0, 0),
        ([row("NF4 + H2O 192", 900, 0.2), row("last two share + NF4 + H2O 192", 800, 0.3)], 1, 1),
        ([row("NF4 + H2O 192", 900, 0.2), row("last two share + NF4 + H2O 192", 900, 0.3)], 0, 1),
    ],
)
def test_a_combination_counts_where_nothing_dominates_it(more: list[dict], of_three: int, of_two: int) -> None:
    found = zoo_pareto.front([*PLAIN, *SINGLES, *more])
    assert (found["of_three_kinds"], found["of_two_kinds"]) == (of_three, of_two)
    assert "NF4" in str(found["single techniques"])
