"""Batches of answers, in order."""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from .judging import verify
from .verdict import Verdict, unjudged

Job = tuple[str, str, str, Mapping[str, Any]]


class VerifierPool:
    """Judges batches; see `verify_many`."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")

    def verify_many(self, jobs: Iterable[Job]) -> list[Verdict]:
        """Judge (kind, gold, text, options) jobs and return their verdicts in the same order."""
        return [_inline(job) for job in jobs]

    def close(self) -> None:
        """Stop the workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _inline(job: Job) -> Verdict:
    kind, gold, text, options = job
    try:
        return verify(kind, gold, text, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        return unjudged("error", detail=str(error))
