"""DuoAttention: some heads retrieve and see the whole text, all others stream and see its first and newest tokens.

Xiao et al., 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", equation 1,
where a head's gate alpha is trained to tell the two kinds apart:

    attention of a head  =  alpha full(q, K, V) + (1 - alpha) streaming(q, K, V),  alpha rounded to 0 or 1 when deployed
    streaming sees k     iff  k < sinks  or  q - k < recent

Here one group of query heads in `every` retrieves, in all layers, whatever its gate would be: heads of a group share
keys and values, so a page is passed over only where all of them stream. The paper trains the gates on a synthetic
passkey text, and frees the keys of streaming heads; a mask hides them and they stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DuoAttention:
    """A mask by head: heads of every `every`-th group of `share` see all, others `sinks` and `recent` tokens."""

    share: int = 3  # query heads of a group
    every: int = 2
    sinks: int = 16
    recent: int = 128

    def __call__(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        retrieves = head // self.share % self.every == 0
        return (key <= query) & (retrieves | (key < self.sinks) | (query - key < self.recent))
