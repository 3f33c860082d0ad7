"""Adds a command-line flag for each setting of :class:`april.Config` to the argparse parser of any trainer.

Invariants: every setting that can be given as text has exactly one flag. A flag that was not typed is absent from the
namespace, so it overrides neither the configuration file nor a default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from april.config.mistakes import SettingName, WrongSettings
from april.config.settings import Config, read_yaml
from april.config.values import LIST_TYPES, shown_value, without_contents
from april.errors import ConfigError

FILE_FLAG = "--april-config"
PREFIX = "april_prefix"
"""Attribute of argparse's namespace that holds the prefix of april's flags."""
DEST = "april."
"""Beginning of the namespace attributes of april's flags, so that they cannot collide with the trainer's attributes."""
SCALARS = (str, int, float, Enum, Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that a flag can set."""

    path: str
    """Path in the configuration, such as ``sampling.top_p``."""
    annotation: Any
    help: str
    default: Any = None
    chooser: str = ""
    """Path of the setting that decides whether this one exists, such as ``engine.kind``; empty if it always does."""
    kinds: tuple[str, ...] = ()
    """Values of the chooser for which this setting exists."""

    def flag(self, prefix: str) -> str:
        """Return the name of the flag, such as ``--sampling-top-p``."""
        return f"--{prefix}{re.sub('[._]', '-', self.path)}"


def add_april_arguments(parser: argparse.ArgumentParser, prefix: str = "") -> argparse.ArgumentParser:
    """Add a group of flags, one per setting of :class:`april.Config`, and ``--april-config FILE`` (YAML).

    Flags that were not typed are absent from the namespace; :func:`config_from_arguments` adds the defaults.

    Args:
        parser: parser of the trainer. It is changed in place and returned, as some trainers' hooks require.
        prefix: prefix of all flags: ``april-`` gives ``--april-max-staleness``.

    Raises:
        ConfigError: the parser already has april's flags or a flag of the same name, or ``prefix`` is wrong.
    """
    if not isinstance(parser, argparse.ArgumentParser):
        raise ConfigError(f"add_april_arguments: needs an argparse.ArgumentParser, got {type(parser).__name__}")
    if parser.get_default(PREFIX) is not None:
        raise ConfigError("add_april_arguments: this parser already has april's flags; add them only once")
    if not re.fullmatch(r"(\w[\w.-]*)?", prefix):
        raise ConfigError(f"add_april_arguments: prefix {prefix!r} cannot begin a flag; use something like 'april-'")
    group = parser.add_argument_group("april", "Active partial rollouts; flags override the file.")
    try:
        group.add_argument(
            FILE_FLAG, metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings of april.Config."
        )
        for setting in settings_of():
            dest = DEST + setting.path
            group.add_argument(setting.flag(prefix), dest=dest, default=argparse.SUPPRESS, **flag_options(setting))
        # argparse would take this flag for an abbreviation of --engine-api-key-env
        group.add_argument(
            f"--{prefix}engine-api-key", default=argparse.SUPPRESS, help=argparse.SUPPRESS, type=_no_key
        )
    except argparse.ArgumentError as error:
        raise ConfigError(f"add_april_arguments: {error}; give april's flags a prefix") from None
    parser.set_defaults(**{PREFIX: prefix})
    return parser


def _no_key(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        "everybody on the machine can see flags; write the key into an environment variable, and give its name with "
        "the flag that ends in -env"
    )


def config_from_arguments(args: argparse.Namespace) -> Config:
    """Make a configuration from parsed arguments: typed flags, then the file of ``--april-config``, then defaults.

    Raises:
        ConfigError: the arguments or the file have mistakes; the message has one sentence for each.
    """
    prefix = getattr(args, PREFIX, None)
    if prefix is None:
        raise ConfigError(
            "args come from a parser that has no flags of april; call april.add_april_arguments(parser) first"
        )
    settings = {s.path: s for s in settings_of()}
    flags = {path: s.flag(prefix) for path, s in settings.items()}
    file = getattr(args, "april_config", None)
    values = _sections({} if file is None else read_yaml(file), file, settings)
    typed = {path: getattr(args, DEST + path) for path in settings if hasattr(args, DEST + path)}
    for path, value in typed.items():
        _set_nested(values, path, value)
    for path in typed:
        chooser, kinds = settings[path].chooser, settings[path].kinds
        if chooser:
            kind = _look_up(values, chooser) or settings[chooser].default
            _set_nested(values, chooser, kind)
            if kind in settings[chooser].kinds and kind not in kinds:
                raise ConfigError(f"{flags[path]} belongs to {flags[chooser]} {' or '.join(kinds)}, not to {kind}")
    try:
        return Config.from_mapping(values)
    except WrongSettings as error:
        # messages name a setting as the user wrote it: by its flag, or by its path if it is from the file
        named = {path: flag for path, flag in flags.items() if path in typed or _look_up(values, path) is None}
        text = error.sentence(lambda setting: _as_typed(setting, named, settings))
        raise ConfigError(text if file is None else f"{text} (with {FILE_FLAG} {file})") from None


def _sections(values: Any, file: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a copy of the file's values and sections, into which the values of flags can be written."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file}: expected a mapping of settings, got {type(values).__name__}")
    copy = dict(values)
    for section in {path.partition(".")[0] for path in settings if "." in path} & set(copy):
        if not isinstance(copy[section], Mapping):
            raise ConfigError(f"{file}: {section} must be a mapping of settings, got {without_contents(copy[section])}")
        copy[section] = dict(copy[section])
    return copy


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    return (values.get(section, {}) if section else values).get(name)


def _set_nested(values: dict[str, Any], path: str, value: Any) -> None:
    section, _, name = path.rpartition(".")
    (values.setdefault(section, {}) if section else values)[name] = value


def _as_typed(setting: SettingName, flags: Mapping[str, str], settings: Mapping[str, Setting]) -> str:
    """Return a setting as it is typed: ``--sampling-top-p 0.5`` for ``sampling.top_p=0.5``; as in a file if it has no
    flag."""
    flag = flags.get(setting.path)
    if flag is None or setting.value is None:
        return flag or str(setting)
    if typed_as(settings[setting.path].annotation) != "switch":
        return f"{flag} {setting.value}"
    return flag if setting.value == "true" else f"--no-{flag[2:]}"


# ---------------------------------------------------------------- settings, from the fields of the model


def settings_of(model: type[BaseModel] = Config, parent: str = "") -> Iterator[Setting]:
    """Yield every setting that can be given as text. Others (mappings, lists of models) can only be set in files."""
    for name, info in model.model_fields.items():
        path, leaves = parent + name, _leaves(info.annotation)
        models = [leaf for leaf in leaves if isinstance(leaf, type) and issubclass(leaf, BaseModel)]
        if models and len(models) == len(leaves):
            if info.discriminator is None:
                yield from settings_of(models[0], path + ".")
            else:
                yield from _alternatives(models, path + ".", str(info.discriminator), info.default)
        elif typed_as(info.annotation) is not None:
            # pydantic stores the constraints separately from the type
            annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            default = info.get_default(call_default_factory=False)
            yield Setting(path=path, annotation=annotation, help=_sentence(info), default=default)


def _alternatives(models: list[type[BaseModel]], parent: str, discriminator: str, default: Any) -> Iterator[Setting]:
    """Yield the settings of all models in a union, each name once; the field ``discriminator`` selects the model."""
    found: dict[str, dict[str, Setting]] = {}
    for model in models:
        kind = str(model.model_fields[discriminator].default)
        for setting in settings_of(model, parent):
            found.setdefault(setting.path, {})[kind] = setting
    chooser, chosen = parent + discriminator, getattr(default, discriminator, None)
    for path, members in found.items():
        # Union drops duplicates of the same annotation
        annotation: Any = Union[tuple(setting.annotation for setting in members.values())]  # noqa: UP007 - at run time
        setting = Setting(path=path, annotation=annotation, help="", kinds=tuple(members))
        if path == chooser:
            yield replace(setting, help=f"Which kind to use. (default: {shown_value(chosen)})", default=chosen)
            continue
        by_text = {s.help: ", ".join(members) for s in members.values()}
        parts = by_text.items() if len(by_text) == 1 else [(s.help, kind) for kind, s in members.items()]
        yield replace(setting, help="; ".join(f"{kinds}: {text}" for text, kinds in parts), chooser=chooser)


def _leaves(annotation: Any) -> list[Any]:
    """Return the members of a union without None and without Annotated wrappers."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _leaves(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [leaf for member in get_args(annotation) for leaf in _leaves(member)]
    return [] if annotation is NoneType else [annotation]


def typed_as(annotation: Any) -> Literal["one", "many", "switch"] | None:
    """Return how a flag takes its value: "one" value, "many", or as a "switch" (--x / --no-x); None if it cannot."""
    leaves = _leaves(annotation)
    if leaves and all(leaf is bool for leaf in leaves):
        return "switch"
    for leaf in leaves:
        if get_origin(leaf) is Literal or (isinstance(leaf, type) and issubclass(leaf, SCALARS)):
            return "one"
        if get_origin(leaf) in LIST_TYPES and typed_as(get_args(leaf)[0]) == "one":
            return "many"
    return None


def _sentence(info: FieldInfo) -> str:
    text = " ".join((info.description or "").replace("`", "").split())
    if info.is_required():
        return f"{text} (required)".lstrip()
    return f"{text} (default: {shown_value(info.get_default(call_default_factory=True))})".lstrip()


def flag_options(setting: Setting) -> dict[str, Any]:
    """Return the keyword arguments of ``add_argument`` for a setting."""
    options: dict[str, Any] = {"help": setting.help.replace("%", "%%")}
    kind, annotation = typed_as(setting.annotation), setting.annotation
    if kind == "switch":
        return options | {"action": argparse.BooleanOptionalAction}
    if kind == "many":
        options["nargs"] = "*"
        annotation = get_args(_leaves(annotation)[0])[0]
    leaves = set(_leaves(annotation))
    literals = {leaf for leaf in leaves if get_origin(leaf) is Literal}
    if possible := choices(annotation):
        # used instead of choices=, whose error message differs between Python versions; _reader checks the value
        options["metavar"] = "{" + ",".join(possible) + "}"
    else:
        numbers = leaves - literals
        kind_of = "INT" if numbers == {int} else "FLOAT" if numbers == {float} else "TEXT"
        options["metavar"] = "|".join([kind_of, *(str(word) for leaf in literals for word in get_args(leaf))])
    return options | {"type": _reader(annotation)}


def choices(annotation: Any) -> list[str]:
    """Return all possible values of a setting; empty if they cannot be listed."""
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
    """Return a function that converts typed text to a checked value; ``none`` becomes None if None is allowed."""
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
                if item["type"] == "value_error":  # april's own sentence, which hides secrets itself
                    raise argparse.ArgumentTypeError(str(item["ctx"]["error"])) from None
                wrong[item["msg"][0].lower() + item["msg"][1:]] = None
            raise argparse.ArgumentTypeError(f"{' or '.join(wrong)}, got {without_contents(text)}") from None

    return read
