"""The report and the terminal's tables, from run folders that the run folder's own writer made."""

from __future__ import annotations

import html.parser
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotutor.trainer import report
from cotutor.trainer.figures import feedback_by_round
from cotutor.trainer.progress import Progress, clock, pareto_table
from cotutor.trainer.report import health_warnings, write_report
from cotutor.trainer.run_folder import RunFolder, RunFolderError, describe_environment

HOSTILE = (
    "</pre><script>alert('x')</script><img src=http://evil.example/x> $\\frac$ \ud800 \x00 &amp;"
)
DOMAINS = ("a$_1$", "<b>")


def step_record(step: int, student: str, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "step",
        "step": step,
        "round": 1 + step // 4,
        "phase": step // 2,
        "student": student,
        "reward": 0.5 + step / 20,
        "loss": 0.01 / (step + 1),
        "jsd": 0.002,
        "entropy": 0.7,
        "grad_norm": None if step == 3 else 0.3,
        "skipped": step == 3,
        "rollouts": 64.0,
        "truncated": 2.0,
        "response_tokens": 3000.0,
        "feedback/match": 40.0,
        "feedback/no_match": 8.0,
        "feedback/asked": 48.0,
        "feedback/revealed": 3.0,
        "seconds/generate": 1.5,
        "seconds/train": 0.5,
    }
    return {**record, **changes}


def scores(start: float, end: float) -> dict[str, float]:
    return {"start": start, "end": end, "start_stderr": 0.01, "end_stderr": 0.02, "problems": 200}


def summary_of(algo: str, last: float) -> dict[str, Any]:
    blind = {f"blind_{k}": v for k, v in scores(0.01, 0.4).items()}
    students = {
        "s1": {DOMAINS[0]: scores(0.87, 0.99), DOMAINS[1]: scores(0.41, 0.88) | blind},
        "s2": {DOMAINS[0]: scores(0.76, 0.98), DOMAINS[1]: scores(0.83, last)},
    }
    return {
        "algo": algo,
        "seed": 0,
        "steps": 8,
        "wall_time_s": 3661.4,
        "students": students,
        "pareto": {"s1": True, "s2": last >= 0.83},
        "mutual_pareto": last >= 0.83,
        "feedback": {"match": 320, "no_match": 64, "asked": 384, "revealed": 24},
        "gate": [
            {
                "round": 1,
                "scores": {"s1": dict.fromkeys(DOMAINS, 0.5), "s2": dict.fromkeys(DOMAINS, 0.6)},
                "deltas": {"s1": 0.333, "s2": 0.0},
                "cognizant": {"s1": False, "s2": True},
            }
        ],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "run", main=True)
    folder.start("algo = 'opcod'\n", describe_environment())
    for step in range(8):
        folder.log(step_record(step, f"s{1 + step // 2 % 2}"))
    feedback = {"tutor": "s2", "outcome": "match:force", "raw": HOSTILE, "text": HOSTILE}
    rollout = {
        "step": 0,
        "student": "s1",
        "domain": DOMAINS[1],
        "gold": "A",
        "turns": [{"role": "prompt", "text": "Q"}, {"role": "student", "text": HOSTILE}],
        "reward": 0.0,
        "extracted": HOSTILE,
        "feedback": feedback,
    }
    folder.rollouts(0, [rollout, {**rollout, "feedback": None, "reward": 1.0}])
    baseline = RunFolder(tmp_path / "run" / "baselines" / "sdpo", main=True)
    baseline.start("algo = 'sdpo'\n", describe_environment())
    for step in range(4):
        baseline.log(step_record(step, "s1"))
    folder.write_summary(
        {**summary_of("opcod", 0.96), "baselines": {"sdpo": summary_of("sdpo", 0.7)}}
    )
    return tmp_path / "run"


class Tags(html.parser.HTMLParser):
    """Every tag and every address that a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: set[str] = set()
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [] if tag == "meta" else [tag]
        self.addresses |= {v or "" for k, v in attrs if k in ("src", "href", "xlink:href")}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_complete_self_contained_and_escaped(run: Path) -> None:
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    parsed = Tags(page)
    assert parsed.open == []
    assert parsed.tags.isdisjoint({"script", "img", "b\x00", "link", "iframe"})
    assert all(address.startswith("#") for address in parsed.addresses)
    assert "url(http" not in page
    assert "@import" not in page
    assert page.count("<svg") == 5  # plane, outcomes, times, curves of two algorithms
    assert "mutual Pareto improvement: <b>yes</b>" in page
    for title in ("Accuracy on test", "Gate:", "Feedback outcomes", "Seconds a step", "Examples"):
        assert title in page
    assert "\\xd800" in page
    assert "\\x00" in page
    assert "$\\frac$" in page


def test_markdown_has_the_same_tables(run: Path) -> None:
    write_report(run)
    text = (run / "report.md").read_text(encoding="utf-8")
    assert "mutual Pareto improvement: yes" in text
    assert "| s1 | &lt;b&gt; | 41.0 ± 1.0 | 88.0 ± 2.0 | 88.0 ± 2.0 |" in text
    assert "| s1 | &lt;b&gt;, blind facts | 1.0 ± 1.0 | 40.0 ± 2.0 | 40.0 ± 2.0 |" in text
    assert "| 1 | s1 | 83.3 | 16.7 |" in text
    assert "| opcod | 8 | 1.50 | 0.00 | 0.00 | 0.00 | 0.50 | 0.00 | 2.00 |" in text
    assert "<b>" not in text


def test_same_folder_gives_the_same_page(run: Path) -> None:
    write_report(run)
    first = (run / "report.html").read_bytes()
    write_report(run)
    assert (run / "report.html").read_bytes() == first


def test_unfinished_run_has_a_report_without_verdict(run: Path) -> None:
    (run / "summary.json").unlink()
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "has not finished" in page
    assert "mutual Pareto" not in page
    assert "<svg" in page


def test_break_rate_is_shown_where_it_was_measured(run: Path) -> None:
    from cotutor.trainer.break_rate import _rates

    rates = _rates({"all/right": 40.0, "all/right_changed": 1.0, "hardest/wrong": 7.0})
    result = {"gate": {}, "pairs": {"s2 → s1": {"cognizant": True, **rates}}}
    (run / "break_rate.json").write_text(json.dumps(result))
    write_report(run)
    text = (run / "report.md").read_text(encoding="utf-8")
    assert "| s2 → s1 | yes | all | 2.5 % of 40 |  |" in text
    assert "| s2 → s1 | yes | hardest |  | 0.0 % of 7 |" in text


def test_command_line(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cotutor.trainer.report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()
    assert report.main([str(tmp_path / "nothing")]) == 2
    with pytest.raises(RunFolderError, match=r"nothing: no config\.toml there"):
        write_report(tmp_path / "nothing")


def test_feedback_shares_leave_out_what_is_no_outcome() -> None:
    steps = [
        step_record(0, "s1"),
        step_record(1, "s1"),
        step_record(2, "s2", **{"feedback/match": 0.0}),
    ]
    shares = feedback_by_round(steps)
    assert shares[1, "s1"] == pytest.approx({"match": 40 / 48, "no_match": 8 / 48})
    assert shares[1, "s2"] == pytest.approx({"match": 0.0, "no_match": 1.0})


def test_health_warns_of_collapse_truncation_and_skipped_steps_alone() -> None:
    good = [step_record(n, "s1", skipped=False, reward=0.5, jsd=0.002) for n in range(16)]
    assert health_warnings(good) == []
    bad = [{**r, "jsd": 0.012, "reward": 0.2} if r["step"] >= 12 else r for r in good]
    (warning,) = health_warnings(bad)
    assert re.match(r"s1: the divergence rose from 0\.002 to 0\.012 while the reward fell", warning)
    learning = [{**r, "jsd": 0.012, "reward": 0.9} if r["step"] >= 12 else r for r in good]
    assert health_warnings(learning) == []
    (warning,) = health_warnings([{**r, "truncated": 33.0} for r in good])
    assert "--rollout.max-response-tokens" in warning
    (warning,) = health_warnings([{**r, "skipped": r["step"] == 0} for r in good])
    assert warning.startswith("1 of 16 steps")


def test_final_table_ends_with_the_verdict_of_the_run_itself() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120)
    good, bad = summary_of("opcod", 0.96), summary_of("sdpo", 0.7)
    pareto_table({**good, "baselines": {"sdpo": bad}}, console)
    lines = output.getvalue().splitlines()
    assert lines[-1] == "mutual Pareto improvement: yes"
    assert "sdpo: mutual Pareto improvement: no" in lines
    assert any(re.search(r"s2 +<b> +83\.0 ± 1\.0 +96\.0 ± 2\.0 +70\.0 ± 2\.0", x) for x in lines)
    assert any(re.search(r"s2 +Pareto improvement +yes +no", x) for x in lines)
    pareto_table({**bad, "baselines": {}}, console)
    assert output.getvalue().splitlines()[-1] == "mutual Pareto improvement: no"


def progress_output(terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, soft_wrap=True)
    progress = Progress(3, True, console)
    progress.evaluation("s1", "test", {"a": {"mean": 0.5, "stderr": 0.01, "problems": 7}})
    for step in range(3):
        progress.step(step_record(step, "s1"))
    progress.close()
    return output.getvalue()


def test_progress_is_one_live_line_on_a_terminal_and_lines_elsewhere() -> None:
    live = progress_output(terminal=True)
    assert live.count("\n") == 2  # the evaluation's line, and the end of the live one
    assert live.count("\r\x1b[2Kstep ") == 3
    plain = progress_output(terminal=False)
    assert "\r" not in plain
    assert "\x1b" not in plain
    lines = plain.splitlines()
    assert lines[0] == "test · s1: a 50.0 ± 1.0 % of 7"
    # Steps that follow each other within two seconds share a line, but the last is always told.
    assert [line.split(" · ")[0] for line in lines[1:]] == ["step 1/3", "step 3/3"]
    assert "2000 tokens/s · generate 1.5 train 0.5 s · ETA 0:04" in lines[1]


def test_progress_of_other_ranks_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3, False)
    progress.step(step_record(0, "s1"))
    progress.gate(summary_of("opcod", 1.0)["gate"][0])
    progress.close()
    assert capsys.readouterr().out == ""


def test_clock() -> None:
    assert [clock(s) for s in (0.4, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]
