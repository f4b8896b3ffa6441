"""Base class and field types of an experiment's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from workbench.shown import ConciseRepr

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Fraction01 = Annotated[float, Field(ge=0, le=1)]


class ExperimentSettings(ConciseRepr, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
