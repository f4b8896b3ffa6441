"""The running softmax of both attention kernels: scores of one query's next keys become weights."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Lines, number, vector
from compiled_kernels.paged_attention.mlir_rules import KeyRun, Rules
from compiled_kernels.paged_attention.mlir_shape import PagedHeads


@dataclass(frozen=True)
class Softmax:
    """One query over its next keys: vectors of scores come in, vectors of weights go out.

    What the query has found so far lies in memory, its peak (the highest logit) and its total (the sum of weights):
    a `place` is where, with its type, as MLIR writes both (`%peaks[%slot] : memref<64xf32>`). `scale`, `none` and
    `zero` name vectors of constants.
    """

    lines: Lines
    shape: PagedHeads
    scale: str
    none: str
    zero: str

    @classmethod
    def begin(cls, lines: Lines, shape: PagedHeads) -> Softmax:
        scale, none, zero = (lines.constant(value, shape.lanes) for value in (number(shape.scale), "0xFF800000", "0.0"))
        return cls(lines, shape, scale, none, zero)

    @property
    def _kind(self) -> str:
        return vector(self.shape.lanes)

    def scaled(self, score: str) -> str:
        """Emit scores, scaled and capped."""
        score = self.lines.let(f"arith.mulf {score}, {self.scale} : {self._kind}")
        return self._capped(score) if self.shape.softcap else score

    def logits(self, score: str, visible: str, rules: Rules, run: KeyRun) -> tuple[str, str]:
        """Emit the logits of a run of keys, minus infinity where one is not visible, and which are: of those that come
        so far, what the mask shows and the score function does not hide."""
        score = rules.scored(self.lines, run, self.scaled(score))
        visible = rules.visible(self.lines, run, visible)
        if self.shape.score:
            bits = vector(self.shape.lanes, "i1")
            shown = self.lines.let(f"arith.cmpf une, {score}, {self.none} : {self._kind}")
            visible = self.lines.let(f"arith.andi {visible}, {shown} : {bits}")
        return visible, self._where(visible, score, self.none)

    def highest(self, logits: list[str]) -> str:
        """Emit the highest of vectors of logits, as one number."""
        found = logits[0]
        for each in logits[1:]:
            found = self.lines.let(f"arith.maximumf {found}, {each} : {self._kind}")
        return self.lines.let(f"vector.reduction <maximumf>, {found} : {self._kind} into f32")

    def raise_peak(self, place: str, highest: str) -> tuple[str, str]:
        """Emit the peak before, and the peak from now on as a vector."""
        before = self.lines.let(f"memref.load {place}")
        peak = self.lines.let(f"arith.maximumf {before}, {highest} : f32")
        self.lines.emit(f"memref.store {peak}, {place}")
        return before, self.lines.splat(peak, self.shape.lanes)

    def weight(self, logits: str, visible: str, peaks: str) -> str:
        """Emit exp(logit - peak); 0 where a key is not visible."""
        fallen = self.lines.let(f"arith.subf {logits}, {peaks} : {self._kind}")
        return self._where(visible, self.lines.exp(fallen, self.shape.lanes), self.zero)

    def move_total(self, place: str, before: str, peaks: str, weights: str) -> str:
        """Emit total * factor + the sum of `weights`; return the factor, exp(earlier peak - peak), which earlier sums
        need too.

        It is 1 where the peak has not moved, and that of a query that has seen nothing yet is minus infinity still.
        """
        lines, lanes = self.lines, self.shape.lanes
        earlier = lines.splat(before, lanes)
        same = lines.let(f"arith.cmpf oeq, {earlier}, {peaks} : {self._kind}")
        fallen = self._where(same, self.zero, lines.let(f"arith.subf {earlier}, {peaks} : {self._kind}"))
        factor = lines.let(f"vector.extract {lines.exp(fallen, lanes)}[0] : f32 from {self._kind}")
        total = lines.let(f"memref.load {place}")
        total = lines.let(f"arith.mulf {total}, {factor} : f32")
        total = lines.let(f"arith.addf {total}, {lines.hsum(weights, lanes)} : f32")
        lines.emit(f"memref.store {total}, {place}")
        return factor

    def _where(self, visible: str, value: str, otherwise: str) -> str:
        bits = vector(self.shape.lanes, "i1")
        return self.lines.let(f"arith.select {visible}, {value}, {otherwise} : {bits}, {self._kind}")

    def _capped(self, score: str) -> str:
        """Emit c tanh(score / c), with tanh x = 1 - 2 / (exp(2x) + 1)."""
        lines, kind, cap = self.lines, self._kind, self.shape.softcap
        double, one, two, most = (lines.constant(number(v), self.shape.lanes) for v in (2 / cap, 1.0, 2.0, cap))
        power = lines.exp(lines.let(f"arith.mulf {score}, {double} : {kind}"), self.shape.lanes)
        part = lines.let(f"arith.divf {two}, {lines.let(f'arith.addf {power}, {one} : {kind}')} : {kind}")
        return lines.let(f"arith.mulf {most}, {lines.let(f'arith.subf {one}, {part} : {kind}')} : {kind}")
