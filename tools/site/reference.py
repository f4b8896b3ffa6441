"""Make the reference pages of the site: public functions and classes, the settings of an experiment, the table of
backends."""

from __future__ import annotations

import inspect
import re
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
from workbench.experiment.experiment import Workload, workload_class
from workbench.experiment.workloads import WORKLOADS
from workbench.settings import field_comments

ROOT = Path(__file__).resolve().parents[2]


def backends_table(root: Path) -> str:
    """Return the table of the features that each backend supports, as Markdown."""
    return capability_table().markdown()


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in a type annotation, outermost first."""
    if annotation is Workload:
        yield from map(workload_class, WORKLOADS)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in typing.get_args(annotation):
            yield from models_of(argument)


def settings_models() -> list[type[BaseModel]]:
    """Return `Experiment` and the models of all settings below it, each once, outer models before inner ones."""
    reached: list[type[BaseModel]] = [workbench.Experiment]
    for model in reached:
        for field in model.model_fields.values():
            reached += [found for found in dict.fromkeys(models_of(field.annotation)) if found not in reached]
    return reached


def settings_sections(root: Path) -> str:
    """Return a section for `Experiment` and for each model of settings below it."""
    return "".join(map(_section, settings_models()))


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
    if annotation is Workload:
        return " or ".join(map(_type, models_of(annotation)))
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


def public_names(root: Path) -> str:
    """Return a section for each name of `workbench`, then of `workbench.widgets`."""
    return package_text(workbench) + package_text(widgets)


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
