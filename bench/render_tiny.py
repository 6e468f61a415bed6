"""The README's table of the embedded run from its records: `python bench/render_tiny.py RUN …`.

Each RUN is a run folder, or a record that this script copied before. Run folders are copied to
bench/results/tiny_seed<N>.json with where they were measured, then the table replaces what stands
between the README's markers.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- results:begin", "<!-- results:end -->"
ALGORITHMS = {"opcod": "OPCoD", "sdpo": "SDPO", "grpo": "GRPO"}


def record(path: Path) -> dict[str, Any]:
    """The summary of a run with its environment."""
    if path.is_file():
        return json.loads(path.read_text())
    summary = json.loads((path / "summary.json").read_text())
    environment = json.loads((path / "environment.json").read_text())
    summary["environment"] = environment[-1] if isinstance(environment, list) else environment
    return summary


def students(summary: dict[str, Any], algo: str) -> dict[str, Any]:
    part = summary if algo == summary["algo"] else summary["baselines"][algo]
    return part["students"]


def cell(runs: list[dict[str, Any]], algo: str, student: str, domain: str, key: str) -> str:
    """Mean over runs in per cent, ± its standard error over problems (not over seeds)."""
    entries = [students(run, algo)[student][domain] for run in runs]
    values = [100 * e[key] for e in entries]
    errors = [100 * e[f"{key}_stderr"] for e in entries]
    error = math.sqrt(sum(e * e for e in errors)) / len(errors)
    return f"{sum(values) / len(values):.1f} ± {error:.1f}"


def table(runs: list[dict[str, Any]]) -> str:
    names = students(runs[0], "opcod")
    columns = [(s, d) for s in names for d in names[s]]
    blind = [(s, d) for s, d in columns if "blind_end" in names[s][d]]
    header = [f"{s} {d}" for s, d in columns] + [f"{s} {d}, blind" for s, d in blind]
    rows = [["start", *(cell(runs, "opcod", s, d, "start") for s, d in columns)]]
    rows[0] += [cell(runs, "opcod", s, d, "blind_start") for s, d in blind]
    for algo, title in ALGORITHMS.items():
        row = [title, *(cell(runs, algo, s, d, "end") for s, d in columns)]
        rows.append(row + [cell(runs, algo, s, d, "blind_end") for s, d in blind])
    lines = ["| accuracy, % | " + " | ".join(header) + " |", "|---" * (len(header) + 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def section(runs: list[dict[str, Any]]) -> str:
    e = runs[0]["environment"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    verdicts = ", ".join("yes" if run["mutual_pareto"] else "no" for run in runs)
    entry = next(iter(next(iter(students(runs[0], "opcod").values())).values()))
    minutes = sum(run["wall_time_s"] for run in runs) / len(runs) / 60
    versions = e.get("versions", {})
    where = f"torch {versions.get('torch', '?')}, transformers {versions.get('transformers', '?')}"
    return (
        f"{table(runs)}\n\n"
        f'`make opcod ARGS="--seed N"`, mean of seeds {seeds}; mutual Pareto improvement:'
        f" {verdicts}. {entry['problems']} held-out problems per domain, standard errors over"
        " problems; *blind*: those that need a fact which this student has almost never right and"
        " its peer knows. All methods take the same number of steps from the same start."
        f" OPCoD's part of a run: {minutes:.1f} min on {e.get('cpu', 'a CPU')},"
        f" {e.get('torch_threads')} thread, {where}."
        " Records: `bench/results/tiny_seed*.json`."
    )


def main(paths: list[str]) -> None:
    runs = [record(Path(p)) for p in paths]
    for run, path in zip(runs, paths, strict=True):
        if Path(path).is_dir():
            target = RESULTS / f"tiny_seed{run['seed']}.json"
            target.write_text(json.dumps(run, indent=1) + "\n")
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN, 1)
    marker, rest = rest.split("-->", 1)
    tail = rest.split(END, 1)[1]
    readme.write_text(f"{head}{BEGIN}{marker}-->\n{section(runs)}\n{END}{tail}")


if __name__ == "__main__":
    main(sys.argv[1:])
