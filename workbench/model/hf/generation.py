"""Read what a model's makers recommend for sampling: generation_config.json beside its config."""

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
    """Return the sampling parameters of a folder's generation_config.json that differ from ours; none without it.

    `do_sample: false` is temperature 0. Raises WorkbenchError for values that no sampling has.
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
