"""The rule of `experiments/real_parity.py`: a file that is read rightly is within its bound; weights that are off by a
thousandth are not, and other token ids are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_kernels import Backend
from experiments import real_parity
from experiments.real_parity import compare, compare_token_ids, step_lengths, within
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.model.formats.texts import open_tokenizer
from workbench.model.hf.convert_gguf import convert_to_gguf

TEXT = "def f(number):\n    return number + 1\n\n\n" * 10


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"transformers reads GGUF by {package}: pip install {package}")
    path = tmp_path / "a.gguf"
    convert_to_gguf(BUNDLED_MODELS["demo-draft"], path, "q4_0", torch.float32)
    monkeypatch.setattr(real_parity, "guide_text", lambda: TEXT)
    return path


def test_the_rule_holds_for_a_file_and_fails_for_other_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(compare(file, [Backend.EAGER], [1, 40]))
    assert [row["context"] for row in rows] == [1, 40] and all(map(within, rows))
    assert json.dumps(rows) and all(len(row["errors"]) == 4 for row in rows)
    read = real_parity.load_weights

    def off(*arguments: Any) -> dict[str, Any]:
        return {name: value * (1.001 if value.ndim == 2 else 1) for name, value in read(*arguments).items()}

    monkeypatch.setattr(real_parity, "load_weights", off)
    assert not any(map(within, compare(file, [Backend.EAGER], [40])))


def test_other_token_ids_are_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(file)
    assert tokenizer is not None

    class Reference:
        """Reads all of a text, or all but its digits."""

        def __init__(self, leaves_digits: bool):
            self.digits = "" if leaves_digits else "0123456789"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return list(tokenizer.encode("".join(each for each in text if each not in self.digits)))

    for leaves_digits in (True, False):
        reference = Reference(leaves_digits)
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, one=reference, **__: one)
        counted = compare_token_ids(file, 40)
        assert (counted["differing"] == 0) == leaves_digits
        assert all(any(map(str.isdigit, text)) for text in counted["first"])


@pytest.mark.parametrize("length, steps", [(1, [1]), (2, [1, 1]), (4, [1, 1, 1, 1]), (20, [12, 5, 1, 1, 1])])
def test_steps_are_two_chunks_and_then_single_tokens(length: int, steps: list[int]) -> None:
    assert step_lengths(length) == steps and sum(steps) == length
