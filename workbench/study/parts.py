"""Base class and field types of an experiment's settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from workbench.shown import Brief

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(Brief, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
