"""Show a text as one or two tokenizers cut it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench.errors import WorkbenchError
from workbench.widgets.tokens.picture import Cut, Side, picture
from workbench.widgets.view import View

TEXT = 'def greet(name):\n    return f"Grüße, {name}! 你好 👋"\n'
BYTES = "bytes"  # the tokenizer that ships and knows single bytes only


class TokenView(View):
    """`text` as its tokens, with their numbers and bytes; it can be typed on.

    `tokenizer`, and `beside` it another: a Tokenizer, a runner, a model's name or folder, or `bytes`. `sides` are the
    pieces that each makes. WorkbenchError for what has no tokenizer.
    """

    text = traitlets.Unicode()

    def __init__(self, text: str = TEXT, tokenizer: Any = "demo", beside: Any = None):
        self._tokenizers = [named(each) for each in (tokenizer, beside) if each is not None]
        super().__init__(text=text)
        box = ipywidgets.Textarea(description="text", rows=4, layout={"width": "auto"})
        traitlets.link((self, "text"), (box, "value"))
        self.watch("text")
        self.show(box)

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(cut_up(self.text, name, tokenizer) for name, tokenizer in self._tokenizers)

    def picture(self) -> str:
        return picture(self.sides)


def cut_up(text: str, name: str, tokenizer: Any) -> Side:
    """Tokenize `text`; control tokens written in it are plain characters."""
    try:
        ids = tokenizer.encode(text)
    except WorkbenchError as error:
        return Side(name, tokenizer.vocab, len(text), error=str(error))
    cuts = (Cut(i, tokenizer.token_bytes(i), tokenizer.spelling(i), tokenizer.is_control(i)) for i in ids)
    return Side(name, tokenizer.vocab, len(text), tuple(cuts))


def named(given: Any) -> tuple[str, Any]:
    """Return the name and tokenizer of `given`."""
    from workbench.engine.load import DEMO, folder_of
    from workbench.prompt.tokenizer import Tokenizer

    if isinstance(given, Tokenizer):
        return repr(given), given
    if isinstance(given, str | Path):
        folder = DEMO / BYTES if str(given) == BYTES else folder_of(str(given))
        found, name = None if folder is None else Tokenizer.from_folder(folder), str(given)
    else:
        found = getattr(given, "tokenizer", None)
        name = str(getattr(given, "asked", {}).get("model", type(given).__name__))
    if not isinstance(found, Tokenizer):
        raise WorkbenchError(f"{name}: has no tokenizer; give one, a runner, a model's name or folder, or {BYTES!r}")
    return Path(name).name, found
