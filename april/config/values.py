"""Types of values in the configuration, and the base class of its models."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from april.errors import ConfigError


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


def one_or_more(value: Any) -> Any:
    """Wrap a single string in a tuple; return any other value unchanged."""
    return (value,) if isinstance(value, str) else value


LIST_TYPES = (tuple, list, set, frozenset)


def shown_value(value: Any) -> str:
    """Return a value as text, as a user would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, LIST_TYPES):
        return " ".join(shown_value(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, "") else str(value.value if isinstance(value, Enum) else value)


def without_contents(value: Any) -> str:
    """Format a wrong value for an error message, without the parts that may contain an API key.

    The type stands for a collection, and text is shown like an address.
    """
    if isinstance(value, str):
        return f"'{shown_address(value)}'"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long integers
    return repr(value) if value is None or isinstance(value, int | float) else type(value).__name__


def shown_address(url: str) -> str:
    """Return a URL for messages without its parts that may be secret: user, password, query and fragment.

    If an ``@`` follows the first ``?`` or ``#``, any part may belong to a password, and none is shown.
    """
    text = repr(url)[1:-1]  # repr shows white space at the end, which may be the mistake
    start = text.rfind("@") + 1
    end = min((at for at in map(text.find, "?#") if at >= 0), default=len(text))
    return f"{text[start:end]}{text[end]}..." if end < len(text) else text[start:]


LARGEST_INT = 2**31 - 1
"""Largest accepted count; beyond int32, arrays, clocks and file formats start to fail."""
LONGEST_S = 1e9
"""Longest accepted time in seconds, about thirty years."""

# pydantic would accept true as 1
Number = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT), Number]
Bytes = Annotated[int, Field(ge=1, le=2**53), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT), Number]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1), Number]
"""Seed of at most 63 bits: it is stored in checkpoints, whose formats have no longer integers."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False), Number]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Number]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Number]


T = TypeVar("T")
AUTO: Literal["auto"] = "auto"
"""Value in place of a number that lets april choose the number during the run."""


class _OneOrAuto:
    """Makes error messages name only the union's first member; pydantic would list the errors of both."""

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

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ConfigError(f"{name}: a configuration cannot be changed; make another april.Config with the new value")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)
