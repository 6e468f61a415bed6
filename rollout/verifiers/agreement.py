"""Agreement of the verifiers with collected cases and labelled model outputs.

    python -m cotutor.rollout.verifiers.agreement --data DIR

prints one line for each set below DIR (verifier_cases, gsm8k_model_solutions, math_model_solutions,
gsm8k, math500, mbpp): rows, rows whose verdict agrees with the label, the rows that don't, and how
many were judged in a second.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .pool import Job, VerifierPool
from .verdict import Verdict

_MATH_KINDS = frozenset({"math", "is_equiv_quirk", "normalize", "math_dos"})
_OPTIONS = {"math": ("precision",), "numeric": ("rel_tol", "abs_tol", "location")}


@dataclass(frozen=True)
class Row:
    """A labelled answer: its name, the job for the pool, and whether it is right."""

    name: str
    job: Job
    right: bool


def verifier_cases(data: Path) -> Iterable[Row]:
    """Rows of collected cases with a yes/no verdict; matters of policy are left out."""
    for row in _lines(data / "verifier_cases" / "cases.jsonl"):
        if not isinstance(row["expected"], bool):
            continue
        options = row.get("options") or {}
        gold, text = row["gold"], row["prediction"]
        kind = row["kind"]
        if kind in _MATH_KINDS:
            kind = "math"
            if gold is None:
                gold, text = (_spelled(options[f"{side}_spec"]) for side in ("gold", "prediction"))
        elif kind.startswith("mcq"):
            kind = "mcq"
        chosen = {name: options[name] for name in _OPTIONS.get(kind, ()) if name in options}
        if "n_options" in options:
            chosen["options"] = [chr(ord("A") + i) for i in range(options["n_options"])]
        yield Row(row["id"], (kind, gold, text, chosen), row["expected"])


def _spelled(spec: list[Any]) -> str:
    """Return the text of a spec: strings, and [string, count] for repetitions."""
    if len(spec) == 2 and isinstance(spec[1], int):
        return str(spec[0]) * spec[1]
    return "".join(part if isinstance(part, str) else _spelled(part) for part in spec)


def gsm8k_model_solutions(data: Path) -> Iterable[Row]:
    """Outputs of four models on GSM8K."""
    for row in _lines(data / "gsm8k_model_solutions" / "even.jsonl"):
        yield Row(row["id"], ("math", row["gold"], row["prediction"], {}), row["expected"])


def math_model_solutions(data: Path) -> Iterable[Row]:
    """Outputs of a model on MATH."""
    for row in _lines(data / "math_model_solutions" / "part_a.jsonl"):
        yield Row(row["id"], ("math", row["gold"], row["prediction"], {}), row["expected"])


def gsm8k(data: Path) -> Iterable[Row]:
    """GSM8K's solutions against their own answers."""
    for i, row in enumerate(_lines(data / "gsm8k" / "test.jsonl")):
        gold = row["answer"].rpartition("####")[2].strip()
        yield Row(f"gsm8k-{i}", ("math", gold, row["answer"], {}), True)


def math500(data: Path) -> Iterable[Row]:
    """MATH-500's answers, boxed, against themselves."""
    for row in _lines(data / "math500" / "first_half.jsonl"):
        text = f"So the answer is $\\boxed{{{row['answer']}}}$."
        yield Row(row["unique_id"], ("math", row["answer"], text, {}), True)


def mbpp(data: Path) -> Iterable[Row]:
    """MBPP's solutions against their own tests, in the sandbox."""
    with open(data / "mbpp" / "sanitized-mbpp.json", encoding="utf-8") as file:
        for row in json.load(file):
            tests = "\n".join([*row["test_imports"], *row["test_list"]])
            text = f"```python\n{row['code']}\n```"
            yield Row(f"mbpp-{row['task_id']}", ("code", tests, text, {}), True)


SETS: tuple[Callable[[Path], Iterable[Row]], ...] = (
    verifier_cases,
    gsm8k_model_solutions,
    math_model_solutions,
    gsm8k,
    math500,
    mbpp,
)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def judge(rows: list[Row], pool: VerifierPool) -> list[tuple[Row, Verdict]]:
    """Judge rows and return those whose verdict differs from the label."""
    verdicts = pool.verify_many([row.job for row in rows])
    judged = zip(rows, verdicts, strict=True)
    return [(row, verdict) for row, verdict in judged if verdict.correct != row.right]


def main() -> None:
    """Print the agreement on every set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument(
        "--allow-restricted", action="store_true", help="run code without bubblewrap"
    )
    arguments = parser.parse_args()
    with VerifierPool(arguments.workers, arguments.timeout_s) as pool:
        pool.verify_many([("math", "1", "1", {})] * arguments.workers)  # start the workers
        for collect in SETS:
            rows = list(collect(arguments.data))
            if collect is mbpp and arguments.allow_restricted:
                rows = [Row(r.name, (*r.job[:3], {"allow_restricted": True}), True) for r in rows]
            start = time.monotonic()
            different = judge(rows, pool)
            rate = len(rows) / (time.monotonic() - start)
            agree = len(rows) - len(different)
            print(f"{collect.__name__}: {agree} of {len(rows)} agree", end=" ")
            print(f"({100 * agree / len(rows):.2f} %), {rate:.0f} a second")
            for row, verdict in different:
                print(f"  {row.name}: label {row.right}, {verdict.status} {verdict.extracted!r}")


if __name__ == "__main__":
    main()
