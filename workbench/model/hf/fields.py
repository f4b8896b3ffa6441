"""Read foreign JSON by type: every error names the file, the field and the valid values."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes, read_json_object

REQUIRED: Any = object()  # no default: the field is required


@dataclass(frozen=True)
class ConfigFields:
    """A JSON object with the name of its source, for error messages. `null` counts as absent, as in Hugging Face
    configs.
    """

    values: dict[str, Any]
    source: str

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = 2**48) -> Any:
        right = f"an integer of at least {minimum}"
        value = self._value(key, default, right)
        if value is default:
            return default
        if not _is_integer(value) or value < minimum:
            raise self.invalid(key, value, right)
        if value > maximum:
            raise self.invalid(key, value, f"an integer of at most {maximum}")
        return value

    def number(self, key: str, default: Any = REQUIRED, zero: bool = False) -> Any:
        """Return a finite number above 0 as a float; with `zero`, 0 is allowed."""
        least = "of at least 0" if zero else "above 0"
        value = self._value(key, default, f"a number {least}")
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.invalid(key, value, f"a number {least}")
        if not (0 < value <= sys.float_info.max or (zero and value == 0)):
            raise self.invalid(key, value, f"a finite number {least}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """Return the token ids of a field with one id or a list of ids; None if absent or null."""
        value = self.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(token) for token in ids):
            raise self.invalid(key, value, "a token id (an integer), a list of them, or null")
        return tuple(dict.fromkeys(ids))

    def nested(self, key: str) -> ConfigFields | None:
        """Return the object in the field `key`; None if it is absent, null or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.invalid(key, value, "an object or null")
        return ConfigFields(value, f"{self.source}: {key}")

    def invalid(self, key: str, value: object, right: str) -> WorkbenchError:
        given = json.dumps(value, default=repr)
        given = given if len(given) <= 60 else given[:57] + "..."
        return WorkbenchError(f"{self.source}: {key} is {given}; it must be {right}")

    def _value(self, key: str, default: Any, right: str) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise WorkbenchError(f"{self.source}: {key} is missing; it must be {right}")
        return default


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises WorkbenchError if the file cannot be read or has no object."""
    text = read_bytes(file)
    try:
        return read_json_object(text, str(file))
    except UnreadableText as error:
        if error.reason.startswith("not JSON: "):
            reason = f"is not valid JSON ({error.reason.removeprefix('not JSON: ')}); fetch the file again"
            raise WorkbenchError(f"{file}: {reason}") from None
        raise


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
