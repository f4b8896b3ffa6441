"""Read the sampling parameters that a model's authors recommend, from the generation_config.json in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import explain
from workbench.model.hf.fields import ConfigFields, read_object
from workbench.request import SamplingParameters

GENERATION_FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters in a folder's generation_config.json that differ from the defaults here; empty if
    there is no such file.

    `do_sample: false` is temperature 0. Raises WorkbenchError for invalid values.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return {}
    values = read_object(path)
    found = {name: values[name] for name in FIELDS if values.get(name) is not None}
    if not ConfigFields(values, str(path)).boolean("do_sample", default=True):
        found["temperature"] = 0.0
    if found.get("top_k") == -1:  # off, as vLLM writes it
        found["top_k"] = 0
    try:
        parsed = SamplingParameters.model_validate(found, strict=True)
    except ValidationError as error:
        raise explain(error, str(path), SamplingParameters) from None
    plain = SamplingParameters()
    return {name: value for name in found if (value := getattr(parsed, name)) != getattr(plain, name)}
