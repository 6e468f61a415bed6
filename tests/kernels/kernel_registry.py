"""Every Triton kernel as the library launches it, for ahead-of-time compilation and byte counts.

A case calls the library's own launcher. On "meta" tensors of the real size nothing runs: the
compiler's test records the launch and compiles exactly that. On CPU tensors the interpreter runs
it and its loads and stores are counted against the floor that the kernel's docstring states.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from cotutor.kernels.logprob_rows import Rows

VOCABS = (151_936, 152_064, 128_256, 49_152, 262_144)
ARCHITECTURES = (80, 90, 100)
CHUNK = 2048  # rows of a chunk on a GPU


class Case(NamedTuple):
    """One way in which the library launches its kernels.

    Attributes:
        name: "<operation>/<variant>".
        run: called with (rows, vocab, device); launches.
        floor: bytes that `run` has to move for (rows, vocab), or None where nothing is promised.
        by_vocab: whether the vocabulary matters; token-wise kernels take only rows.
    """

    name: str
    run: Callable[[int, int, str], None]
    floor: Callable[[int, int], int] | None
    by_vocab: bool = True


CASES: list[Case] = []


def case(name: str, floor: Callable[[int, int], int] | None = None, by_vocab: bool = True):
    """Register the decorated `run`."""

    def add(run: Callable[[int, int, str], None]):
        CASES.append(Case(name, run, floor, by_vocab))
        return run

    return add


def _rows(rows: int, vocab: int, device: str, masked: bool) -> Rows:
    targets = torch.randint(0, vocab, (rows,), device=device)
    turns = torch.arange(rows, dtype=torch.int32, device=device)
    return Rows(targets, turns if masked else None, 1.0, None)


def _statistics(rows, vocab, device, dtype, keep, entropy, masked) -> None:
    from cotutor.kernels.triton_logprobs import chunk_statistics

    logits = torch.randn(rows, vocab, device=device).to(dtype)
    kept = torch.empty(rows, vocab, dtype=torch.bfloat16, device=device) if keep else None
    chunk_statistics(logits, _rows(rows, vocab, device, masked), entropy=entropy, kept=kept)


def _gradient(rows, vocab, device, dtype, out_dtype, kept, masked) -> None:
    from cotutor.kernels.triton_logprobs import chunk_gradient

    source = torch.rand(rows, vocab, device=device).to(dtype)
    out = torch.empty(rows, vocab, dtype=out_dtype, device=device)
    found, upstream = torch.rand(4, rows, device=device), torch.rand(2, rows, device=device)
    part = _rows(rows, vocab, device, masked)
    chunk_gradient(source, part, found, upstream[0], upstream[1], out, kept=kept)


@case("logprob statistics/float32, keeps p", lambda n, v: n * v * (4 + 4 + 2))
def _(rows, vocab, device):
    _statistics(rows, vocab, device, torch.float32, keep=True, entropy=True, masked=False)


@case("logprob statistics/float32", lambda n, v: n * v * 4)
def _(rows, vocab, device):
    _statistics(rows, vocab, device, torch.float32, keep=False, entropy=True, masked=False)


@case("logprob statistics/bfloat16, masked, no entropy", lambda n, v: n * v * 2)
def _(rows, vocab, device):
    _statistics(rows, vocab, device, torch.bfloat16, keep=False, entropy=False, masked=True)


@case("logprob gradient/kept bfloat16", lambda n, v: n * v * (2 + 2))
def _(rows, vocab, device):
    _gradient(rows, vocab, device, torch.bfloat16, torch.bfloat16, kept=True, masked=False)


@case("logprob gradient/float32 to bfloat16", lambda n, v: n * v * (4 + 2))
def _(rows, vocab, device):
    _gradient(rows, vocab, device, torch.float32, torch.bfloat16, kept=False, masked=False)


@case("logprob gradient/bfloat16, masked", lambda n, v: n * v * (2 + 2))
def _(rows, vocab, device):
    _gradient(rows, vocab, device, torch.bfloat16, torch.bfloat16, kept=False, masked=True)


def _tokens(rows: int, device: str):
    """Log-probs of both sides, turn ids (32 tokens a turn) and sequence ids (128 tokens)."""
    own, other = torch.rand(2, rows, device=device)
    place = torch.arange(rows, dtype=torch.int32, device=device)
    return own, other, place // 32, place // 128


@case("importance weights/token, truncate", lambda n, v: n * (4 + 4 + 4 + 4 + 1), by_vocab=False)
def _(rows, vocab, device):
    from cotutor.kernels.triton_segments import importance_weights

    own, other, turns, _ = _tokens(rows, device)
    importance_weights(
        own, other, turns, None, None, None,
        level="token", action="truncate", drops=False, limits=(2.0, 0.0, 0.69, float("-inf"), 40.0),
    )  # fmt: skip


@case("importance weights/turn, reject, veto", None, by_vocab=False)
def _(rows, vocab, device):
    from cotutor.kernels.triton_segments import importance_weights, segment_sums

    own, other, turns, sequences = _tokens(rows, device)
    sums, _, _ = segment_sums(own, turns, rows // 32, minus=other, other_ids=sequences)
    groups = segment_sums(
        own, sequences, rows // 128, minus=other, other_ids=turns, turn_sums=sums,
        level="turn", reject=True, bounds=(0.69, -0.69, -9.0),
    )  # fmt: skip
    importance_weights(
        own, other, turns, sequences, sums, groups,
        level="turn", action="reject", drops=True, limits=(2.0, 0.5, 0.69, -0.69, 40.0),
    )  # fmt: skip


@case("importance weights/geometric, mask", None, by_vocab=False)
def _(rows, vocab, device):
    from cotutor.kernels.triton_segments import importance_weights, segment_sums

    own, other, _, sequences = _tokens(rows, device)
    groups = segment_sums(own, sequences, rows // 128, minus=other, level="geometric")
    importance_weights(
        own, other, None, sequences, None, groups,
        level="geometric", action="mask", drops=False, limits=(2.0, 0.5, 0.69, -0.69, 40.0),
    )  # fmt: skip


@case("turn sums", lambda n, v: n * (4 + 4 + 4) + n // 32 * 8, by_vocab=False)
def _(rows, vocab, device):
    from cotutor.kernels.triton_segments import segment_sums

    own, _, turns, _ = _tokens(rows, device)
    segment_sums(own, turns, rows // 32)


import kernel_cases_jsd  # noqa: E402, F401 (registers its cases with `case` above)
