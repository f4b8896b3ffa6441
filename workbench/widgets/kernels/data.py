"""Fetch operators and their compilation stages on demand, and highlight their code.

Highlighted code has the CSS classes k (keyword), c (comment), s (string), n (number), t (type or operation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

from workbench.errors import WorkbenchError, describe_error

DEFAULT_STAGE = {
    "inductor": "post_grad",
    "mlir": "linalg",
    "triton": "source",
    "eager": "source",
}  # the stage that shows fusion best
LANGUAGES = {
    "source": "python", "api": "python", "graph": "python", "decomposed": "python", "post_grad": "python",
    "ir": "python", "fused_ir": "python", "python": "python", "cpp": "cpp", "triton": "python", "llir": "llvm",
    "ptx": "ptx", "asm": "gas", "torch": "mlir", "linalg": "mlir", "transformed": "mlir", "bufferized": "mlir",
    "vector": "mlir", "llvm": "mlir", "ttir": "mlir", "ttgir": "mlir",
}  # fmt: skip
CODE_STYLE = (
    ".wb-code .k{color:var(--jp-mirror-editor-keyword-color,#008000);font-weight:bold}"
    ".wb-code .c{color:var(--jp-mirror-editor-comment-color,#408080);font-style:italic}"
    ".wb-code .s{color:var(--jp-mirror-editor-string-color,#ba2121)}"
    ".wb-code .n{color:var(--jp-mirror-editor-number-color,#6a737d)}"
    ".wb-code .t{color:var(--jp-mirror-editor-builtin-color,#0550ae)}"
)


@contextmanager
def as_workbench_error() -> Iterator[None]:
    """Turn a BackendError raised in the `with` block into a WorkbenchError."""
    from compiled_kernels.backends import BackendError

    try:
        yield
    except BackendError as error:
        raise WorkbenchError(str(error)) from None


def validate_name(kind: str, word: str, words: Iterable[str]) -> str:
    from compiled_kernels.cases import require_known as require_known

    return require_known(kind, word, words)


def operator_names() -> list[str]:
    from compiled_kernels.cases import suites

    return [suite.operator for suite in suites()]


def case_names(operator: str) -> list[str]:
    """Return the names of an operator's cases, timed ones first."""
    from compiled_kernels.cases import suite_of

    return [case.name for case in sorted(suite_of(operator).cases, key=lambda case: not case.timed)]


def case_name(operator: str, name: str | None) -> str:
    from compiled_kernels.cases import case_of, suite_of

    return case_of(suite_of(operator), name).name


def make_stages(operator: str, case: str, backend: str) -> Any:
    """Return the `CompilerStages` of a backend, or a text with the reason why they cannot be made here."""
    from compiled_kernels.backends import Backend
    from compiled_kernels.cases import case_of, suite_of
    from compiled_kernels.stages import stages_of

    suite = suite_of(operator)
    try:
        return stages_of(suite, None if backend == Backend.TRITON else case_of(suite, case), Backend(backend))
    except Exception as error:  # compilers raise many kinds; the other backends can still be shown
        return f"cannot be made here: {describe_error(error)}"


def fusion_data(made: Any) -> Mapping[str, Any] | None:
    stage = made.stages.get("fusion") if hasattr(made, "stages") else None
    return None if stage is None else stage.data


def default_stage(backend: str, texts: Mapping[str, str]) -> str:
    return DEFAULT_STAGE[backend] if DEFAULT_STAGE[backend] in texts else next(iter(texts))


def highlight_lines(text: str, stage: str) -> list[str]:
    """Return the lines of `text` as HTML; plain without Pygments, or if Pygments does not know the language."""
    lexer = _lexer(LANGUAGES.get(stage, ""))
    if lexer is None:
        return [escape(line) for line in text.split("\n")]
    lines = [""]
    for kind, value in lexer.get_tokens(text):
        name = _class(kind)
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            if part:
                lines[-1] += f'<b class="{name}">{escape(part)}</b>' if name and part.strip() else escape(part)
    return lines[: text.count("\n") + 1]


def _lexer(language: str) -> Any:
    try:
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound
    except ImportError:
        return None
    kept = {"stripnl": False, "ensurenl": False}
    if language == "mlir":
        return _mlir()(**kept)
    try:
        return get_lexer_by_name(language, **kept) if language else None
    except ClassNotFound:
        return None


def _mlir() -> Any:
    from pygments.lexer import RegexLexer
    from pygments.token import Comment, Keyword, Name, Number, String, Text

    class Mlir(RegexLexer):
        """A small subset of MLIR's syntax: comments, keywords, operations, types, numbers and strings."""

        tokens = {  # noqa: RUF012 (a class as Pygments reads it)
            "root": [
                (r"//[^\n]*", Comment),
                (r'"[^"\n]*"', String),
                (r"[%#^][\w$.-]+", Text),
                (r"\b(module|return|loc|to|into|step|iter_args|ins|outs|dense)\b", Keyword),
                (r"\b[a-z_]+\.[\w.]+", Name.Builtin),
                (r"![\w.]+|\b(tensor|memref|vector)\b", Keyword.Type),
                (r"\b\d[\w.+-]*", Number),
                (r"[\w$.]+", Text),
                (r"\s+|.", Text),
            ]
        }

    return Mlir


def _class(kind: Any) -> str:
    from pygments.token import Comment, Keyword, Name, Number, String

    if kind in Keyword.Type or kind in Name.Builtin or kind in Name.Function:
        return "t"
    kinds = (Comment, "c"), (Keyword, "k"), (String, "s"), (Number, "n")
    return next((name for each, name in kinds if kind in each), "")
