"""Show the tokens of a text by one or two tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.tokens.picture import Tokenization, TokenizedPiece, draw_tokenizations
from workbench.widgets.view import PictureWidget

EXAMPLE_TEXT = 'def greet(name):\n    return f"Grüße, {name}! 你好 👋"\n'
BYTE_TOKENIZER = "bytes"  # the bundled tokenizer with one token for each byte


class TokenView(PictureWidget):
    """A view of the tokens of an editable `text`, with ids and bytes.

    `tokenizer`, and `beside` for a second one, are a Tokenizer, a runner, a model's name or folder, or `bytes`. `sides`
    are the tokenizations. Raises WorkbenchError for a source without a tokenizer.
    """

    text = traitlets.Unicode()

    def __init__(self, text: str = EXAMPLE_TEXT, tokenizer: Any = "demo", beside: Any = None):
        self._tokenizers = [resolve_tokenizer(each) for each in (tokenizer, beside) if each is not None]
        super().__init__(text=text)
        box = ipywidgets.Textarea(description="text", rows=4, layout={"width": "auto"})
        self.watch("text")
        self.show(self.linked("text", box))

    @property
    def sides(self) -> tuple[Tokenization, ...]:
        return tuple(tokenize(self.text, name, tokenizer) for name, tokenizer in self._tokenizers)

    def picture(self) -> str:
        return draw_tokenizations(self.sides)


def tokenize(text: str, name: str, tokenizer: Any) -> Tokenization:
    """Tokenize `text`; names of control tokens in it are plain characters."""
    try:
        ids = tokenizer.encode(text)
    except WorkbenchError as error:
        return Tokenization(name, tokenizer.vocab_size, len(text), error=str(error))
    cuts = (TokenizedPiece(i, tokenizer.token_bytes(i), tokenizer.id_to_token(i), tokenizer.is_special(i)) for i in ids)
    return Tokenization(name, tokenizer.vocab_size, len(text), tuple(cuts))


def resolve_tokenizer(given: Any) -> tuple[str, Any]:
    """Return (name, tokenizer) of a Tokenizer, a runner, or a model's name or folder.

    Raises:
        WorkbenchError: `given` has no tokenizer.
    """
    from workbench.engine.loaded_model import DEMO_FOLDER, model_folder
    from workbench.model.formats.texts import open_tokenizer
    from workbench.prompt.tokenization.tokenizer import Tokenizer

    if isinstance(given, Tokenizer):
        return repr(given), given
    if isinstance(given, str | Path):
        folder = DEMO_FOLDER / BYTE_TOKENIZER if str(given) == BYTE_TOKENIZER else model_folder(str(given))
        found, name = None if folder is None else open_tokenizer(folder), str(given)
    else:
        found = getattr(given, "tokenizer", None)
        name = str(getattr(given, "load_arguments", {}).get("model", type(given).__name__))
    if not isinstance(found, Tokenizer):
        raise WorkbenchError(
            f"{name}: has no tokenizer; give one, a runner, a model's name or folder, or {BYTE_TOKENIZER!r}"
        )
    return Path(name).name, found
