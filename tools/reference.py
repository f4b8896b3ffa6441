"""Write docs/reference/ from the docstrings of the front door, the fields of `Experiment` and the table of backends.

    .venv/bin/python -m tools.reference           # writes the pages
    .venv/bin/python -m tools.reference --check   # says which are not as the code has them

tools/lint/reference.py holds the pages to the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import workbench
from workbench import widgets
from workbench.display import Table
from workbench.executors.capabilities import capability_table
from workbench.settings import field_comments

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by `python -m tools.reference`; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {"backends.md": _backends_page(), "experiment.md": _experiment_page(), "python.md": _python_page()}


def _backends_page() -> str:
    head = (
        "# What each backend carries out\n\n"
        "A backend that is asked for and cannot do what a model, its cache or its device wants is refused with the\n"
        "reason when the model is loaded; `auto` takes the next. Where `mlir` has no whole step, its operators decode\n"
        "block by block. `workbench doctor` prints the same table, and which backends work on this machine.\n\n"
    )
    return MADE + head + capability_table().markdown()


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models that an annotation mentions, outermost first."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in typing.get_args(annotation):
            yield from models_of(argument)


def settings_models() -> list[type[BaseModel]]:
    """Return `Experiment` and the models of all settings below it, each once, from the outside in."""
    reached: list[type[BaseModel]] = [workbench.Experiment]
    for model in reached:
        for field in model.model_fields.values():
            reached += [found for found in dict.fromkeys(models_of(field.annotation)) if found not in reached]
    return reached


def _experiment_page() -> str:
    head = (
        "# Settings of an experiment\n\n"
        "Every setting of `Experiment`, section by section. In YAML a section is a mapping; on the command line\n"
        "`--set cache.format=int4` changes one setting. A section with `kind` is chosen by it.\n"
    )
    return MADE + head + "".join(map(_section, settings_models()))


def _section(model: type[BaseModel]) -> str:
    comments = field_comments(model)
    rows = [
        (f"`{name}`", _type(field.annotation), _default(field), comments.get(name, ""))
        for name, field in model.model_fields.items()
    ]
    table = Table("", rows, ("setting", "values", "default", "meaning")).markdown()
    return f"\n## {model.__name__}\n\n{_prose(model)}\n" + (f"\n{table}" if rows else "")


def _type(annotation: Any) -> str:
    """Return an annotation as a reader writes it: literals as values, models as their sections."""
    if annotation is None or annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if origin is not None:
        inside = ", ".join(_type(each) for each in arguments if each is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)} of {inside}" if inside else getattr(origin, "__name__", "")
    return getattr(annotation, "__name__", str(annotation))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "empty"
    if isinstance(field.default, BaseModel):
        return f"`{field.default.__class__.__name__}`"
    return f"`{'null' if field.default is None else field.default}`"


def _python_page() -> str:
    head = "# The front door in Python\n\nNames of `workbench`, then of `workbench.widgets`.\n"
    return MADE + head + package_text(workbench) + package_text(widgets)


def package_text(package: types.ModuleType, names: Iterable[str] | None = None, level: int = 2) -> str:
    """Return a section for each public name of a package, or for `names`: signature and docstring.

    Its headings are of `level`."""
    text, with_page = "", settings_models()
    for name in sorted(dir(package)) if names is None else names:
        value = getattr(package, name)
        if name.startswith("__") or inspect.ismodule(value):
            continue
        text += f"\n{'#' * level} {package.__name__}.{name}\n\n"
        if value is workbench.Conversation:  # no setting of an experiment
            text += "```python\nConversation(*, system=None, tools=(), documents=(), turns=(), template=None, "
            text += "template_arguments={})\n```\n"
        elif isinstance(value, type) and issubclass(value, BaseModel):
            section = name if value in with_page else workbench.Experiment.__name__  # which has all of EngineConfig's
            text += f"Its settings are in [experiment.md](experiment.md#{section.lower()}).\n"
        else:
            text += f"```python\n{_signature(name, value)}\n```\n"
        text += f"\n{_prose(value)}\n" if value.__doc__ else ""
    return text


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = [_parameter(each) for each in signature.parameters.values()]
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = "" if signature.return_annotation is signature.empty or isinstance(value, type) else (
        f" -> {_annotation(signature.return_annotation)}"
    )  # fmt: skip
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){returned}"
    return line


def _parameter(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    kind = "" if annotation is inspect.Parameter.empty else f": {_annotation(annotation)}"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is inspect.Parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
    default = re.sub(r"<[^>]*>", "...", default).replace(f"{ROOT}/", "")  # no addresses, no place of this checkout
    return f"{parameter.name}{kind} = {default}" if kind else f"{parameter.name}={default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _prose(value: Any) -> str:
    """Return the docstring of a module's class or function as Markdown: indented blocks become fenced ones."""
    lines, fenced = [], False
    for line in (value.__doc__ or "").strip().splitlines():
        line = line.removeprefix("    ")
        code = line.startswith("    ") or (fenced and not line.strip())
        if code and not fenced:
            lines.append("```")
        elif fenced and not code:
            lines = [*lines[:-1], "```", ""] if not lines[-1] else [*lines, "```"]
        fenced = code
        lines.append(line[4:] if fenced else line)
    return "\n".join([*lines, "```"] if fenced else lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are out of date")
    check = parser.parse_args().check
    stale = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        file = FOLDER / name
        if not file.exists() or file.read_text() != text:
            stale.append(f"docs/reference/{name}")
            if not check:
                file.write_text(text)
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
