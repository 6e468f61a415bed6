"""The report's pictures, each as an inline SVG: text in, text out, no file and no network."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cotutor.trainer.progress import STAGES, Dialogues, algorithms, feedback_shares

Records = Sequence[Mapping[str, Any]]

CURVES = {
    "reward": "mean reward",
    "loss": "loss",
    "jsd": "divergence per token, nat",
    "entropy": "entropy, nat",
    "grad_norm": "gradient norm before clipping",
    "truncated": "share of truncated responses",
}
_STYLE: Any = {
    # Names may hold "$" and "_": text is text, never mathematics.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # Fixed, so that the same run gives the same report.
    "svg.hashsalt": "cotutor",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_MAX_PLANES = 3


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _panels(n: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    rows = -(-n // columns)
    columns = min(n, columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[n:]:
        unused.set_visible(False)
    return figure, axes[:n]


def pareto_planes(summary: Mapping[str, Any]) -> str:
    """Each student's way from start to end, by algorithm, in the plane of each pair of domains.

    Returns "" where there are fewer than two domains.
    """
    domains = list(next(iter(summary["students"].values()), {}))
    pairs = list(itertools.combinations(domains, 2))[:_MAX_PLANES]
    if not pairs:
        return ""
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(len(pairs), _MAX_PLANES, 4.6, 4.2)
        for axis, (a, b) in zip(axes, pairs, strict=True):
            _plane(axis, summary, a, b)
        axes[0].legend(frameon=False, fontsize=8)
        return _svg(figure)


def _plane(axis: Axes, summary: Mapping[str, Any], a: str, b: str) -> None:
    for n, (name, run) in enumerate(algorithms(summary).items()):
        for student, scores in run["students"].items():
            start = (100 * scores[a]["start"], 100 * scores[b]["start"])
            end = (100 * scores[a]["end"], 100 * scores[b]["end"])
            arrow = {"arrowstyle": "->", "color": f"C{n}", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", xy=end, xytext=start, arrowprops=arrow)
            first = student == next(iter(run["students"]))
            axis.plot(*end, "o", color=f"C{n}", ms=4, label=name if first else None)
            if n == 0:
                axis.plot(*start, "s", color="black", ms=5)
                axis.annotate(student, start, textcoords="offset points", xytext=(5, -10))
    axis.set_xlabel(f"{a}, % right")
    axis.set_ylabel(f"{b}, % right")
    axis.margins(0.15)


def curves(steps: Records) -> str:
    """What was measured at each step, one line per student; "" without steps."""
    shown = [key for key in CURVES if any(r.get(key) is not None for r in steps)]
    if not shown:
        return ""
    starts = [r["step"] for last, r in itertools.pairwise(steps) if r["phase"] != last["phase"]]
    students = list(dict.fromkeys(r["student"] for r in steps))
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(len(shown), 3, 3.4, 2.3)
        for axis, key in zip(axes, shown, strict=True):
            for n, student in enumerate(students):
                own = [r for r in steps if r["student"] == student and r.get(key) is not None]
                scale = [max(1.0, r["rollouts"]) if key == "truncated" else 1.0 for r in own]
                values = [r[key] / s for r, s in zip(own, scale, strict=True)]
                axis.plot([r["step"] + 1 for r in own], values, f"C{n}.-", lw=0.8, label=student)
            for start in starts:
                axis.axvline(start + 0.5, color="0.8", lw=0.8, zorder=0)
            axis.set_title(CURVES[key], fontsize=9, loc="left")
        axes[0].legend(frameon=False, fontsize=8)
        for axis in axes[-3:]:
            axis.set_xlabel("step")
        return _svg(figure)


def dialogue_curves(dialogues: Dialogues) -> str:
    """Cumulative accuracy by answer, a panel for each student and setting; "" without dialogues."""
    shown = {key: columns for key, columns in dialogues.items() if key[1] != "games"}
    if not shown:
        return ""
    with mpl.rc_context(_STYLE):
        figure, axes = _panels(len(shown), _MAX_PLANES, 3.8, 3.0)
        for axis, ((student, setting), columns) in zip(axes, shown.items(), strict=True):
            for n, (name, record) in enumerate(columns.items()):
                turns = range(1, len(record["accuracy"]) + 1)
                shares = [100 * share for share in record["accuracy"]]
                errors = [100 * error for error in record["stderr"]]
                axis.errorbar(turns, shares, errors, fmt=f"C{n}.-", lw=1, label=name)
                axis.set_xticks(list(turns))
            axis.set_title(f"{student}, {setting}".strip(", "), fontsize=9, loc="left")
            axis.set_xlabel("answers")
        axes[0].set_ylabel("% right by then")
        axes[0].legend(frameon=False, fontsize=8)
        return _svg(figure)


def feedback_by_round(steps: Records) -> dict[tuple[int, str], dict[str, float]]:
    """The share of each outcome in the feedback on one student in one round."""
    counts: dict[tuple[int, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for record in steps:
        for key, value in record.items():
            if key.startswith("feedback/"):
                name = key.removeprefix("feedback/")
                counts[record["round"], record["student"]][name] += value
    shares = {key: feedback_shares(found) for key, found in counts.items()}
    return {key: found for key, found in shares.items() if found}


def feedback_outcomes(steps: Records) -> str:
    """Stacked bars of `feedback_by_round`; "" where no feedback was asked for."""
    shares = feedback_by_round(steps)
    outcomes = sorted({name for found in shares.values() for name in found})
    if not shares:
        return ""
    labels = [f"round {number}\non {student}" for number, student in shares]
    with mpl.rc_context(_STYLE):
        figure, (axis,) = _panels(1, 1, 1.5 + 1.2 * len(shares), 2.8)
        bottom = [0.0] * len(shares)
        for outcome in outcomes:
            heights = [100 * found.get(outcome, 0.0) for found in shares.values()]
            axis.bar(labels, heights, 0.6, bottom=bottom, label=outcome)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axis.set_ylabel("% of the feedback asked for")
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return _svg(figure)


def stage_seconds(steps: Records) -> dict[str, float]:
    """Mean seconds of each stage of a step."""
    return {
        key: sum(r.get(f"seconds/{key}", 0.0) for r in steps) / max(1, len(steps)) for key in STAGES
    }


def stage_times(by_algorithm: Mapping[str, Records]) -> str:
    """Mean seconds of a step's stages, one bar per algorithm; "" without steps."""
    means = {name: stage_seconds(steps) for name, steps in by_algorithm.items() if steps}
    if not means:
        return ""
    with mpl.rc_context(_STYLE):
        figure, (axis,) = _panels(1, 1, 7.0, 0.8 + 0.45 * len(means))
        left = [0.0] * len(means)
        for key, label in STAGES.items():
            widths = [found[key] for found in means.values()]
            axis.barh(list(means), widths, 0.6, left=left, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel("seconds a step")
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return _svg(figure)
