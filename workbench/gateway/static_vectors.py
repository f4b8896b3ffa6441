"""Embed questions by `wordllama` (the extra `semantic`): the mean of static token vectors, without a neural network.

Source: https://pypi.org/project/wordllama
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from workbench.errors import installed_by


class StaticVectors:
    """The function that embeds questions for the semantic cache; WorkbenchError if the package is not installed."""

    def __init__(self) -> None:
        with installed_by("semantic", "answers.semantic"):
            package = importlib.import_module("wordllama")
        # The package contains the vectors and the tokenizer, in the layout of its download folder.
        folder = Path(str(package.__file__)).parent
        self._model = package.WordLlama.load(cache_dir=folder, disable_download=True)

    def __call__(self, texts: list[str]) -> Sequence[Sequence[float]]:
        """Return a vector for each text."""
        return self._model.embed(texts).tolist()
