"""Kinds of values in the configuration, and the base of its models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


def one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


# pydantic takes true for 1
Number = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(ge=1), Number]
NonNegativeInt = Annotated[int, Field(ge=0), Number]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Number]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Number]


class Model(BaseModel):
    # the docstrings of the fields are the help texts of the command-line flags
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
