"""Merges kept on disk are those that are found, whatever lies on the disk and whatever other processes write there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.files import cache_directory
from workbench.prompt.tokenization import kept_merges
from workbench.prompt.tokenization.kept_merges import FOLDER, keep_merges
from workbench.prompt.tokenization.sentencepiece_model import NORMAL, USER_DEFINED, SentencePieces

PIECES = ["a", "b", "ab", "ba", "aba", "abab", "c"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept_merges, "LARGE", 1)


def kept(pieces: SentencePieces) -> tuple[list[tuple[str, str]], bool]:
    """Return the merges, and whether they had to be found."""
    asked: list[bool] = []

    def find() -> list[tuple[str, str]]:
        asked.append(True)
        return found(pieces)

    return keep_merges(pieces.pieces, pieces.scores, pieces.kinds, find), bool(asked)


def found(pieces: SentencePieces) -> list[tuple[str, str]]:
    return pieces.merges({piece: id for id, piece in enumerate(pieces.pieces)})


def vocabulary(scores: list[float], kinds: list[int] | None = None, pieces: list[str] = PIECES) -> SentencePieces:
    return SentencePieces(pieces, scores, kinds or [NORMAL] * len(pieces))


SCORES = st.lists(st.sampled_from([0.0, -1.0, -2.5]), min_size=len(PIECES), max_size=len(PIECES))
KINDS = st.lists(st.sampled_from([NORMAL, USER_DEFINED]), min_size=len(PIECES), max_size=len(PIECES))


def test_each_vocabulary_has_its_own_merges() -> None:
    @settings(max_examples=50)
    @given(st.lists(st.tuples(st.permutations(PIECES), SCORES, KINDS), min_size=1, max_size=4))
    def law(vocabularies: list[tuple[list[str], list[float], list[int]]]) -> None:
        for _ in range(2):
            for pieces, scores, kinds in vocabularies:
                whole = vocabulary(scores, kinds, pieces)
                assert kept(whole)[0] == found(whole)
                assert kept(whole) == (found(whole), False) or not found(whole)

    law()


def test_a_damaged_file_is_found_anew_and_mended() -> None:
    whole = vocabulary([0.0] * len(PIECES))
    merges, was_found = kept(whole)
    assert was_found
    (file,) = (cache_directory() / FOLDER).iterdir()
    sound = file.read_bytes()
    damages = [sound[:size] for size in range(len(sound))]
    damages += [sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in range(len(sound))]
    for damaged in [*damages, sound + b"\0", b""]:
        file.write_bytes(damaged)
        assert kept(whole) == (merges, True)
        assert file.read_bytes() == sound and kept(whole) == (merges, False)


def test_several_at_once_leave_one_sound_file() -> None:
    whole = vocabulary([0.0] * len(PIECES))
    with ThreadPoolExecutor(8) as pool:
        assert all(merges == found(whole) for merges, _ in pool.map(lambda _: kept(whole), range(64)))
    assert len(list((cache_directory() / FOLDER).iterdir())) == 1 and not kept(whole)[1]


def test_without_a_place_to_write_they_are_found_each_time(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    whole = vocabulary([0.0] * len(PIECES))
    assert kept(whole) == kept(whole) == (found(whole), True)
