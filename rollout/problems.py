"""Readers: from the files that people publish to problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cotutor.rollout.trajectory import Problem


class DataError(ValueError):
    """A mistake in the user's data: one sentence with file and line (or option), and the way out."""


FIELDS = {name: name for name in ("question", "answer", "options", "solution", "system")}


def read_problems(
    path: str | Path,
    *,
    domain: str,
    kind: str = "mcq",
    fields: Mapping[str, str] = FIELDS,
    skip_bad_rows: bool = False,
) -> tuple[list[Problem], int]:
    """Read a `.json` (array or JSON lines), `.jsonl` or `.parquet` file; see below."""
    raise NotImplementedError


def overlap(train: Sequence[Problem], test: Sequence[Problem]) -> list[str]:
    """The keys of the test problems whose question (without options) also stands in `train`."""
    raise NotImplementedError
