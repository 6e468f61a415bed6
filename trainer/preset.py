"""TOML presets ↔ configuration; unknown keys are errors, and a saved run is itself a preset."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import tomli_w

from cotutor.trainer.config import Config, ConfigError


def _build(cls: Any, value: Any, where: str) -> Any:
    """Turn parsed TOML into the annotated type, naming `where` in every error."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table; got {value!r}")
        hints = typing.get_type_hints(cls)
        for key in value:
            if key not in hints:
                near = difflib.get_close_matches(key, hints, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(hints)}"
                raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        kwargs = {k: _build(hints[k], v, f"{where}: {k}") for k, v in value.items()}
        try:
            return cls(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from None
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list; got {value!r}")
        return tuple(_build(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(args)}; got {value!r}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _build(next(a for a in args if a is not type(None)), value, where)
    if origin is dict:
        return dict(value)
    if cls is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {cls.__name__}; got {value!r}")
    return value


def load_preset(path: Path) -> Config:
    """Read a TOML preset. Raises ConfigError that names file, and line or key."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; the presets are in configs/"
        ) from None
    try:
        return _build(Config, tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        line = _line_of(text, str(error))
        raise ConfigError(str(error).replace(str(path), f"{path}:{line}", 1)) from None


def _line_of(text: str, message: str) -> int:
    """The 1-based line of the last-named key, 1 if it can't be found."""
    quoted = message.split("unknown key '")[-1].split("'")[0] if "unknown key" in message else ""
    key = quoted or message.split(" must be")[0].split(": ")[-1].split("[")[0]
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.split("=")[0].strip().strip("[]").split(".")[-1]
        if name == key:
            return number
    return 1


# What a resumed run may change, or can't know: the rest must be as it was.
_FREE_ON_RESUME = (
    "out", "resume", "do", "baselines", "checkpoint", "transformers", "vllm", "parallel", "plan",
)  # fmt: skip


def check_resumed(config: Config, saved: Path) -> None:
    """Refuse to go on with a run under another configuration. Raises ConfigError naming the key."""
    before, now = (_flat(dataclasses.asdict(c)) for c in (load_preset(saved), config))
    for name, value in now.items():
        if name.split(".")[0] not in _FREE_ON_RESUME and before.get(name) != value:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--resume: {saved} was started with --{option} {before.get(name)}, not {value};"
                " use the same options, or another --out"
            )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = {str(n): v for n, v in enumerate(value)}.items()
    else:
        return {name: value}
    prefix = f"{name}." if name else ""
    return {k: v for key, part in items for k, v in _flat(part, prefix + key).items()}


def to_toml(config: Config) -> str:
    """The resolved configuration as a preset; None (a template's own default) is left out.

    So is what belongs to one command: where it writes, what it resumes, what it does.
    """
    config = dataclasses.replace(config, out="", resume="", do="train")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return tomli_w.dumps(plain(dataclasses.asdict(config)))
