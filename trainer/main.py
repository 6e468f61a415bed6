"""The command line: `torchrun trainer/main.py --algo NAME [--config PRESET] [--section.key value]`.

Exit codes: 0 done, or stopped by a signal after saving; 1 a failure; 2 a user's mistake, told in
one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import tyro

from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.algos.grpo import GRPO
from cotutor.trainer.algos.opcod import OPCoD
from cotutor.trainer.algos.rl2f import RL2F
from cotutor.trainer.algos.sdpo import SDPO
from cotutor.trainer.algos.sft import SFT
from cotutor.trainer.checks import check
from cotutor.trainer.config import AlgoName, Config, ConfigError
from cotutor.trainer.preset import load_preset

ALGORITHMS: dict[str, Any] = {"opcod": OPCoD, "rl2f": RL2F, "sdpo": SDPO, "grpo": GRPO, "sft": SFT}
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse(arguments: Sequence[str]) -> Config:
    """Preset, then command line. Raises ConfigError; `--help` prints and exits 0."""
    rest = list(arguments)
    preset = Path(_take(rest, "config") or _CONFIGS / _embedded_preset(rest))
    baselines = _take(rest, "baselines")
    config = load_preset(preset)
    if baselines is not None:
        names = () if baselines == "none" else tuple(baselines.split(","))
        unknown = [n for n in names if n not in ALGORITHMS]
        if unknown:
            raise ConfigError(
                f"--baselines: {unknown[0]!r} is no algorithm; give a comma-separated list of"
                f" {', '.join(ALGORITHMS)}, or none"
            )
        config = dataclasses.replace(config, baselines=cast(tuple[AlgoName, ...], names))
    config = _command_line(config, rest)
    if config.resume not in ("", "auto"):
        config = dataclasses.replace(config, out=config.resume)
    elif not config.out:
        stem = f"runs/{preset.stem.removesuffix(f'-{config.algo}')}-{config.algo}"
        config = dataclasses.replace(config, out=_default_folder(stem, config.resume == "auto"))
    # The run itself is no baseline of its own: a preset may name it for its other algorithms.
    others = tuple(name for name in config.baselines if name != config.algo)
    config = dataclasses.replace(config, baselines=() if config.algo == "sft" else others)
    try:
        check(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _embedded_preset(arguments: Sequence[str]) -> str:
    """The embedded demonstration of the algorithm that is asked for."""
    algorithm = _take(list(arguments), "algo")
    return "tiny-rl2f.toml" if algorithm == "rl2f" else "tiny.toml"


def _take(arguments: list[str], name: str) -> str | None:
    """Remove `--name value` or `--name=value` from the arguments; the last one counts."""
    value = None
    n = 0
    while n < len(arguments):
        if arguments[n] == f"--{name}":
            if n + 1 == len(arguments):
                raise ConfigError(f"--{name} needs a value")
            value = arguments[n + 1]
            del arguments[n : n + 2]
        elif arguments[n].startswith(f"--{name}="):
            value = arguments[n].partition("=")[2]
            del arguments[n]
        else:
            n += 1
    return value


def _command_line(config: Config, arguments: Sequence[str]) -> Config:
    # tyro explains a mistake in a box of many lines; the first sentences of it are what is needed.
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                Config,
                default=config,
                args=list(arguments),
                prog="trainer/main.py",
                description="Also: --config PRESET (TOML), --baselines A,B or none.",
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_one_sentence(output.getvalue())) from None


def _one_sentence(box: str) -> str:
    """The first paragraph of tyro's box, and the option that it thinks was meant."""
    # The box is drawn with rules of "─", or of "-" where the terminal knows no other.
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    paragraphs: list[list[str]] = [[]]
    for line in lines[1:]:
        if line and not line.strip("─-"):
            paragraphs.append([])
        elif line:
            paragraphs[-1].append(line)
    filled = [p for p in paragraphs if p]
    told = " ".join(filled[0])
    options = [line.split()[0] for p in filled[1:] for line in p if line.startswith("--")]
    return f"{told}; did you mean {options[0]}?" if options and "Unrecog" in told else told


def _default_folder(stem: str, resume: bool) -> str:
    """The first of stem, stem-2, stem-3 … that doesn't exist; resuming: the last that does."""
    names = [stem, *(f"{stem}-{n}" for n in range(2, 10_000))]
    free = next(n for n, name in enumerate(names) if not Path(name).exists())
    if not resume:
        return names[free]
    if free == 0:
        raise ConfigError(f"--resume auto: there is no run {stem} to go on with; name it by --out")
    return names[free - 1]


def make_algorithm(config: Config) -> Algorithm:
    return ALGORITHMS[config.algo](getattr(config, config.algo))


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code (a failing rank leaves at once, without)."""
    # Which exceptions are a user's mistakes is known where they are raised.
    from cotutor.trainer.run import MISTAKES, run

    try:
        return run(parse(arguments), make_algorithm)
    except MISTAKES as error:
        # Before any process group stands all ranks find the same mistake: one tells it.
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
