"""Flags for any argparse trainer: one per setting of :class:`april.Config`, read off the model itself.

Invariant: a flag that was not typed leaves nothing in the namespace, so it overrides neither the file nor a default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from april.config.fields import Setting, flag_options, settings_of, typed_as
from april.config.mistakes import Named, WrongSettings
from april.config.settings import Config, read_yaml
from april.config.values import shown, without_contents
from april.errors import ConfigError

FILE_FLAG = "--april-config"
MARK = "april_arguments"
"""Attribute of the namespace that tells config_from_arguments how the flags were added; plain data."""


def add_april_arguments(
    parser: argparse.ArgumentParser, prefix: str = "", *, trainer_flags: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """Add a group of flags, one per setting of :class:`april.Config`, and ``--april-config FILE`` (YAML).

    Flags that the parser has already (same flag or same dest) are not added again: the trainer goes by their values,
    so april does too. Flags not typed are absent from the namespace; read the configuration instead.

    Args:
        parser: of the trainer; changed in place and returned, as trainers with a hook for custom arguments want it.
        prefix: of all flags: ``april-`` gives ``--april-max-staleness``.
        trainer_flags: flags of the trainer that decide a setting under another name, or that the trainer adds
            later: ``{"max_response_len": "--rollout-max-response-len"}``. A value of None decides nothing.

    Raises:
        ConfigError: the parser has april's flags already, or ``prefix`` or ``trainer_flags`` make no sense.
    """
    if not isinstance(parser, argparse.ArgumentParser):
        raise ConfigError(f"add_april_arguments: needs an argparse.ArgumentParser, got {type(parser).__name__}")
    if parser.get_default(MARK) is not None:
        raise ConfigError("add_april_arguments: this parser has april's flags already; call it once")
    if not re.fullmatch(r"(\w[\w.-]*)?", prefix):
        raise ConfigError(f"add_april_arguments: prefix {prefix!r} cannot begin a flag; use something like 'april-'")
    renamed = dict(trainer_flags or {})
    settings = {s.path: s for s in settings_of()}
    unknown = sorted(set(renamed) - set(settings))
    if unknown:
        raise ConfigError(f"add_april_arguments: trainer_flags: april has no setting {unknown[0]!r}")
    group = parser.add_argument_group("april", "Active partial rollouts; flags override the file.")
    of_trainer: dict[str, list[str]] = {}
    try:
        group.add_argument(
            FILE_FLAG, metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings of april.Config."
        )
        for path, setting in settings.items():
            name = renamed.get(path)
            flag = name or setting.flag(prefix)
            found = _find(parser, flag, setting.dest(prefix) if name is None else None)
            if found is not None:
                of_trainer[path] = found
            elif name is not None:
                of_trainer[path] = [name.lstrip("-").replace("-", "_"), name]
            else:
                group.add_argument(flag, dest=setting.dest(prefix), default=argparse.SUPPRESS, **flag_options(setting))
    except argparse.ArgumentError as error:
        raise ConfigError(f"add_april_arguments: {error}; give april's flags a prefix") from None
    parser.set_defaults(**{MARK: {"prefix": prefix, "trainer": of_trainer}})
    return parser


def config_from_arguments(args: argparse.Namespace) -> Config:
    """The configuration: flags that were typed, else the file of ``--april-config``, else the defaults.

    Raises:
        ConfigError: one sentence per mistake, with the flags as they are typed.
    """
    mark = getattr(args, MARK, None)
    if mark is None:
        raise ConfigError("args come from a parser without april's flags; call april.add_april_arguments(parser) first")
    settings = {s.path: s for s in settings_of()}
    file = getattr(args, "april_config", None)
    values = _sections({} if file is None else read_yaml(file), file, settings)
    flags = {path: s.flag(mark["prefix"]) for path, s in settings.items()}
    flags |= {path: flag for path, (_, flag) in mark["trainer"].items()}
    typed: dict[str, Any] = {}
    for path, setting in settings.items():
        said = _look_up(values, path)
        if path not in mark["trainer"]:
            if hasattr(args, setting.dest(mark["prefix"])):
                typed[path] = getattr(args, setting.dest(mark["prefix"]))
            continue
        dest, flag = mark["trainer"][path]
        if not hasattr(args, dest):
            raise ConfigError(f"{flag}, which should decide {path}, is no flag of this trainer; see trainer_flags")
        value = getattr(args, dest)
        if value is None:
            continue
        if said is not None and said != value:
            raise ConfigError(
                f"{flag} is {shown(value)} in the trainer, but {file} says {path}: {shown(said)}; make them equal"
            )
        typed[path] = value
    for path, value in typed.items():
        _place(values, path, value)
    for path in typed:
        chooser, kinds = settings[path].chooser, settings[path].kinds
        if chooser:
            kind = _look_up(values, chooser) or settings[chooser].default
            _place(values, chooser, kind)
            if kind in settings[chooser].kinds and kind not in kinds:
                raise ConfigError(f"{flags[path]} belongs to {flags[chooser]} {' or '.join(kinds)}, not to {kind}")
    try:
        return Config.from_mapping(values)
    except WrongSettings as error:
        # what stands in the file is named as it stands there
        named = {path: flag for path, flag in flags.items() if path in typed or _look_up(values, path) is None}
        text = error.sentence(lambda setting: _as_typed(setting, named, settings, mark["trainer"]))
        raise ConfigError(text if file is None else f"{text} (with {FILE_FLAG} {file})") from None


def _find(parser: argparse.ArgumentParser, flag: str, dest: str | None) -> list[str] | None:
    """[dest, flag] of an option that the parser has already; dashes and underscores are the same."""
    for action in parser._actions:
        same = [o for o in action.option_strings if o.replace("_", "-") == flag.replace("_", "-")]
        if same or action.dest == dest:
            return [action.dest, (same or action.option_strings or [action.dest])[0]]
    return None


# ---------------------------------------------------------------- values, and what they are called


def _sections(values: Any, file: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """A copy of what the file says, in which flags can be placed."""
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


def _place(values: dict[str, Any], path: str, value: Any) -> None:
    section, _, name = path.rpartition(".")
    (values.setdefault(section, {}) if section else values)[name] = value


def _as_typed(
    setting: Named, flags: Mapping[str, str], settings: Mapping[str, Setting], of_trainer: Mapping[str, list[str]]
) -> str:
    """``sampling.top_p=0.5`` on a command line: ``--sampling-top-p 0.5``; without a flag, as in a file."""
    flag = flags.get(setting.path)
    if flag is None or setting.value is None:
        return flag or str(setting)
    if typed_as(settings[setting.path].annotation) != "switch":
        return f"{flag} {setting.value}"
    if setting.value == "true":
        return flag
    return f"leaving out {flag}" if setting.path in of_trainer else f"--no-{flag[2:]}"
