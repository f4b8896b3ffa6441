"""At their bounds, filters do what their equations say: floats that are drawn never meet a bound, equal logits do."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process

from workbench.sampling.filters import MinP, TopK, TopP

NONE = torch.LongTensor(1, 0)


@pytest.mark.parametrize("vocab", [2, 4, 8, 64])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_top_p_keeps_no_tie_beyond_its_mass(vocab: int, kept: int) -> None:
    """Of equal tokens, as many as hold p exactly; one more than those holds more than is asked for."""
    kept, logits = min(kept, vocab), torch.zeros(1, vocab)
    filtered = TopP(kept / vocab)(logits, ())
    assert int(filtered.isfinite().sum()) == kept
    assert torch.equal(filtered, logits_process.TopPLogitsWarper(kept / vocab)(NONE, logits))


@pytest.mark.parametrize("vocab", [2, 3, 64])
def test_min_p_keeps_a_token_at_its_bound(vocab: int) -> None:
    """A token as probable as min-p asks for stays: at 1, all that are equal to the most probable one."""
    logits = torch.tensor([[*[0.0] * (vocab - 1), -1.0]])
    filtered = MinP(1.0)(logits)
    assert int(filtered.isfinite().sum()) == vocab - 1
    assert torch.equal(filtered, logits_process.MinPLogitsWarper(1.0)(NONE, logits))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_keeps_all_that_equal_the_last(k: int) -> None:
    logits = torch.tensor([[2.0, 2.0, 1.0, 1.0, 0.0]])
    assert int(TopK(k)(logits).isfinite().sum()) == (4 if k == 3 else 2)
