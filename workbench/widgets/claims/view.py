"""Show claims: statements, verdicts, and a button that measures a claim again."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench.claims import tables
from workbench.claims.claim import CLAIMS_FOLDER, load_claims
from workbench.errors import WorkbenchError, nearest
from workbench.widgets.claims import picture as claims_picture
from workbench.widgets.command_process import CommandProcess
from workbench.widgets.view import PictureWidget, button

ALL_VERDICTS = "every verdict"
NUM_SUGGESTIONS = 8


class Claims(PictureWidget):
    """A view of the claims in `folder` (default: the workbench's own) with verdicts and evidence.

    `claim` is the chosen claim, shown with details; `verdict` and `words` filter the list. `measure()` runs the
    claim's experiment in a process: a quick one that writes nothing, or with `whole` one that
    stores its figures."""

    claim = traitlets.Unicode()
    verdict = traitlets.Unicode(ALL_VERDICTS)
    words = traitlets.Unicode()
    whole = traitlets.Bool(False)

    def __init__(self, folder: Path | str = CLAIMS_FOLDER, claim: str = ""):
        super().__init__()
        self._folder = Path(folder)
        self._job: CommandProcess | None = None
        self._found = ""
        self.read()
        self.claim = claim
        self.watch("claim", "verdict", "words")
        self.shown.on_pick(lambda claim: self.set_trait("claim", claim))
        self.show(*self._controls())

    @traitlets.validate("claim")
    def _validate_claim(self, proposal: Any) -> str:
        asked = proposal["value"]
        if asked and asked not in self._claims:
            raise WorkbenchError(f"no claim {asked!r}{nearest(asked, self._claims)}")
        return asked

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """Return the listed claims, as rows of `tables.claim_rows`."""
        verdict = None if self.verdict == ALL_VERDICTS else self.verdict
        words = self.words.lower().replace(",", " ").split()
        found = tables.claim_rows(self._claims, verdict)
        return [row for row in found if all(w in f"{row['claim']} {row['statement']}".lower() for w in words)]

    def read(self) -> None:
        """Read the claims and what was measured for them."""
        self._claims = load_claims(self._folder)

    def picture(self) -> str:
        rows = self.rows
        chosen = tables.claim_detail(self._claims[self.claim]) if self.claim else None
        return claims_picture.draw_claims(rows, tables.count_verdicts(list(rows)), chosen, self._running())

    def measure(self) -> CommandProcess:
        """Run the experiment of `claim`; return its process, which has `wait()`.

        Raises:
            WorkbenchError: no claim is chosen, or another one is being measured.
        """
        if not self.claim:
            raise WorkbenchError("choose a claim first: claims.claim = 'kv-gqa', or a click on its line")
        if self._job is not None and self._job.returncode is None:
            raise WorkbenchError("a claim is being measured; wait for it or stop it")
        words = ["claims", "run", self.claim, "--json", "--folder", str(self._folder)]
        self._found = ""
        self._job = CommandProcess([*words, *([] if self.whole else ["--quick"])], self._on_job_change)
        self._on_job_change()
        return self._job

    def stop(self) -> None:
        if self._job is not None:
            self._job.stop()

    def close(self) -> None:
        if hasattr(self, "_job"):
            self.stop()
        super().close()

    def _on_job_change(self) -> None:
        job = self._job
        if job is not None and job.returncode is not None and not self._found:
            self._found = _outcome(job)
            self.read()
            self.throttle.flush()
            self.keep()
        self._buttons()
        self.throttle.mark()

    def _running(self) -> str:
        if self._job is None:
            return ""
        return "\n".join([*self._job.progress_lines[-6:], self._found or "measuring ..."])

    def _controls(self) -> tuple[ipywidgets.Widget, ...]:
        verdict = ipywidgets.Dropdown(options=[ALL_VERDICTS, *tables.ORDER], description="verdict")
        offered = suggested_words(tables.claim_rows(self._claims))
        words = ipywidgets.Combobox(description="words", options=offered, continuous_update=True)
        words.placeholder = f"such as {offered[0]}" if offered else ""
        whole = ipywidgets.Checkbox(description="whole (stores its figures)", indent=False)
        self._run = button(self.measure, "measure again", icon="play")
        self._stop = button(self.stop, "stop", icon="stop", disabled=True)
        self.observe(lambda _: self._buttons(), "claim")
        self._buttons()
        choice = ipywidgets.HBox([self.linked("verdict", verdict), self.linked("words", words)])
        return choice, ipywidgets.HBox([self._run, self._stop, self.linked("whole", whole)])

    def _buttons(self) -> None:
        if not hasattr(self, "_stop"):
            return
        going = self._job is not None and self._job.returncode is None
        self._run.disabled, self._stop.disabled = going or not self.claim, not going


def suggested_words(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the most frequent words in the names of `rows`, as suggestions for the filter."""
    counted = Counter(word for row in rows for word in set(re.findall(r"[a-z]{4,}", row["claim"].lower())))
    return tuple(word for word, _ in counted.most_common(NUM_SUGGESTIONS))


def _outcome(job: CommandProcess) -> str:
    """Return the verdicts and errors of a finished job, one line for each claim."""
    try:
        found = json.loads(job.stdout)
    except ValueError:
        return "stopped" if job.returncode in (-2, 130) else f"ended with {job.returncode}"
    lines = [f"{row['verdict']}: {row['reason']}" for row in found["claims"]]
    return "\n".join([*lines, *(f"{name}: {fault}" for name, fault in found["faults"].items())])
