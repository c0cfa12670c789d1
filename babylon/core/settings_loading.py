"""Load settings from overrides, the environment and ``babylon.toml``, and name their sources.

The order of the places is in ``babylon.core.settings``.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from babylon.core.discretion import without_passwords
from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.settings import COMPLETE, HOURS, Settings, fields, variable_of
from babylon.core.windows import MAX_MINUTES, MIN_MINUTES, check_minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Settings, and the place that each value comes from.

    ``sources`` maps ``"windows.minutes"`` to ``"option"``, ``"environment"`` or the path of the
    file; a name that is absent has its default.
    """

    settings: Settings
    sources: Mapping[str, str]


def load_settings(**overrides: Any) -> Settings:
    """Load settings; ``overrides`` by group: ``load_settings(seed=1, windows={"minutes": 15})``.

    An override of ``None`` counts: ``database={"url": None}`` is the embedded database even when
    ``DATABASE_URL`` is set.

    Raises:
        ConfigError: Names each bad value, its source (variable, or file and line) and the allowed
            ones.
    """
    return load_with_sources(**overrides).settings


def load_with_sources(**overrides: Any) -> LoadedSettings:
    """Like ``load_settings``, with the source of each value."""
    given = _flatten(overrides, "an override")
    environment = _from_environment()
    home = Home.at(given.get("home", environment.get("home", ".babylon")))
    # Services keep the settings with which they were started, also where these were unset.
    in_file = {} if os.environ.get(COMPLETE) else _from_file(home.settings_file)
    sources = {
        **dict.fromkeys(in_file, str(home.settings_file)),
        **dict.fromkeys(environment, "environment"),
        **dict.fromkeys(given, "option"),
    }
    values: dict[str, Any] = {}
    for path, value in {**in_file, **environment, **given}.items():
        group, _, name = path.rpartition(".")
        (values.setdefault(group, {}) if group else values)[name] = value
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems = "; ".join(_problem(problem, sources) for problem in error.errors())
        raise ConfigError(f"bad setting: {problems}") from error
    return LoadedSettings(settings=settings, sources=sources)


def merge_overrides(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge overrides group by group; later layers win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            group = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **value} if group else value
    return merged


def _paths() -> dict[str, FieldInfo]:
    return {f"{group}.{name}" if group else name: field for group, name, field in fields()}


def _flatten(nested: Mapping[str, Any], place: str) -> dict[str, Any]:
    """``{"windows": {"minutes": 15}}`` as ``{"windows.minutes": 15}``."""
    known = _paths()
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and name not in known:
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    if unknown := sorted(set(flat) - set(known)):
        raise ConfigError(f"unknown setting {', '.join(unknown)} in {place}: see docs/settings.md")
    return flat


def _from_environment() -> dict[str, Any]:
    """The variables that are set and not empty."""
    values: dict[str, Any] = {
        path: value
        for path, field in _paths().items()
        if (value := os.environ.get(variable_of(field)))
    }
    if hours := os.environ.get(HOURS):
        values["windows.minutes"] = _minutes_of(hours)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}): make it readable") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line} is not UTF-8: save it as UTF-8") from error
    try:
        nested = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML ({error}): correct it") from error
    if "home" in nested:
        raise ConfigError(f"{path} sets home: a home does not name itself, set BABYLON_HOME")
    return _flatten(nested, str(path))


def _problem(problem: ErrorDetails, sources: Mapping[str, str]) -> str:
    """One problem as ``VARIABLE='value': reason``, or as ``group.name='value' in file, line 3``.

    A problem between several settings names them itself; the file that sets one of them is added.
    """
    reason = problem["msg"].removeprefix("Value error, ")
    path = ".".join(map(str, problem["loc"]))
    field = _paths().get(path)
    if field is None:
        named = [p for p in sources if p.startswith(f"{path}.") and _variable(p) in reason]
        in_file = [p + place for p in named if (place := _place(p, sources[p]))]
        reason += f" ({', '.join(in_file)})" if in_file else ""
        return reason if path in Settings.model_fields else f"{path}: {reason}"
    if problem["type"] == "string_pattern_mismatch":  # a regular expression names no remedy
        reason = f"it has another form. {field.description}"
    source = sources.get(path, "environment")
    name = variable_of(field) if source == "environment" else path
    shown_input = without_passwords(repr(problem["input"]))
    value = "********" if SecretStr in get_args(field.annotation) else shown_input
    return f"{name}={value}{_place(path, source)}: {reason}"


def _variable(path: str) -> str:
    return variable_of(_paths()[path])


def _place(path: str, source: str) -> str:
    """`` in file, line 3``. It is empty for other sources, and has no line in an inline table."""
    if source in ("environment", "option"):
        return ""
    table = ""
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.]+)\s*\]", line):
            table = header[1]
        key = re.match(r"\s*([\w.]+)\s*=", line)
        if key and f"{table}.{key[1]}".lstrip(".") == path:
            return f" in {source}, line {number}"
    return f" in {source}"


def _minutes_of(hours: str) -> int:
    try:
        number = float(hours)
        if not MIN_MINUTES / 60 <= number <= MAX_MINUTES / 60:
            raise ValueError(
                f"give hours greater than or equal to {MIN_MINUTES / 60:g} and less than or equal"
                f" to {MAX_MINUTES / 60:g}"
            )
        minutes = round(number * 60)
        check_minutes(minutes)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"bad setting: {HOURS}={hours!r}: {error}") from error
    return minutes
