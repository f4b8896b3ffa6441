"""The pages of docs/reference are what the code says."""

from __future__ import annotations

import pytest

from tools import reference


@pytest.mark.parametrize("name", reference.pages())
def test_a_page_is_as_the_code_has_it(name: str) -> None:
    written = (reference.FOLDER / name).read_text()
    assert written == reference.pages()[name], "run `python -m tools.reference`"


def test_every_setting_has_its_row() -> None:
    page = reference.pages()["experiment.md"]
    for setting in ("cache", "page_size", "max_num_seqs", "temperature", "num_speculative_tokens"):
        assert f"| `{setting}` |" in page
