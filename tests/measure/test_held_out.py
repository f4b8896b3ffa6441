"""Held-out text: verified by its hash, and cut into windows that count every token once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.measure.quality.held_out import cut_windows, held_out_modules, sample_windows
from workbench.prompt.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(BUNDLED_MODELS["demo"])
assert TOKENIZER is not None


@settings(max_examples=tries(60))
@given(st.text(min_size=1, max_size=300), st.integers(2, 40))
def test_every_token_counts_once_and_from_half_a_context(text: str, context: int) -> None:
    assert TOKENIZER is not None
    control = TOKENIZER.special_token_ids
    ids = (control["<|begin|>"], *TOKENIZER.encode(text), control["<|end|>"])
    found = cut_windows(TOKENIZER, {"a": text}, context)
    assert [token for window in found for token in window.ids[window.first_scored :]] == list(ids[1:])
    assert sum(window.num_bytes for window in found) == len(text.encode())
    for number, window in enumerate(found):
        assert len(window.ids) <= context + 1
        assert window.first_scored >= (context // 2 if number else 1)


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    assert TOKENIZER is not None
    texts = {name: f"{name} = {number}\n" * 40 for number, name in enumerate("abcd")}
    every = cut_windows(TOKENIZER, texts, 16)
    assert {window.name for window in every} == set("abcd")
    one, again, other = (sample_windows(every, 6, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(set(one)) == 6
    refuses(
        "windows of at least 17 tokens", sample_windows, cut_windows(TOKENIZER, {"a": "x = 1"}, 16), 1, 0, min_tokens=17
    )


def manifest(folder: Path, files: dict[str, bytes], side: str = "held_out") -> Path:
    entries = [
        {"name": name, "side": side, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        for name, body in files.items()
    ]
    path = folder / "corpus.json"
    path.write_text(json.dumps({"python": "3.99", "files": entries}))
    return path


def test_only_what_the_card_lists_is_read(tmp_path: Path) -> None:
    files = {"a.py": b"a = 1\n", "b.py": b"b = 2\n", "gone.py": b"c = 3\n"}
    listed = manifest(tmp_path, files)
    (tmp_path / "a.py").write_bytes(files["a.py"])
    (tmp_path / "b.py").write_bytes(b"b = 2 # of another version\n")
    found = held_out_modules(listed, tmp_path)
    assert (found.texts, found.num_verified, found.num_listed) == ({"a.py": "a = 1\n"}, 1, 3)
    (tmp_path / "a.py").write_bytes(b"other")
    refuses("none of the 3 held-out modules of Python 3.99 is here", held_out_modules, listed, tmp_path)
    refuses("none of the 0", held_out_modules, manifest(tmp_path, files, side="training"), tmp_path)
