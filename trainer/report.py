"""report.html and report.md from a run folder alone: `python -m cotutor.trainer.report runs/NAME`.

The page needs no network and no other file. Whatever a model, a file or a user wrote is escaped.
"""

from __future__ import annotations

import html
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotutor.trainer import figures
from cotutor.trainer.progress import (
    STAGES,
    clock,
    dialogue_records,
    dialogue_rows,
    gate_rows,
    result_rows,
    yes_no,
)
from cotutor.trainer.run_folder import RunFolder, RunFolderError

Rows = list[list[str]]

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
pre { background: #f6f6f6; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto } .warning { color: #a00 } .verdict { font-size: 1.2rem }
"""
_EXAMPLE_FILES = 3  # rollout files looked through at the start and at the end of the run
_MAX_EXAMPLES = 8
_MAX_TEXT = 4000  # characters of one text in an example


def write_report(folder: Path) -> None:
    """Write report.html and report.md into a run folder.

    Raises RunFolderError if the folder holds no run.
    """
    run = _Run(folder)
    (folder / "report.html").write_text(_html(run), encoding="utf-8")
    (folder / "report.md").write_text(_markdown(run), encoding="utf-8")


class _Run:
    """What the report reads: summary, environment, configuration and metrics of all algorithms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.toml").is_file():
            raise RunFolderError(f"{folder}: no config.toml there; name the folder of a run")
        self.config = (folder / "config.toml").read_text(encoding="utf-8")
        self.environment = _json(folder / "environment.json") or {}
        self.summary = _json(folder / "summary.json")
        self.break_rate = _json(folder / "break_rate.json")
        name = self.summary["algo"] if self.summary else "run"
        self.steps = {name: _steps(folder)}
        for baseline in sorted((folder / "baselines").glob("*/metrics.jsonl")):
            self.steps[baseline.parent.name] = _steps(baseline.parent)
        self.main_steps = self.steps[name]

    @property
    def title(self) -> str:
        return f"{self.summary['algo'] if self.summary else 'run'} · {self.folder.name}"

    def facts(self) -> list[str]:
        """One line each about the run: outcome, length, machine."""
        lines = []
        if self.summary is None:
            lines.append("The run has not finished: there is no summary.json.")
        else:
            spent = clock(self.summary["wall_time_s"])
            lines.append(
                f"Seed {self.summary['seed']}, {self.summary['steps']} steps, {spent} of training"
                " and evaluation."
            )
        versions = self.environment.get("versions", {})
        devices = [d["name"] for d in self.environment.get("devices", [])]
        where = ", ".join(devices) or str(self.environment.get("cpu"))
        lines.append(
            f"{self.environment.get('world_size')} rank(s) on {where};"
            f" Python {self.environment.get('python')},"
            f" torch {versions.get('torch')}, transformers {versions.get('transformers')};"
            f" commit {self.environment.get('commit')}."
        )
        return lines

    def tables(self) -> Iterator[tuple[str, list[str], Rows]]:
        """(title, header, rows) of every table, in the report's order."""
        if self.summary and self.summary["students"]:
            accuracy = "Accuracy on test problems, % ± standard error"
            yield (accuracy, *result_rows(self.summary))
        dialogues = dialogue_records(self.summary or {"algo": ""})
        if dialogues:
            yield ("Dialogues: right answers, % ± standard error", *dialogue_rows(dialogues))
        if self.summary and self.summary.get("gate"):
            yield ("Gate: validation accuracy in %, Δ and verdict", *gate_rows(self.summary))
        shares = figures.feedback_by_round(self.main_steps)
        outcomes = sorted({name for found in shares.values() for name in found})
        if shares:
            rows = [
                [str(number), student, *(f"{100 * found.get(o, 0.0):.1f}" for o in outcomes)]
                for (number, student), found in shares.items()
            ]
            header = ["round", "feedback on", *outcomes]
            yield ("Feedback outcomes, % of the feedback asked for", header, rows)
        times = []
        for name, steps in self.steps.items():
            seconds = figures.stage_seconds(steps)
            cells = [f"{value:.2f}" for value in (*seconds.values(), sum(seconds.values()))]
            times.append([name, str(len(steps)), *cells])
        yield ("Seconds a step", ["algorithm", "steps", *STAGES.values(), "all"], times)
        if self.break_rate:
            yield _break_rate_table(self.break_rate["pairs"])


def health_warnings(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Signs of a run that went wrong, one sentence each, from its step records.

    A collapse shows as a divergence that at least doubles while the training reward falls.
    """
    warnings = []
    skipped = sum(bool(r.get("skipped")) for r in steps)
    if skipped:
        warnings.append(f"{skipped} of {len(steps)} steps changed no weights (skipped).")
    truncated = sum(r.get("truncated", 0) for r in steps)
    rollouts = sum(r.get("rollouts", 0) for r in steps)
    if rollouts and truncated > 0.5 * rollouts:
        warnings.append(
            f"{truncated:.0f} of {rollouts:.0f} responses were cut by their length and are worth 0:"
            " raise --rollout.max-response-tokens."
        )
    for student in dict.fromkeys(r["student"] for r in steps):
        own = [r for r in steps if r["student"] == student and r.get("jsd") is not None]
        quarter = len(own) // 4
        if quarter < 2:
            continue
        early, late = own[quarter : 2 * quarter], own[-quarter:]
        divergence = [statistics.fmean(r["jsd"] for r in part) for part in (early, late)]
        reward = [statistics.fmean(r["reward"] for r in part) for part in (early, late)]
        if divergence[1] >= 2 * divergence[0] and reward[1] < reward[0]:
            warnings.append(
                f"{student}: the divergence rose from {divergence[0]:.2g} to {divergence[1]:.2g}"
                f" while the reward fell from {reward[0]:.2f} to {reward[1]:.2f}: a sign of"
                " collapse; lower the learning rate."
            )
    return warnings


def _html(run: _Run) -> str:
    parts = [f"<h1>{_esc(run.title)}</h1>"]
    if run.summary and run.summary["students"]:
        verdict = yes_no(run.summary["mutual_pareto"])
        parts.append(f'<p class="verdict">mutual Pareto improvement: <b>{verdict}</b></p>')
    parts += [f"<p>{_esc(line)}</p>" for line in run.facts()]
    for name, steps in run.steps.items():
        parts += [f'<p class="warning">{_esc(f"{name}: {w}")}</p>' for w in health_warnings(steps)]
    for title, header, rows in run.tables():
        parts.append(f"<h2>{_esc(title)}</h2>{_html_table(header, rows)}")
        if title.startswith("Accuracy"):
            assert run.summary is not None
            parts.append(figures.pareto_planes(run.summary))
        elif title.startswith("Dialogues"):
            assert run.summary is not None
            parts.append(figures.dialogue_curves(dialogue_records(run.summary)))
        elif title.startswith("Feedback"):
            parts.append(figures.feedback_outcomes(run.main_steps))
        elif title.startswith("Seconds"):
            parts.append(figures.stage_times(run.steps))
    for name, steps in run.steps.items():
        parts.append(f"<h2>Training: {_esc(name)}</h2>{figures.curves(steps)}")
    parts.append(_html_examples(run.folder))
    for title, text in (
        ("Configuration", run.config),
        ("Environment", json.dumps(run.environment, indent=2)),
    ):
        parts.append(f"<details><summary>{title}</summary><pre>{_esc(text)}</pre></details>")
    head = f'<meta charset="utf-8"><title>{_esc(run.title)}</title><style>{_CSS}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _html_table(header: Sequence[str], rows: Rows) -> str:
    top = "".join(f"<th>{_esc(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_esc(value)}</td>" for value in row) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


def _html_examples(folder: Path) -> str:
    """One rollout for each outcome of the feedback (or one of each reward, without feedback)."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if len(files) > 2 * _EXAMPLE_FILES:
        files = [*files[:_EXAMPLE_FILES], *files[-_EXAMPLE_FILES:]]
    lines = itertools.chain.from_iterable(
        file.read_text(encoding="utf-8").split("\n") for file in files
    )
    chosen: dict[str, Mapping[str, Any]] = {}
    for line in filter(None, lines):
        rollout = json.loads(line)
        feedback = rollout.get("feedback")
        outcome = feedback["outcome"].split(":")[0] if feedback else "no feedback"
        chosen.setdefault(f"{outcome}, reward {rollout['reward']:g}", rollout)
        if len(chosen) == _MAX_EXAMPLES:
            break
    if not chosen:
        return ""
    parts = ["<h2>Examples from the rollouts</h2>"]
    for label, rollout in sorted(chosen.items()):
        where = f"{label}: {rollout['student']}, step {rollout['step'] + 1}, {rollout['domain']}"
        texts = [(turn["role"], turn["text"]) for turn in rollout["turns"]]
        texts.append(("answer read / gold", f"{rollout['extracted']} / {rollout['gold']}"))
        if rollout.get("feedback"):
            feedback = rollout["feedback"]
            texts.append((f"feedback of {feedback['tutor']}, as written", feedback["raw"]))
            texts.append(("feedback, as shown to the teacher", feedback["text"] or "(dropped)"))
        body = "".join(f"<p>{_esc(n)}</p><pre>{_esc(t[:_MAX_TEXT])}</pre>" for n, t in texts)
        parts.append(f"<details><summary>{_esc(where)}</summary>{body}</details>")
    return "\n".join(parts)


def _markdown(run: _Run) -> str:
    parts = [f"# {_md(run.title)}"]
    if run.summary and run.summary["students"]:
        parts.append(f"mutual Pareto improvement: {yes_no(run.summary['mutual_pareto'])}")
    parts += [_md(line) for line in run.facts()]
    for name, steps in run.steps.items():
        parts += [f"**Warning**, {_md(name)}: {_md(w)}" for w in health_warnings(steps)]
    for title, header, rows in run.tables():
        lines = [header, [*["---"] * 2, *["---:"] * (len(header) - 2)], *rows]
        table = "\n".join(
            "| " + " | ".join(map(_md, line)) + " |" if n != 1 else "|" + "|".join(line) + "|"
            for n, line in enumerate(lines)
        )
        parts.append(f"## {_md(title)}\n\n{table}")
    parts.append("Plots and example rollouts are in report.html.")
    return "\n\n".join(parts) + "\n"


def _esc(text: object) -> str:
    """Text for HTML. What UTF-8 or HTML can't hold is shown as an escape."""
    shown = "".join(
        c if c in "\n\t" or (c >= " " and not "\ud800" <= c <= "\udfff") else f"\\x{ord(c):02x}"
        for c in str(text)
    )
    return html.escape(shown)


def _md(text: object) -> str:
    line = _esc(" ".join(str(text).split()))
    return "".join(f"\\{c}" if c in "|*_`[]\\" else c for c in line)


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [r for r in RunFolder(folder, main=False).metrics() if r["kind"] == "step"]


def _break_rate_table(pairs: Mapping[str, Any]) -> tuple[str, list[str], Rows]:
    """What `--do break-rate` measured, one row per pair and band of difficulty."""

    def share(rate: float | None, of: int) -> str:
        return "" if rate is None else f"{100 * rate:.1f} % of {of}"

    rows: Rows = []
    for pair, found in pairs.items():
        for band, r in found.items():
            if isinstance(r, Mapping):
                changes = share(r["broken"], r["right"]), share(r["repaired"], r["wrong"])
                rows.append([pair, yes_no(found["cognizant"]), band, *changes])
    title = "Break rate: answers that changed their verdict after feedback"
    return title, ["tutor → student", "may tutor", "problems", "broken", "repaired"], rows


def main(arguments: Sequence[str]) -> int:
    """Write the reports of the named run folders; exit code 2 for a folder without a run."""
    if not arguments:
        print("error: name at least one run folder", file=sys.stderr)
        return 2
    for name in arguments:
        try:
            write_report(Path(name))
        except RunFolderError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(Path(name) / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
