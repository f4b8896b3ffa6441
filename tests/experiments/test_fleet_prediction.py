"""The kill that the prediction of fleets is held against meets a replica that is answering."""

from __future__ import annotations

import json
from pathlib import Path

import experiments
from workbench.experiment.experiment import Experiment
from workbench.measure.processes.calibration import Calibration
from workbench.measure.processes.prediction import as_simulated, simulated_fleet
from workbench.measure.processes.traffic import measured_traffic, processes_executor_of
from workbench.simulate.step_times import TICKS_PER_SECOND, AttentionReach, LinearCost, StepTimeModel

FOLDER = Path(experiments.__file__).parent
RECORD = FOLDER / "records" / "fleet_prediction-20261126-050456.json"


def test_a_killed_replica_has_requests_that_have_tokens() -> None:
    """By the simulator, with step times that were measured."""
    fit = json.loads(RECORD.read_text())["summary"]["about"]["calibrations"][1]
    names = {"step": "step_s", "prefill_step": "prefill_step_s", "decode_step": "decode_step_s",
             "prefill_tokens": "prefill_token_s", "decode_tokens": "decode_token_s"}  # fmt: skip
    ticks = {name: round(fit[key] * TICKS_PER_SECOND) for name, key in names.items()}
    cost = LinearCost(**ticks, positions_read=(round(fit["position_read_s"] * TICKS_PER_SECOND),))
    times = StepTimeModel(fit["fit"], (AttentionReach(None, 0),), (cost,))
    calibration = Calibration(fit["engines"], times, fit["message_s"], fit["start_s"], {})
    variant = Experiment.from_yaml((FOLDER / "fleet_prediction.yaml").read_text()).variant("two replicas, one killed")
    (kill,) = processes_executor_of(variant).failures
    fleet = simulated_fleet(as_simulated(variant, fit["start_s"]), calibration, measured_traffic(variant)).run()
    moved = [job for job in fleet.jobs if job.retries]
    had_tokens = [job for job in moved if job.first_token is not None and job.first_token < kill.at * TICKS_PER_SECOND]
    assert len(moved) >= 3 and len(had_tokens) >= 2
