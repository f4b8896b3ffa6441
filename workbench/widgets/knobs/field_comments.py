"""Read the comments of a model's fields from its source: behind a field or right above it."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize

from pydantic import BaseModel


@functools.cache
def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """By field: its own description where it has one, else its comment; nothing where there is neither or no source."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _source_comments(base)
    return found | {name: field.description for name, field in model.model_fields.items() if field.description}


def _source_comments(model: type[BaseModel]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):  # made in a session that keeps no source
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0]: each for each in tokens if each.type == tokenize.COMMENT}
    alone = {n for n, each in comments.items() if not each.line[: each.start[1]].strip()}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    told = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = [*range(first, node.lineno), *range(node.lineno, (node.end_lineno or node.lineno) + 1)]
            told[node.target.id] = " ".join(comments[n].string.lstrip("# ") for n in lines if n in comments)
    return {name: words for name, words in told.items() if words}
