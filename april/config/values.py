"""Kinds of values in the configuration, and the base of its models."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


def one_or_more(value: Any) -> Any:
    """Return a list of one for a single word."""
    return (value,) if isinstance(value, str) else value


LISTS = (tuple, list, set, frozenset)


def shown(value: Any) -> str:
    """Return a value as one would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, LISTS):
        return " ".join(shown(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value.value if isinstance(value, Enum) else value)


def without_contents(value: Any) -> str:
    """Return a wrong value for a message; of a collection only its type, for there may be a key in it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print those that are long enough
    return repr(value) if value is None or isinstance(value, str | int | float) else type(value).__name__


MOST = 2**31 - 1
"""Most of anything that is counted: beyond it, arrays, clocks and files begin to fail one by one."""
LONGEST_S = 1e9
"""Longest wait: thirty years."""

# pydantic takes true for 1
Number = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(ge=1, le=MOST), Number]
Bytes = Annotated[int, Field(ge=1, le=2**53), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST), Number]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1), Number]
"""A seed goes into checkpoints, whose formats have no longer numbers."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False), Number]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Number]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Number]


T = TypeVar("T")
AUTO: Literal["auto"] = "auto"
"""A value in place of a number: april finds it out while the run goes on."""


class _OneOrAuto:
    """A union whose mistakes are those of its first member: pydantic's would name both."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, inner: AUTO if value == AUTO else inner(value), handler.generate_schema(get_args(source)[0]),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )  # fmt: skip


OrAuto = Annotated[T | Literal["auto"], _OneOrAuto]


class Model(BaseModel):
    # the docstrings of the fields are the help texts of the command-line flags
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
