"""Show the accepted and rejected draft tokens within the text, and the speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError, describe_error
from workbench.widgets.recorded import Recorded
from workbench.widgets.speculation.data import (
    SpeculationComparison,
    SpeculationSpeed,
    SpeculationTables,
    place_tokens,
    speculation_figures,
    speculation_speed,
)
from workbench.widgets.speculation.picture import STYLE, describe_verification, draw_charts, draw_table, draw_text
from workbench.widgets.tokens.text import speller
from workbench.widgets.view import PictureWidget, button, close_tree

if TYPE_CHECKING:
    from workbench.request import Request


class SpeculationView(PictureWidget):
    """A view of drafted tokens within the text, verification by verification, and of the speed-up.

    `SpeculationView(runner, prompt)` continues a prompt with and without drafts in turn. `speculate` names another
    speculator for it, as in `load`; the runner gets its own back at the end, and a second view on the runner waits
    until then. `SpeculationView(record)` shows a recorded run, given as a record, its folder or events; `plain` is a
    run without drafts to compare with.

    `verification` is the number of the shown one, `sequence` the request. `tokenizer` decodes the tokens of records
    and events (default: the tokenizer of a record's model). `sampling` are parameters of the request (default:
    greedy); `rounds` is the number of timed runs of each kind (0: no plain run).
    """

    engine_fields = ("_comparison",)
    verification = traitlets.Int(0)
    sequence = traitlets.Unicode()

    def __init__(
        self, source: Any, prompt: str | Sequence[int] | Request | None = None, *, speculate: Any = None,
        plain: Any = None, tokenizer: Any = None, rounds: int = 2, **sampling: Any,
    ):  # fmt: skip
        super().__init__()
        self._comparison, self._problem, self._over = None, "", False
        self._plain: SpeculationTables | None = None  # the run without drafts, for a comparison of tokens and times
        self._timed: tuple[SpeculationTables, SpeculationTables | None] | None = None
        if hasattr(source, "stream"):
            self._comparison = SpeculationComparison(source, prompt, speculate, rounds, sampling)
            self._run = SpeculationTables([], [], [])
            tokenizer = source.tokenizer
        else:
            if prompt is not None or speculate is not None or sampling:
                raise WorkbenchError("prompt, speculate and sampling go with a runner; a record and events have theirs")
            self._run = SpeculationTables.from_source(source)
            self._plain = None if plain is None else SpeculationTables.from_source(plain)
            self._timed = self._run, self._plain
            tokenizer = tokenizer or _tokenizer_of(source)
        self._spell = speller(tokenizer)
        self._controls()
        self._read()
        self.redraw()
        if self._comparison is not None:
            self._comparison.begin(self._on_change, self._ended)
        self.watch("verification", "sequence")

    @property
    def figures(self) -> dict[str, Any]:
        """Return the acceptance figures of the drafts, as in a run's summary."""
        return speculation_figures(self._run)

    @property
    def speeds(self) -> SpeculationSpeed | None:
        """Return the predicted and the measured speed-up; None if no steps without drafts are known."""
        return None if self._timed is None else speculation_speed(*self._timed)

    @property
    def token_ids(self) -> list[int]:
        """Return the output tokens of the shown request."""
        return self._run.token_ids(self.sequence)

    @property
    def plain_token_ids(self) -> list[int] | None:
        """Return the output tokens of the same request without drafts, or None if unknown."""
        if self._plain is None or self.sequence not in self._plain.names:
            return None
        return self._plain.token_ids(self.sequence)

    def stop(self) -> None:
        """Stop the runs; the results so far stay."""
        if self._comparison is not None:
            self._comparison.stop()

    def close(self) -> None:
        self.stop()
        if hasattr(self, "_who"):  # it may be no child, and would not be closed with them
            close_tree(self._who)
        super().close()

    def wait(self, seconds: float | None = None) -> SpeculationView:
        """Wait until all runs have ended, at most `seconds`; return the view."""
        if self._comparison is not None:
            self._comparison.wait(seconds)
        return self

    def picture(self) -> str:
        style = f"<style>{STYLE}</style>"
        try:
            if self._problem:
                raise WorkbenchError(self._problem)
            verifications = self._run.verifications_of(self.sequence)
            shown = min(self.verification, len(verifications))
            figures = speculation_figures(self._run)
            parts = [draw_table(figures, self.speeds, self._output_difference(), self._speed_reason())]
            if 1 <= shown <= len(verifications):
                parts.append(describe_verification(shown, len(verifications), verifications[shown - 1], self._spell))
            found = place_tokens(self.token_ids, verifications)
            parts.append(draw_text(found, shown, self._spell))
            parts.append(
                draw_charts(figures, self.width) if figures["verifications"] else "<p>Nothing was drafted.</p>"
            )
        except Exception as error:
            parts = [f'<p role="alert">{escape(describe_error(error))}</p>']
        return svg.html(style, *parts)

    @property
    def _working(self) -> bool:
        return self._comparison is not None and not self._over

    def _speed_reason(self) -> str:
        if self._comparison is None:
            return "give plain=, a run of the same without drafts"
        if self._comparison.waiting:
            return "waits for another view's runs on this runner"
        return "both runs are under way" if self._working else "nothing was timed"

    def _output_difference(self) -> str:
        ours, theirs = self.token_ids, self.plain_token_ids
        if not theirs:
            return ""
        parts = (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        place = next(parts, None if len(ours) == len(theirs) else min(len(ours), len(theirs)))
        return f"the same {len(ours):,} as plain" if place is None else f"differs from plain at output token {place}"

    def _on_change(self) -> None:
        self.throttle.mark()

    def _ended(self) -> None:
        if self._comparison is None:  # closed meanwhile
            return
        both = self._comparison.events
        self._problem = both.problem
        self._over = True
        if both.plain:
            self._plain = SpeculationTables.from_source(both.plain[0])
        if len(both.plain) > 1:
            self._timed = _concatenate_runs(both.drafted[1 : len(both.plain)]), _concatenate_runs(both.plain[1:])
        self._halt.disabled = True
        self._read()
        self.steps.grows = False
        self.throttle.flush()
        self.keep()

    def redraw(self) -> None:
        if self._working:
            self._read()
        super().redraw()

    def _read(self) -> None:
        """Read the present run, and follow the last verification if that is the shown one."""
        if self._comparison is not None:
            self._run = SpeculationTables.from_source(list(self._comparison.events.current))
        names = self._run.names
        if list(self._who.options) != names:
            self._who.options = names
        if names and self.sequence not in names:
            self.sequence = names[0]
        self.steps.extend(0, len(self._run.verifications_of(self.sequence)))

    def _controls(self) -> None:
        grows = self._comparison is not None
        self.steps = Recorded(self, "verification", grows=grows, follow=grows)
        self._who = ipywidgets.Dropdown(description="request", style={"description_width": "6em"})
        self._halt = button(self.stop, "Stop", tooltip="end the runs")
        self._who.observe(lambda change: change["new"] and self.set_trait("sequence", change["new"]), "value")
        self.observe(lambda change: self._chosen(change["new"]), "sequence")
        self.shown.on_pick(self._pick)
        several = [self._who] if self._comparison is None and len(self._run.names) > 1 else []
        beside = several if self._comparison is None else [self._halt]
        self.children = (ipywidgets.HBox([self.steps, *beside]), self.shown)

    def _pick(self, key: str) -> None:
        if key.startswith("k"):  # a token's key; keys of bars serve the keyboard's focus only
            self.verification = int(key[1:])

    def _chosen(self, name: str) -> None:
        if name in self._who.options:
            self._who.value = name
        self.steps.extend(0, len(self._run.verifications_of(name)))
        self.verification = self.steps.last

    @traitlets.validate("sequence")
    def _known(self, proposal: Any) -> str:
        names = self._run.names
        if proposal["value"] not in names:
            raise WorkbenchError(f"sequence {proposal['value']!r}: this run has {', '.join(names) or 'none'}")
        return proposal["value"]


def _concatenate_runs(runs: Sequence[Sequence[Any]]) -> SpeculationTables:
    """Return the tables of several runs as one run."""
    return SpeculationTables.from_source([event for run in runs for event in run])


def _tokenizer_of(source: Any) -> Any:
    """Return the tokenizer of a record's model, or None if the source is no record or the model is unavailable."""
    path = getattr(source, "path", source)
    if not hasattr(source, "experiment_text") and not isinstance(path, str | Path):
        return None
    from workbench.experiment.experiment import Experiment
    from workbench.measure.simulation import tokenizer_of
    from workbench.runs.record import Record

    try:
        record = source if hasattr(source, "experiment_text") else Record.open(path)
        return tokenizer_of(Experiment.from_record(record.experiment_text))
    except WorkbenchError:  # another version's experiment, or a model that is not here
        return None
