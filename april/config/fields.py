"""The settings of :class:`april.Config` one by one, read off the model: what a flag needs to know of each.

Invariant: every setting that can be typed as text appears exactly once, under its path in the configuration.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from april.config.settings import Config
from april.config.values import LISTS, shown

SCALARS = (str, int, float, Enum, Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that a flag can give."""

    path: str
    """Where it is in the configuration: ``sampling.top_p``."""
    annotation: Any
    help: str
    default: Any = None
    chooser: str = ""
    """Path of the setting that decides whether it exists: ``engine.kind``."""
    kinds: tuple[str, ...] = ()
    """Values of the chooser for which it exists."""

    def flag(self, prefix: str) -> str:
        """``--sampling-top-p``."""
        return f"--{prefix}{re.sub('[._]', '-', self.path)}"

    def dest(self, prefix: str) -> str:
        """Attribute of the namespace."""
        return re.sub(r"\W", "_", prefix + self.path)



def settings_of(model: type[BaseModel] = Config, parent: str = "") -> Iterator[Setting]:
    """Every setting that can be given as text; others (mappings, lists of models) are for files only."""
    for name, info in model.model_fields.items():
        path = parent + name
        leaves = _leaves(info.annotation)
        models = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
        if models and len(models) == len(leaves):
            if info.discriminator is None:
                yield from settings_of(models[0], path + ".")
            else:
                yield from _alternatives(models, path + ".", str(info.discriminator), info.default)
        elif typed_as(info.annotation) is not None:
            default = info.get_default(call_default_factory=False)
            yield Setting(path=path, annotation=_full(info), help=_sentence(info), default=default)


def _alternatives(models: list[type[BaseModel]], parent: str, discriminator: str, default: Any) -> Iterator[Setting]:
    """The settings of several models, of which ``discriminator`` chooses one: each name once."""
    found: dict[str, list[tuple[str, Setting]]] = {}
    for model in models:
        kind = str(model.model_fields[discriminator].default)
        for setting in settings_of(model, parent):
            found.setdefault(setting.path, []).append((kind, setting))
    chooser = parent + discriminator
    for path, members in found.items():
        kinds = tuple(kind for kind, _ in members)
        # the same annotation twice is one member of a union
        annotation: Any = Union[tuple(setting.annotation for _, setting in members)]  # noqa: UP007 - made at run time
        if path == chooser:
            chosen = getattr(default, discriminator, None)
            text = f"Which one. (default: {shown(chosen)})"
            yield Setting(path=path, annotation=annotation, help=text, default=chosen, kinds=kinds)
            continue
        texts = {setting.help for _, setting in members}
        parts = [(", ".join(kinds), texts.pop())] if len(texts) == 1 else [(kind, s.help) for kind, s in members]
        text = "; ".join(f"{who}: {what}" for who, what in parts)
        yield Setting(path=path, annotation=annotation, help=text, default=None, chooser=chooser, kinds=kinds)


def _leaves(annotation: Any) -> list[Any]:
    """The members of a union, None left out, without their Annotated wrappers."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _leaves(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [leaf for member in get_args(annotation) for leaf in _leaves(member)]
    return [] if annotation is NoneType else [annotation]


def typed_as(annotation: Any) -> Literal["one", "many", "switch"] | None:
    """How its flag is typed: one value, several, ``--x / --no-x``; None: not at all."""
    leaves = _leaves(annotation)
    if leaves and all(leaf is bool for leaf in leaves):
        return "switch"
    for leaf in leaves:
        if get_origin(leaf) is Literal or (isinstance(leaf, type) and issubclass(leaf, SCALARS)):
            return "one"
        if get_origin(leaf) in LISTS and typed_as(get_args(leaf)[0]) == "one":
            return "many"
    return None


def _full(info: FieldInfo) -> Any:
    """The annotation with its constraints, which pydantic keeps apart."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def _sentence(info: FieldInfo) -> str:
    text = " ".join((info.description or "").replace("`", "").split())
    if info.is_required():
        return f"{text} (required)".lstrip()
    return f"{text} (default: {shown(info.get_default(call_default_factory=True))})".lstrip()


def flag_options(setting: Setting) -> dict[str, Any]:
    """Arguments of ``add_argument``."""
    options: dict[str, Any] = {"help": setting.help.replace("%", "%%")}
    kind = typed_as(setting.annotation)
    if kind == "switch":
        return options | {"action": argparse.BooleanOptionalAction}
    annotation = setting.annotation
    if kind == "many":
        options["nargs"] = "*"
        annotation = get_args(_leaves(annotation)[0])[0]
    possible = choices(annotation)
    if possible:
        # checked by the reader, whose message is the same on every Python; shown here
        options["metavar"] = "{" + ",".join(possible) + "}"
    else:
        leaves = set(_leaves(annotation))
        words = [str(word) for leaf in leaves if get_origin(leaf) is Literal for word in get_args(leaf)]
        numbers = {leaf for leaf in leaves if get_origin(leaf) is not Literal}
        kind_of = "INT" if numbers == {int} else "FLOAT" if numbers == {float} else "TEXT"
        options["metavar"] = "|".join([kind_of, *words])
    return options | {"type": _reader(annotation)}


def choices(annotation: Any) -> list[str]:
    """All possible values, if they are few."""
    found: list[str] = []
    for leaf in _leaves(annotation):
        if get_origin(leaf) is Literal:
            found += [str(value) for value in get_args(leaf)]
        elif isinstance(leaf, type) and issubclass(leaf, Enum):
            found += [str(member.value) for member in leaf]
        else:
            return []
    return found


def _reader(annotation: Any) -> Callable[[str], Any]:
    """From what was typed to a checked value; ``none`` is None where None is allowed."""
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    words: dict[str, Any] = {"none": None, "None": None}
    for leaf in _leaves(annotation):
        if get_origin(leaf) is Literal:
            words |= {str(value): value for value in get_args(leaf)}

    def read(text: str) -> Any:
        if text in words:
            try:
                return adapter.validate_python(words[text])
            except ValidationError:
                pass  # None is not allowed here
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            wrong: dict[str, None] = {}
            for item in error.errors(include_url=False):
                if item["type"] == "value_error":  # our own sentence, which shows what may be shown
                    raise argparse.ArgumentTypeError(str(item["ctx"]["error"])) from None
                wrong[item["msg"][0].lower() + item["msg"][1:]] = None
            raise argparse.ArgumentTypeError(f"{' or '.join(wrong)}, got {text!r}") from None

    return read
