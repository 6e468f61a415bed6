"""The README's tables of the embedded runs from their records: `python bench/render_tiny.py RUN …`.

Each RUN, all of one algorithm, is a run folder or a record that this script copied before. Run
folders are copied to bench/results/tiny_seed<N>.json (OPCoD) or rl2f_seed<N>.json with where they
were measured, then the table replaces what stands between the README's markers.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
ALGORITHMS = {"opcod": "OPCoD", "rl2f": "RL²F", "sdpo": "SDPO", "grpo": "GRPO"}


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
        if algo != runs[0]["algo"] and algo not in runs[0]["baselines"]:
            continue
        row = [title, *(cell(runs, algo, s, d, "end") for s, d in columns)]
        rows.append(row + [cell(runs, algo, s, d, "blind_end") for s, d in blind])
    lines = ["| accuracy, % | " + " | ".join(header) + " |", "|---" * (len(header) + 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def opcod_section(runs: list[dict[str, Any]]) -> str:
    verdicts = ", ".join("yes" if run["mutual_pareto"] else "no" for run in runs)
    entry = next(iter(next(iter(students(runs[0], "opcod").values())).values()))
    return (
        f"{table(runs)}\n\n"
        f'`make opcod ARGS="--seed N"`, mean of seeds {seeds(runs)}; mutual Pareto improvement:'
        f" {verdicts}. {entry['problems']} held-out problems per domain, standard errors over"
        " problems; *blind*: those that need a fact which this student has almost never right and"
        " its peer knows. All methods take the same number of steps from the same start."
        f" OPCoD's part of a run: {where(runs)}. Records: `bench/results/tiny_seed*.json`."
    )


def rl2f_section(runs: list[dict[str, Any]]) -> str:
    """Cumulative accuracy by answer, in the settings with and without a teacher."""
    (student,) = runs[0]["dialogues"]
    settings = [s for s in runs[0]["dialogues"][student] if s != "games"]
    turns = len(runs[0]["dialogues"][student][settings[0]]["start"]["accuracy"])
    names = {"teacher": "with the teacher", "self": "own critic"}
    header = [f"{names[s]}, {n + 1}" for s in settings for n in range(turns)]

    def row(title: str, when: str, algo: str) -> list[str]:
        parts = [run if algo == "rl2f" else run["baselines"][algo] for run in runs]
        cells = []
        for setting in settings:
            records = [part["dialogues"][student][setting][when] for part in parts]
            for n in range(turns):
                mean = sum(100 * r["accuracy"][n] for r in records) / len(records)
                error = math.sqrt(sum((100 * r["stderr"][n]) ** 2 for r in records)) / len(records)
                cells.append(f"{mean:.1f} ± {error:.1f}")
        return [title, *cells]

    rows = [row("start", "start", "rl2f"), row("RL²F", "end", "rl2f")]
    rows += [row(ALGORITHMS.get(name, name.upper()), "end", name) for name in runs[0]["baselines"]]
    lines = ["| right within … answers, % | " + " | ".join(header) + " |"]
    lines += ["|---" * (len(header) + 1) + "|", *("| " + " | ".join(r) + " |" for r in rows)]
    problems = sum(d["problems"] for d in students(runs[0], "rl2f")[student].values())
    table_text = "\n".join(lines)
    return (
        f"{table_text}\n\n"
        f"`torchrun trainer/main.py --algo rl2f --seed N`, mean of seeds {seeds(runs)};"
        f" {problems} held-out problems, standard errors over problems, all methods"
        f" {runs[0]['steps']} steps from the same start. RL²F's part of a run: {where(runs)}."
        " Records: `bench/results/rl2f_seed*.json`."
    )


def seeds(runs: list[dict[str, Any]]) -> str:
    return ", ".join(str(run["seed"]) for run in runs)


def where(runs: list[dict[str, Any]]) -> str:
    """How long the runs took on which machine."""
    e = runs[0]["environment"]
    minutes = sum(run["wall_time_s"] for run in runs) / len(runs) / 60
    versions = e.get("versions", {})
    return (
        f"{minutes:.1f} min on {e.get('cpu', 'a CPU')}, {e.get('torch_threads')} thread,"
        f" torch {versions.get('torch', '?')}, transformers {versions.get('transformers', '?')}"
    )


# By algorithm: the record's name, the README's marker, and what is written there.
SECTIONS = {
    "opcod": ("tiny", "results", opcod_section),
    "rl2f": ("rl2f", "rl2f", rl2f_section),
}


def main(paths: list[str]) -> None:
    runs = [record(Path(p)) for p in paths]
    name, marker, section = SECTIONS[runs[0]["algo"]]
    for run, path in zip(runs, paths, strict=True):
        if Path(path).is_dir():
            target = RESULTS / f"{name}_seed{run['seed']}.json"
            target.write_text(json.dumps(run, indent=1) + "\n")
    readme = ROOT / "README.md"
    begin, end = f"<!-- {marker}:begin", f"<!-- {marker}:end -->"
    head, rest = readme.read_text().split(begin, 1)
    note, rest = rest.split("-->", 1)
    tail = rest.split(end, 1)[1]
    readme.write_text(f"{head}{begin}{note}-->\n{section(runs)}\n{end}{tail}")


if __name__ == "__main__":
    main(sys.argv[1:])
