"""What a run shows: one live line on a terminal, plain lines elsewhere, and its tables.

`result_rows` and `gate_rows` are the tables as text; the terminal and the report render them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# The stages of a step, in order: key of the metrics ("seconds/<key>") → how it is shown.
STAGES = {
    "generate": "generate",
    "verify": "verify",
    "feedback": "feedback",
    "annotate": "annotate",
    "train": "train",
    "handover": "hand-over",
}
_NOT_OUTCOMES = ("asked", "revealed")
_PLAIN_LINE_EVERY_S = 2.0

Rows = list[list[str]]


class Progress:
    """Shows a run's steps; does nothing where `enabled` is False (all ranks but one).

    Args:
        total_steps: optimizer steps of all phases of all students.
        console: where to write; standard output by default.
    """

    def __init__(self, total_steps: int, enabled: bool, console: Console | None = None) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._done = 0
        self._step_seconds: list[float] = []
        self._line = ""
        self._printed_at = float("-inf")

    def resume(self, done: int) -> None:
        """`done` steps were made by an earlier process."""
        self._done = done

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the metrics record of a finished step."""
        if not self._enabled:
            return
        self._done += 1
        seconds = {key: float(record.get(f"seconds/{key}", 0.0)) for key in STAGES}
        self._step_seconds.append(sum(seconds.values()))
        text = self._describe(record, seconds)
        if self._console.is_terminal:
            self._line = text
            self._draw()
            return
        now = time.monotonic()
        if now - self._printed_at >= _PLAIN_LINE_EVERY_S or self._done == self._total:
            self._printed_at = now
            self._console.print(text, markup=False)

    def _describe(self, record: Mapping[str, Any], seconds: Mapping[str, float]) -> str:
        spent = self._step_seconds
        rate = record.get("response_tokens", 0.0) / max(seconds["generate"], 1e-9)
        stages = " ".join(f"{STAGES[key]} {value:.1f}" for key, value in seconds.items() if value)
        return " · ".join(
            [
                f"step {self._done}/{self._total}",
                f"round {record['round']} phase {record['phase'] + 1}",
                str(record["student"]),
                f"reward {record['reward']:.3f}",
                f"loss {record['loss']:.4g}",
                *([f"{rate:.0f} tokens/s"] if seconds["generate"] else []),
                f"{stages} s",
                f"ETA {clock((self._total - self._done) * sum(spent) / len(spent))}",
            ]
        )

    def evaluation(
        self, student: str, which: str, accuracy: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Show one student's accuracy by domain on the `which` ("validation", "test") problems."""
        cells = [
            f"{domain} {cell(a['mean'], a['stderr'])} % of {a['problems']}"
            for domain, a in accuracy.items()
        ]
        self._above(f"{which} · {student}: " + " · ".join(cells))

    def dialogues(self, student: str, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Show one student's scores in dialogues, by setting."""
        for setting, record in records.items():
            if setting == "games":
                cells = [f"{game} {score:.3f}" for game, score in record["score"].items()]
            else:
                cells = [f"{100 * share:.1f}" for share in record["accuracy"]]
                cells[-1] += f" % right within 1 … {len(cells)} answers"
            self._above(f"dialogues, {setting} · {student}: " + " · ".join(cells))

    def gate(self, entry: Mapping[str, Any]) -> None:
        """Show which students may tutor in this round."""
        verdicts = [
            f"{name} {'tutors' if may else 'is silent'} (Δ {entry['deltas'][name]:.3f})"
            for name, may in entry["cognizant"].items()
        ]
        self._above(f"round {entry['round']} gate: " + " · ".join(verdicts))

    def close(self) -> None:
        """End the live line, so that whatever is printed next has a line of its own."""
        if self._line:
            self._console.file.write("\n")
            self._console.file.flush()
            self._line = ""

    def _above(self, text: str) -> None:
        """A line that stays, above the live one."""
        if not self._enabled:
            return
        if self._line:
            self._console.file.write("\r\x1b[2K")
        self._console.print(text, markup=False)
        if self._line:
            self._draw()

    def _draw(self) -> None:
        shown = self._line[: self._console.width - 1]
        self._console.file.write(f"\r\x1b[2K{shown}")
        self._console.file.flush()


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cell(mean: float, stderr: float) -> str:
    """An accuracy in 0 … 1 and its standard error, in per cent."""
    return f"{100 * mean:.1f} ± {100 * stderr:.1f}"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def algorithms(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The run's own summary and its baselines', by algorithm."""
    return {summary["algo"]: summary, **summary.get("baselines", {})}


def result_rows(summary: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Header and rows of the end-of-run table: students × domains, start → end by algorithm.

    Where the domains hold blind facts, which the student can't find alone, a second row of the
    domain has the accuracy on those problems.
    """
    runs = algorithms(summary)
    rows: Rows = []
    for student, domains in summary["students"].items():
        for domain, scores in domains.items():
            for prefix, label in (("", domain), ("blind_", f"{domain}, blind facts")):
                if f"{prefix}start" in scores:
                    rows.append([student, label, *_cells(runs, student, domain, prefix)])
        verdicts = [yes_no(run["pareto"][student]) for run in runs.values()]
        rows.append([student, "Pareto improvement", "", *verdicts])
    return ["student", "domain", "start", *(f"{name} end" for name in runs)], rows


def _cells(
    runs: Mapping[str, Mapping[str, Any]], student: str, domain: str, prefix: str
) -> list[str]:
    scores = [run["students"][student][domain] for run in runs.values()]
    start = cell(scores[0][f"{prefix}start"], scores[0][f"{prefix}start_stderr"])
    return [start, *(cell(s[f"{prefix}end"], s[f"{prefix}end_stderr"]) for s in scores)]


def gate_rows(summary: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Header and rows of the gate's table: one row per round and student."""
    rows: Rows = []
    domains: list[str] = []
    for entry in summary.get("gate", []):
        for student, scores in entry["scores"].items():
            domains = list(scores)
            row = [str(entry["round"]), student, *(f"{100 * s:.1f}" for s in scores.values())]
            row += [f"{entry['deltas'][student]:.3f}", yes_no(entry["cognizant"][student])]
            rows.append(row)
    return ["round", "student", *domains, "Δ", "may tutor"], rows


Dialogues = Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]


def dialogue_records(summary: Mapping[str, Any]) -> Dialogues:
    """Records of dialogues by (student, setting) and column: the start, then each algorithm."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, run in algorithms(summary).items():
        for student, settings in run.get("dialogues", {}).items():
            for setting, record in settings.items():
                columns = found.setdefault((student, setting), {"start": record["start"]})
                columns[f"{name} end"] = record["end"]
    return found


def dialogue_rows(dialogues: Dialogues) -> tuple[list[str], Rows]:
    """Header and rows of the dialogues' table: accuracy by answer, or a game's score; then shares.

    "repeated": retries that say the answer before them word for word. "leaked": drafts of the
    teacher that gave the answer away, none of which reached the student.
    """
    rows: Rows = []
    names: dict[str, None] = {}
    for (student, setting), columns in dialogues.items():
        names |= dict.fromkeys(columns)
        first = next(iter(columns.values()))
        lines: dict[str, list[str]] = {}
        if setting == "games":
            for game in first["score"]:
                lines[game] = [f"{r['score'][game]:.3f}" for r in columns.values()]
        else:
            for n in range(len(first["accuracy"])):
                label = f"within {n + 1} answer" + ("s" if n else "")
                lines[label] = [cell(r["accuracy"][n], r["stderr"][n]) for r in columns.values()]
        shown = ["repeated", *(["leaked"] if setting == "teacher" else [])]
        for key in shown:
            lines[f"{key}, %"] = [f"{100 * r[key]:.1f}" for r in columns.values()]
        for key in ("student_tokens_per_turn", "seconds_per_turn"):
            lines[key.replace("_", " ")] = [f"{r[key]:.4g}" for r in columns.values()]
        rows += [[student, setting, label, *cells] for label, cells in lines.items()]
    return ["student", "setting", "", *names], rows


def feedback_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """The share of each outcome among all feedback that was asked for."""
    outcomes = {name: n for name, n in counts.items() if name not in _NOT_OUTCOMES}
    total = sum(outcomes.values())
    return {name: n / total for name, n in outcomes.items()} if total else {}


def wide_console() -> Console:
    """Standard output; a pipe has no width, so rows are kept whole there, to be read by line."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def pareto_table(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the results of a run and of its baselines, and the verdict on a line of its own.

    A student's training is a Pareto improvement if its accuracy fell in no domain and rose in at
    least one, against the start; a mutual one if that holds for every student.
    """
    console = console or wide_console()
    if not summary["students"]:
        console.print("no evaluation: this algorithm samples nothing while it trains", markup=False)
        return
    accuracy = "accuracy on test problems, % ± standard error"
    _print_table(console, accuracy, *result_rows(summary))
    dialogue_table(dialogue_records(summary), console)
    header, rows = gate_rows(summary)
    if rows:
        _print_table(console, "gate: validation accuracy, %", header, rows)
    shares = feedback_shares(summary.get("feedback", {}))
    if shares:
        parts = [f"{name} {100 * share:.1f} %" for name, share in shares.items()]
        console.print("feedback: " + ", ".join(parts), markup=False)
    for name, run in algorithms(summary).items():
        if run is not summary:
            verdict = yes_no(run["mutual_pareto"])
            console.print(f"{name}: mutual Pareto improvement: {verdict}", markup=False)
    print(f"mutual Pareto improvement: {yes_no(summary['mutual_pareto'])}", file=console.file)


def dialogue_table(dialogues: Dialogues, console: Console | None = None) -> None:
    """Print the dialogues' table, if there were any."""
    if dialogues:
        title = "dialogues: right answers, % ± standard error; scores of games"
        _print_table(console or wide_console(), title, *dialogue_rows(dialogues))


def _print_table(console: Console, title: str, header: Sequence[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="left" if name in ("student", "domain") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
