"""Store the states of a recurrent layer, one per page, and run its recurrence over the spans of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.memory import zero_pages
from workbench.batch import TokenBatch
from workbench.kv_cache.format import StateShape
from workbench.kv_cache.layer import CacheLayer, Recurrence, States
from workbench.kv_cache.page_formats import Pages


class StateLayer(CacheLayer):
    """The recurrent states of one layer: for each part of the state a tensor [page, ...], in float32, or float64 if the
    model is.
    """

    def __init__(self, shape: StateShape, group: int, pages: int, dtype: torch.dtype, device: str):
        self.group = group
        exact = torch.promote_types(dtype, torch.float32)
        parts = (zero_pages((pages + 1, *part), exact, device) for part in shape.parts)
        self.stored = Pages(tuple(parts))
        self.pages = {group: self.stored}

    def scan(self, rows: Tensor, batch: TokenBatch, recurrence: Recurrence) -> Tensor:
        """Run `recurrence` over each span of rows [token, columns], starting from the state before the span: [token,
        columns].

        Decodes run together; other spans run one by one, split where a state is stored. The first state of a text is
        zero.
        """
        starts, slots = batch.span_starts.tolist(), batch.slot_mapping[self.group].tolist()
        begins = batch.positions[batch.span_starts[:-1].long()] == 0
        pages = batch.page_tables[self.group][:, 0].long()
        states = tuple(part[pages] for part in self.stored.tensors)
        for part in states:
            part[begins] = 0
        lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        decodes = next((seq for seq, length in enumerate(lengths) if length > 1), len(lengths))
        found = []
        if decodes:
            y, after = recurrence(rows[:decodes, None], tuple(part[:decodes] for part in states))
            self._store(slots[:decodes], after)
            found.append(y[:, 0])
        for seq in range(decodes, len(lengths)):
            mine, start = tuple(part[seq : seq + 1] for part in states), starts[seq]
            for stop in range(start + 1, starts[seq + 1] + 1):
                if slots[stop - 1] or stop == starts[seq + 1]:
                    y, mine = recurrence(rows[None, start:stop], mine)
                    self._store(slots[stop - 1 : stop], mine)
                    found.append(y[0])
                    start = stop
        return torch.cat(found)

    def _store(self, pages: list[int], states: States) -> None:
        """Store states [seq, ...] in `pages`; states in the null page are never read."""
        index = torch.tensor(pages, device=self.stored.tensors[0].device)
        for part, values in zip(self.stored.tensors, states, strict=True):
            part[index] = values
