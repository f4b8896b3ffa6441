"""Real against simulated: the same requests on this machine and under a clock, with step times fitted to other requests.

    python -m experiments.agreement [OUT]

Each repetition measures twice: steps of requests with another seed, to which a table is fitted, then the requests
themselves, which are also simulated with that table. Rule, written before the run: TTFT and TPOT, p50 and p90, differ by
at most 15% in the median of five repetitions, and a run in which others took a tenth of the processor is not to be
trusted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.run import run

FIGURES = [(name, q) for name in ("ttft_s", "tpot_s") for q in ("p50", "p90")]
REPETITIONS, MOST = 5, 0.15


def repetition(experiment: Experiment, number: int, out: Path) -> dict[str, Any]:
    """Real and simulated figures of the requests with seed `number`."""
    asked = experiment.with_(f"workload.seed={number}")
    fitted_to = run(experiment.with_(f"workload.seed={1000 + number}"), out, "calibration", progress=False)
    real = run(asked, out, "real", progress=False).summary
    clock = f"executor={{kind: simulated, hardware: here, steps: {fitted_to.path}}}"
    simulated = run(asked.with_(clock), out, "simulated", progress=False).summary
    row: dict[str, Any] = {"others_cpu_share": real["others_cpu_share"]}
    for name, q in FIGURES:
        row[f"{name}_{q}"] = {
            "real": real[name][q], "simulated": simulated[name][q], "off": simulated[name][q] / real[name][q] - 1,
        }  # fmt: skip
    return row


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far simulated figures are off, in the median of the repetitions, and whether that is within the rule."""
    off = {f"{name}_{q}": median(row[f"{name}_{q}"]["off"] for row in rows) for name, q in FIGURES}
    return {"off": off, "within": all(abs(each) <= MOST for each in off.values())}


def main(out: Path) -> None:
    experiment = Experiment.read(Path(__file__).with_name("agreement.yaml"))
    rows = []
    for number in range(REPETITIONS):
        rows.append(row := repetition(experiment, number, out))
        figures = ", ".join(
            f"{key} {row[key]['real'] * 1e3:.1f} and {row[key]['simulated'] * 1e3:.1f} ms ({row[key]['off']:+.1%})"
            for key in (f"{name}_{q}" for name, q in FIGURES)
        )
        busy = row["others_cpu_share"]
        print(f"{number}: real and simulated {figures}" + (f"; others {busy:.0%}" if busy is not None else ""))
    print(json.dumps({"rows": rows, **verdict(rows)}, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
