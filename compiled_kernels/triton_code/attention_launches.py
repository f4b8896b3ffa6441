"""Plan the launches of attention: group rows, separate spans by kind, and split loops over the context if there are too
few programs to fill the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.attention_rules import AttentionRules
from compiled_kernels.scalar_code.intervals import reach
from compiled_kernels.scalar_code.program import Program
from compiled_kernels.scalar_code.triton import triton_function
from compiled_kernels.triton_code.attention import ANY, LONGER, SINGLE, merge
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, floor_power_of_two, num_processors, power_of_two

MIN_DOT_SIZE = 16  # minimum tile size of tensor cores
MAX_ROWS = 128  # two warp groups of 64 rows, the widest of Hopper's matrix instruction
MAX_ACCUMULATORS = 128 * 128  # rows times dim in registers
FIXED_ROWS = 64  # rows of a tile if spans of one token and longer spans must use the same kernel
EXACT_ROWS = 16  # rows of a float32 tile, which does not use tensor cores and keeps its operands in registers
# Half the stages of the pipeline go to the pages' numbers, which are read before the keys: two tiles are under way.
STAGES = 5
PROGRAMS_PER_PROCESSOR = 3  # programs of a decode that a processor holds: 70 KiB of shared memory each
MIN_TILES_PER_SPLIT = 2  # minimum tiles of a split part, so that its output is small compared with its input
MAX_SPLITS = 64
MIN_OCCUPANCY = 0.85  # fraction of the highest possible share of occupied places


def choose_splits(programs: int, processors: int, most: int, decode: bool) -> int:
    """Return the number of parts, a power of two, into which each loop over the context is split. Decode waits for
    memory: use the fewest parts that fill the device nearly as well as any number would. A long span is limited by
    arithmetic: split only for idle processors.
    """
    if not decode:
        return min(most, floor_power_of_two(processors // max(1, programs)))
    choices = [1 << bits for bits in range(most.bit_length())]
    waves = [max(1, programs) * parts / (PROGRAMS_PER_PROCESSOR * processors) for parts in choices]
    taken = [wave / math.ceil(wave) for wave in waves]
    return next(parts for parts, share in zip(choices, taken, strict=True) if share >= MIN_OCCUPANCY * max(taken))


def reach_of(held: int, window: int, sinks: int) -> int:
    """Return the largest number of the `held` positions that one query sees."""
    return min(held, window + sinks) if window else held


@dataclass(frozen=True)
class AttentionLaunches:
    """The launches of an attention `kernel` (`attend`, or a kernel with the same arguments) over up to `held`
    positions, in tiles of `tile` keys.

    `walk` has the arguments that only this kernel takes. `batch_invariant`: all spans are computed in the same way.
    """

    kernel: Any
    q: Tensor
    spans: Spans
    parameters: AttentionParameters
    rules: AttentionRules
    num_kv_heads: int
    held: int
    tile: int
    walk: Mapping[str, Any]
    splits: int | None = None  # parts of each walk, where they are not to be chosen by shape
    batch_invariant: bool = False

    @property
    def has_sink_logits(self) -> bool:
        return self.parameters.sink_logits is not None

    @property
    def _functions(self) -> dict[str, Any]:
        """Return the user's mask unless it is known to show everything, and the score function; None if absent."""
        mask, score = (Program.parse(text) if text else None for text in (self.rules.mask, self.rules.score))
        programs = {"MASK": mask, "REACH": None if mask is None else reach(mask), "SCORE": score}
        return {name: None if each is None else triton_function(each) for name, each in programs.items()}

    def plan(self) -> tuple[list[KernelLaunch], Tensor]:
        """Return the launches and the output that they fill. Spans of one token and longer spans have separate
        launches; each launch skips the spans of the other kind."""
        (tokens, heads, dim), seqs, decode_only = self.q.shape, len(self.spans.context_lengths), self.spans.decode_only
        # Rows outside every span must be zero; if every span has one row there are none.
        dense = torch.contiguous_format
        out = (torch.empty_like if decode_only else torch.zeros_like)(self.q, memory_format=dense)
        share = heads // self.num_kv_heads
        single = power_of_two(share, MIN_DOT_SIZE)
        if decode_only and not self.batch_invariant:
            return self._of(out, SINGLE.value, single, alone=True), out
        if self.batch_invariant:
            rows = FIXED_ROWS if self.q.dtype.itemsize == 2 else EXACT_ROWS
            return self._of(out, ANY.value, max(single, rows), alone=True), out
        padded = power_of_two(dim, MIN_DOT_SIZE)
        most = min(MAX_ROWS, MAX_ACCUMULATORS // padded) if self.q.dtype.itemsize == 2 else EXACT_ROWS
        longer = max(single, min(most, power_of_two(ceil_div(tokens, seqs) * share)))
        if seqs == 1:  # one span, and it is not of one token
            return self._of(out, ANY.value, longer, alone=True), out
        both = (SINGLE.value, single), (LONGER.value, longer)
        return [launch for kind, rows in both for launch in self._of(out, kind, rows, alone=False)], out

    def _of(self, out: Tensor, kind: int, rows: int, alone: bool) -> list[KernelLaunch]:
        """Return the walk over spans of one kind, and the merge where it is split; `alone` if there is no
        other kind."""
        q, (tokens, heads, dim), seqs = self.q, self.q.shape, len(self.spans.context_lengths)
        together = 1 if kind == SINGLE.value else rows // (heads // self.num_kv_heads)
        count = seqs if kind == SINGLE.value else tokens // together + seqs
        seen = reach_of(self.held, *self.rules[:2])
        most = min(MAX_SPLITS, floor_power_of_two(ceil_div(seen, self.tile) // MIN_TILES_PER_SPLIT))
        decode = kind == SINGLE.value
        parts = self.splits or choose_splits(count * self.num_kv_heads, num_processors(q.device), most, decode)
        buffers = {"parts": out, "logs": out}  # unused where nothing is split
        if parts > 1:
            buffers = {
                "parts": q.new_empty((tokens, heads, parts, dim), dtype=torch.float32),
                "logs": q.new_empty((tokens, heads, parts), dtype=torch.float32),
            }
        padded, (scale, _, softcap, sink_logits, *_) = power_of_two(dim, MIN_DOT_SIZE), self.parameters
        window, sinks, *_ = self.rules
        shared = {
            "span_starts": self.spans.starts, "sink_logits": q if sink_logits is None else sink_logits, "out": out,
            "seqs": seqs, "heads": heads, "dim": dim, "DIM": padded, "WHOLE_DIM": padded == dim, **buffers,
            "splits": parts, "NORMALIZED": self.rules.normalized,
        }  # fmt: skip
        walked = {
            **shared, "q": q, "q_token": q.stride(0), "q_head": q.stride(1), "q_dim": q.stride(2),
            "context_lengths": self.spans.context_lengths, "scale": scale, "softcap": softcap, "window": window,
            "sinks": sinks, "SHARE": heads // self.num_kv_heads, "WINDOW": window > 0, "SOFTCAP": softcap > 0,
            **self.walk, "TOKENS": together, "ROWS": rows, "KIND": kind, "SPLIT": parts > 1,
            "SINK_LOGITS": self.has_sink_logits and parts == 1, **self._functions,
        }  # fmt: skip
        warps = 8 if rows == MAX_ROWS else 4
        found = [
            KernelLaunch(self.kernel, (count, self.num_kv_heads, parts), walked, num_warps=warps, num_stages=STAGES)
        ]
        if parts > 1:
            merged = {
                **shared, "SPLITS": power_of_two(parts), "KIND": ANY.value if alone else kind,
                "SINK_LOGITS": self.has_sink_logits,
            }  # fmt: skip
            found.append(KernelLaunch(merge, (tokens, heads), merged))
        return found
