"""Agreement with collected cases and labelled outputs; needs the folder in COTUTOR_DATA."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from cotutor.rollout.verifiers import VerifierPool, agreement

# Every row whose verdict differs from its label, with the reason.
DIFFERENT = {
    "vc-0316": "4, .1, 2 against 0.1, 4, 2: the label wants the order; a list of answers has none",
    "vc-0617": "a verb's stem against its polite form in Japanese: no language is inflected here",
}


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("COTUTOR_DATA")
    if not folder:
        pytest.skip("COTUTOR_DATA, the folder of the labelled sets, is not set")
    return Path(folder)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, timeout_s=30) as shared:
        yield shared


def _different(
    collect: Callable[[Path], Iterable[agreement.Row]], data: Path, pool: VerifierPool
) -> tuple[list[str], int]:
    try:
        rows = list(collect(data))
    except FileNotFoundError as error:
        pytest.skip(f"COTUTOR_DATA has no {error.filename}")
    return [row.name for row, _ in agreement.judge(rows, pool)], len(rows)


def test_collected_cases(data: Path, pool: VerifierPool) -> None:
    different, rows = _different(agreement.verifier_cases, data, pool)
    assert rows > 300
    assert set(different) <= DIFFERENT.keys()
    assert len(different) <= 0.02 * rows


@pytest.mark.parametrize(
    ("collect", "share"),
    [
        (agreement.gsm8k_model_solutions, 0.995),
        (agreement.math_model_solutions, 0.97),
        (agreement.gsm8k, 1.0),
        (agreement.math500, 1.0),
    ],
)
def test_labelled_sets(
    collect: Callable[[Path], Iterable[agreement.Row]],
    share: float,
    data: Path,
    pool: VerifierPool,
) -> None:
    different, rows = _different(collect, data, pool)
    assert rows - len(different) >= share * rows, different


@pytest.mark.slow
def test_mbpp_solutions_pass(data: Path, pool: VerifierPool) -> None:
    rows = [
        agreement.Row(r.name, (*r.job[:3], {"allow_restricted": True}), True)
        for r in agreement.mbpp(data)
    ]
    first = pool.verify_many([rows[0].job])[0]
    if first.status == "error":
        pytest.skip(first.detail)
    assert [row.name for row, _ in agreement.judge(rows, pool)] == []
