"""Read untrusted YAML and JSON files.

A few hundred bytes of YAML can expand to gigabytes (aliases of aliases), a number can have a million digits, a list can
be nested deeper than Python's recursion limit. Here all sizes are bounded, and every fault is an `UnreadableText` that
names the file, the line and the valid form. The result has plain values only, never objects.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs
import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from workbench.errors import WorkbenchError
from workbench.own_folder import OWN_FOLDER

try:
    from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue] (there where libyaml is)
except ImportError:  # PyYAML was built without libyaml
    CParser: Any = None

MAX_YAML_BYTES = 8 << 20  # bytes of the text with its aliases expanded
MAX_VALUES = 250_000  # values of a YAML text with its aliases expanded
MAX_JSON_BYTES = 16 << 20
DATA_VARIABLE = "WORKBENCH_DATA_DIR"
CHUNK = 1 << 20  # bytes read at once from a file of unknown length
MAX_DEPTH = 64  # nesting depth: readers of the values recurse, and Python's limit is 1,000
MAX_DIGITS = 100  # characters of a number, so that it is finite as a float and can be printed
MANY_DIGITS = re.compile(rf"[0-9]{{{MAX_DIGITS}}}")
NEEDS_PYTHON_PARSER = re.compile("[\\\\\ufeff]")  # libyaml refuses escapes of lone surrogates, drops byte order marks
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)  # PyYAML's own, of a scalar's text
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MERGE = "tag:yaml.org,2002:merge"
_own_paths: set[str] = set()  # paths that this process works with, as written
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,\n]')


class UnreadableText(WorkbenchError):
    """An error of a text: `where` it came from, and the `reason`."""

    def __init__(self, where: str, reason: str):
        where = " ".join(where.split()) if "\n" in where else where
        super().__init__(f"{where}: {reason}" if where else reason)
        self.where, self.reason = where, reason


def read_yaml(text: str | bytes, where: str = "", max_bytes: int = MAX_YAML_BYTES) -> Any:
    """Return the plain values in a YAML text of a single document; None for an empty text.

    Raises:
        UnreadableText: for a text that is not YAML, is longer than `max_bytes` or has more than `MAX_VALUES` values
            with expanded aliases, is nested deeper than `MAX_DEPTH`, has a number of more than `MAX_DIGITS` characters,
            or has a duplicate key.
    """
    loader = None
    try:
        loader = _loader(_decoded(text, where, max_bytes, "YAML"), max_bytes)
        return loader.get_single_data()
    except _Refused as error:
        raise UnreadableText(where, str(error)) from None
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "unreadable"
        raise UnreadableText(where, f"not YAML: {' '.join(problem.split())}{_place(error.problem_mark)}") from None
    except (yaml.YAMLError, *PARSE_ERRORS) as error:  # an invalid character, or an unhashable key
        if isinstance(error, UnreadableText):
            raise
        raise UnreadableText(where, f"not YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def read_json(text: str | bytes, where: str = "", max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the values in a JSON text.

    Raises:
        UnreadableText: as `read_yaml` does.
    """
    text = _decoded(text, where, max_bytes, "JSON")
    long = {"parse_int": _integer, "parse_float": _float} if MANY_DIGITS.search(text) else {}
    try:
        value = json.loads(text, object_pairs_hook=_object, **long)
    except _Refused as error:
        raise UnreadableText(where, _twice_in_json(text) or str(error)) from None
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise UnreadableText(where, f"not JSON: {error.msg}{line}, column {error.colno}") from None
    except ValueError as error:
        raise UnreadableText(where, f"not JSON: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UnreadableText(where, _too_deep("JSON")) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise UnreadableText(where, _too_deep("JSON"))
    return value


def read_json_object(text: str | bytes, where: str = "", max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON text; raise UnreadableText if the text has another value."""
    value = read_json(text, where, max_bytes)
    if not isinstance(value, dict):
        raise UnreadableText(where, f"must hold a JSON object, holds a {type(value).__name__}")
    return value


def read_bytes(path: Path | str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return a file's bytes; UnreadableText if it cannot be read, or has more than `max_bytes`."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
            while len(found) <= max_bytes and (more := file.read(CHUNK)):
                found += more
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UnreadableText(str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(found) > max_bytes:
        raise UnreadableText(str(path), _too_long("", max_bytes))
    return found


def read_yaml_file(path: Path | str, max_bytes: int = MAX_YAML_BYTES) -> Any:
    """Read a YAML file as `read_yaml` does; every error names the file."""
    return read_yaml(read_bytes(path, max_bytes), str(path), max_bytes)


def read_json_file(path: Path | str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file as `read_json` does; every error names the file."""
    return read_json(read_bytes(path, max_bytes), str(path), max_bytes)


def own_file(path: Path) -> Path:
    """Return `path`; or the path of this project's own file, if `path` begins with `experiments/` and does
    not exist.
    """
    if path.is_absolute() or path.parts[:1] != ("experiments",) or path.exists():
        return path
    ours = OWN_FOLDER / path
    return ours if ours.is_file() else path


def cache_directory() -> Path:
    """Return `$WORKBENCH_CACHE_DIR`, or the user's cache directory for the workbench. Its files may be deleted at any
    time.

    Equal to `compiled_kernels.result_cache.user_cache_directory`, whose package loads torch.
    """
    given = os.environ.get("WORKBENCH_CACHE_DIR")
    return Path(given or platformdirs.user_cache_dir("inference-workbench", appauthor=False))


def data_directory() -> Path:
    """Return `$WORKBENCH_DATA_DIR`, or the user's data directory for the workbench, which has downloaded models."""
    given = os.environ.get(DATA_VARIABLE)
    return Path(given or platformdirs.user_data_dir("inference-workbench", appauthor=False))


def note_own(path: Path) -> Path:
    """Note `path` as one that this process works with, and return it: `without_own_paths` shortens it in texts for
    clients.
    """
    files = path.parent.glob(f"*{path.suffix}") if path.is_file() else ()  # the other parts of a model too
    _own_paths.update(str(form) for each in (path, *files) for form in (each, each.absolute(), each.resolve()))
    return path


def without_own_paths(words: str) -> str:
    """Return a text for clients in which paths of this process are shortened to their last names; a file in a known
    folder keeps its path from that folder. Other path-like texts come from the client and stay.
    """
    if os.sep not in words:
        return words
    folders = (Path.cwd(), Path(__file__).parent, cache_directory(), data_directory(), Path(sys.prefix))
    own = {*_own_paths, *map(str, folders)}
    pattern = _path_pattern(frozenset(each for each in own if os.sep in each and Path(each).name))
    return pattern.sub(lambda found: "" if found["within"] else Path(found["own"]).name, words)


@lru_cache(4)
def _path_pattern(paths: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(paths, key=len, reverse=True)
    listed = "|".join(("" if each.startswith(os.sep) else r"(?<!/)") + re.escape(each) for each in longest_first)
    return re.compile(rf"(?<![\w.-])(?P<own>{listed})(?:(?P<within>/(?=\w))|(?![\w-]))")


class _Refused(yaml.YAMLError):
    """Raised for a text that is valid YAML but refused by this module."""


class _Bounded(Composer, SafeConstructor, Resolver):
    """Compose a parser's events as PyYAML's SafeLoader does, and check the bounds per event, so too large values are
    never built.
    """

    check_event: Any  # the parser's
    peek_event: Any

    def __init__(self, most: int) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._most = most
        self._open = 0  # open containers
        self._count = 0
        self._sizes: dict[int, tuple[int, int, int]] = {}  # characters, values, depth of a whole node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        alias = self.check_event(yaml.AliasEvent)
        self._open += 1
        self._count += 1
        if self._count > MAX_VALUES:
            raise _Refused(_too_many_values("") + _place(event.start_mark))
        if self._open > MAX_DEPTH + 1:  # the innermost node is no container
            raise _Refused(_too_deep("YAML") + _place(event.start_mark))
        node = super().compose_node(parent, index)
        self._open -= 1
        if node is None:
            return None
        if alias and id(node) not in self._sizes:
            raise _Refused(f"the alias *{event.anchor} is inside the value that it repeats{_place(event.start_mark)}")
        size, values, depth = self._sizes.setdefault(id(node), self._measured(node))
        if size > self._most:
            raise _Refused(_too_long("its aliases written out, ", self._most) + _place(event.start_mark))
        if values > MAX_VALUES:
            raise _Refused(_too_many_values("its aliases written out, ") + _place(event.start_mark))
        if self._open + depth > MAX_DEPTH + 1:
            raise _Refused(_too_deep("YAML") + _place(event.start_mark))
        return node

    def _measured(self, node: yaml.Node) -> tuple[int, int, int]:
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > MAX_DIGITS and node.tag in NUMBERS:
                raise _Refused(_too_many_digits() + _place(node.start_mark))
            return len(node.value), 1, 1
        inside = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in node.value for each in pair]
        sizes = [self._sizes[id(each)] for each in inside]
        characters, values, depths = zip(*sizes, strict=True) if sizes else ((), (), ())
        return sum(characters), 1 + sum(values), 1 + max(depths, default=0)

    def construct_document(self, node: yaml.Node) -> Any:
        self._refuse_twice(node, (), set())
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except PARSE_ERRORS as error:  # `2026-13-01`, `!!int none`, ...
            given = f" (given {node.value:.40})" if isinstance(node, yaml.ScalarNode) else ""
            problem = f"{error}{given}; quote a value that is meant as a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def _refuse_twice(self, node: yaml.Node, path: tuple[str, ...], looked_at: set[int]) -> None:
        """Refuse a duplicate key in any notation; YAML would silently keep the last one."""
        if id(node) in looked_at:
            return
        looked_at.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._refuse_twice(item, (*path, str(index)), looked_at)
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[Any, int] = {}
        for key, value in node.value:
            inside = (*path, str(key.value))
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                name = MERGE if key.tag == MERGE else (self.construct_object(key),)
                if name in lines:
                    raise _Refused(_twice(inside, lines[name], line))
                lines[name] = line
            self._refuse_twice(value, inside, looked_at)


class _InPython(_Bounded, Reader, Scanner, Parser):
    """The Python parser. It reads all output of `experiment.yaml.write_yaml`, escaped lone surrogates included."""

    def __init__(self, text: str, most: int) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        _Bounded.__init__(self, most)


class _InC(_Bounded, *([] if CParser is None else [CParser])):
    """The parser of libyaml, five times as fast."""

    def __init__(self, text: str, most: int) -> None:
        CParser.__init__(self, text)
        _Bounded.__init__(self, most)


def _loader(text: str, most: int) -> Any:
    return (_InPython if CParser is None or NEEDS_PYTHON_PARSER.search(text) else _InC)(text, most)


def _decoded(text: str | bytes, where: str, max_bytes: int, kind: str) -> str:
    if len(text) > max_bytes:
        raise UnreadableText(where, _too_long("", max_bytes))
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UnreadableText(where, f"not {kind}: line {line} is not UTF-8; save it as UTF-8") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Refused("a key is given twice; leave one of them")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _Refused(_too_many_digits())
    return int(text)


def _float(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise _Refused(_too_many_digits())
    return float(text)


def _deeper(value: Any, most: int) -> bool:
    """Return whether containers are nested deeper than `most`, checked level by level."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [each for found in level for each in (found.values() if isinstance(found, dict) else found)]
    return True


def _twice_in_json(text: str) -> str | None:
    """Find the path and lines of the first duplicate key, which the parser does not report."""
    line, last = 1, ""
    path: list[Any] = []  # an index for a list, a key for an object
    lines: list[dict[str, int] | None] = []  # line by key, for each open object
    for found in TOKEN.finditer(text):
        token = found[0]
        if token == "\n":
            line += 1
        elif token in ("{", "["):
            lines.append({} if token == "{" else None)
            path.append("" if token == "{" else 0)
        elif token in ("}", "]"):
            lines.pop()
            path.pop()
        elif token == ":" and lines and (keys := lines[-1]) is not None:
            key = path[-1] = json.loads(last)
            if key in keys:
                return _twice(map(str, path), keys[key], line)
            keys[key] = line
        elif token == "," and lines and lines[-1] is None:
            path[-1] += 1
        last = token if token != "\n" else last
    return None


def _twice(path: Iterable[str], first: int, second: int) -> str:
    return f"{'.'.join(path)} is given twice, in lines {first} and {second}; leave one of them"


def _too_deep(kind: str) -> str:
    return f"{kind} nested more than {MAX_DEPTH} deep; write it flatter"


def _too_long(front: str, most: int) -> str:
    return f"too long: {front}more than {most:,} bytes; give less"


def _too_many_values(front: str) -> str:
    return f"too long: {front}more than {MAX_VALUES:,} values; give less"


def _too_many_digits() -> str:
    return f"a number of more than {MAX_DIGITS} digits; write a smaller one, or quote it as a text"


def _place(mark: Any) -> str:
    return "" if mark is None else f" (line {mark.line + 1:,}, column {mark.column + 1:,})"


def write_atomically(path: Path, fill: Callable[[BinaryIO], object], replace: bool = True) -> None:
    """Write a file atomically: `fill` writes its contents, which are synced to disk before the file gets the name
    `path`.

    Without `replace`, raises FileExistsError if the name is taken, even by a concurrent writer."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        if not replace and _claim_name(path, temporary):
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _claim_name(path: Path, content: Path) -> bool:
    """Claim the name `path` exclusively.

    Returns True with `content` linked under it, or False and an empty file where the file system has no hard links."""
    try:
        os.link(content, path)
        return True
    except FileExistsError:
        raise
    except OSError:
        path.open("xb").close()
        return False
