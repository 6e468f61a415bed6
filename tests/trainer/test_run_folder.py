"""The run folder: what is written reads back, and a kill at any instant leaves a usable folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cotutor.trainer.run_folder import (
    RunFolder,
    RunFolderError,
    describe_environment,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run", main=True)
    folder.start("algo = 'opcod'\n", describe_environment())
    return folder


def checkpoint(run: RunFolder, step: int, content: str = "weights") -> None:
    shard = run.checkpoint_dir(step) / "student"
    shard.mkdir()
    (shard / "shard_0").write_text(content)
    run.commit_checkpoint(step, {"step": step})


def test_environment_names_versions_command_and_devices(run: RunFolder) -> None:
    record = json.loads((run.path / "environment.json").read_text())
    assert record["versions"]["torch"]
    assert record["command_line"] == sys.argv
    assert record["cpu_count"] == os.cpu_count()
    assert (run.path / "config.toml").read_text() == "algo = 'opcod'\n"


def test_fresh_start_in_a_used_folder_is_refused_and_resume_keeps_the_first_environment(
    run: RunFolder,
) -> None:
    with pytest.raises(RunFolderError, match="already holds a run; give another --out"):
        run.start("algo = 'sdpo'\n", {})
    run.start("algo = 'opcod'\n", {"started": "second"}, resume=True)
    run.start("algo = 'opcod'\n", {"started": "third"}, resume=True)
    record = json.loads((run.path / "environment.json").read_text())
    assert record["started"] == "third"
    assert len(record["earlier_starts"]) == 2
    assert record["earlier_starts"][1] == {"started": "second"}


def test_not_finite_numbers_become_null(run: RunFolder) -> None:
    run.log({"step": 0, "kind": "step", "loss": float("nan"), "norms": [1.0, float("inf")]})
    line = (run.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 0,
        "kind": "step",
        "loss": None,
        "norms": [1.0, None],
    }


def test_whatever_a_model_writes_survives(run: RunFolder) -> None:
    texts = ["\ud800 alone", "\x00", "line\u2028break\r\n", "</script>", "𝔘 ＡÄ", '"\\'.strip()]
    run.rollouts(3, [{"text": text} for text in texts])
    lines = (run.path / "rollouts" / "step_000003.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["text"] for line in lines[:-1]] == texts
    assert lines[-1] == b""


def test_rewind_forgets_later_steps_and_a_half_written_line(run: RunFolder) -> None:
    for step in range(5):
        run.log({"step": step, "kind": "step"})
        run.rollouts(step, [{"text": str(step)}])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ki')
    (run.path / "rollouts" / "step_000001.jsonl.tmp").write_text("{")
    run.rewind(3)
    run.log({"step": 3, "kind": "step"})
    assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3]
    names = sorted(file.name for file in (run.path / "rollouts").iterdir())
    assert names == [f"step_{step:06d}.jsonl" for step in range(3)]


def test_broken_line_in_the_middle_is_named(run: RunFolder) -> None:
    run.log({"step": 0, "kind": "step"})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("{]\n")
    run.log({"step": 1, "kind": "step"})
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: not a JSON record"):
        run.metrics()


def test_other_ranks_read_and_never_write(run: RunFolder) -> None:
    checkpoint(run, 4)
    before = sorted(run.path.rglob("*"))
    other = RunFolder(run.path, main=False)
    other.start("x", {})
    other.log({"step": 9, "kind": "step"})
    other.rollouts(9, [{"text": ""}])
    other.write_summary({})
    other.rewind(0)
    assert other.checkpoint_dir(9) == run.path / "checkpoints" / "step_000009.tmp"
    other.commit_checkpoint(9, {})
    other.prune(0)
    assert sorted(run.path.rglob("*")) == before
    assert other.latest_checkpoint() == run.latest_checkpoint()


def test_latest_checkpoint_is_none_without_one(run: RunFolder) -> None:
    assert run.latest_checkpoint() is None
    run.checkpoint_dir(1)
    assert run.latest_checkpoint() is None
    assert not list((run.path / "checkpoints").iterdir())


def test_prune_spares_newest_latest_and_referenced(run: RunFolder) -> None:
    for step in (2, 4, 6, 8):
        checkpoint(run, step)
    run.prune(1, {"step_000002"})
    names = sorted(p.name for p in (run.path / "checkpoints").iterdir())
    assert names == ["latest", "step_000002", "step_000008"]


def test_saving_a_step_again_replaces_it_even_across_a_kill(run: RunFolder) -> None:
    checkpoint(run, 2, "first")
    checkpoint(run, 2, "second")
    found = run.latest_checkpoint()
    assert found is not None
    assert (found[0] / "student" / "shard_0").read_text() == "second"
    # A kill between the two renames of a third saving.
    found[0].rename(found[0].with_suffix(".old"))
    run.checkpoint_dir(2)
    found = run.latest_checkpoint()
    assert found is not None
    assert (found[0] / "student" / "shard_0").read_text() == "second"


def test_unreadable_latest_is_an_error_not_a_fresh_start(run: RunFolder) -> None:
    checkpoint(run, 2)
    (run.path / "checkpoints" / "latest").write_text("step_000007\n")
    with pytest.raises(RunFolderError, match="step_000007 can't be read"):
        run.latest_checkpoint()


WRITER = textwrap.dedent(
    """
    import itertools, os, signal, sys
    from pathlib import Path
    from cotutor.trainer.run_folder import RunFolder

    countdown = int(sys.argv[2])

    def deadly(call):
        def wrapper(*args, **kwargs):
            global countdown
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapper

    # Every call that changes what a later process finds on the disk.
    os.replace, os.fsync, os.unlink, os.rmdir = map(
        deadly, (os.replace, os.fsync, os.unlink, os.rmdir)
    )
    run = RunFolder(Path(sys.argv[1]), main=True)
    for step in itertools.count(2):
        folder = run.checkpoint_dir(step)
        for shard in range(2):
            (folder / f"shard_{shard}").write_bytes(bytes([step % 256]) * 1_000_000)
        run.commit_checkpoint(step, {"step": step})
        run.log({"step": step, "kind": "step", "filler": "x" * 20_000})
        run.rollouts(step, [{"step": step}] * 100)
        run.prune(2)
        print(step, flush=True)
    """
)


def assert_usable(run: RunFolder, reported: int) -> None:
    """The latest checkpoint is whole, no older than what was reported, and saving goes on."""
    found = run.latest_checkpoint()
    assert found is not None
    folder, state = found
    assert state["step"] >= reported
    assert folder.name == f"step_{state['step']:06d}"
    if state["step"] > 1:
        shards = [file.read_bytes() for file in sorted(folder.glob("shard_*"))]
        assert shards == [bytes([state["step"] % 256]) * 1_000_000] * 2
    assert {p.suffix for p in (run.path / "checkpoints").iterdir()} == {""}
    run.rewind(state["step"])
    assert all(record["step"] < state["step"] for record in run.metrics())
    checkpoint(run, state["step"] + 1)
    again = run.latest_checkpoint()
    assert again is not None
    assert again[1]["step"] == state["step"] + 1


@pytest.mark.parametrize("calls", range(1, 32))
def test_kill_9_at_each_call_that_touches_the_disk(run: RunFolder, calls: int) -> None:
    checkpoint(run, 1)
    command = [sys.executable, "-c", WRITER, str(run.path), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_usable(run, max([1, *map(int, done.stdout.split())]))


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005])
def test_kill_9_at_any_time(run: RunFolder, delay_s: float) -> None:
    checkpoint(run, 1)
    command = [sys.executable, "-c", WRITER, str(run.path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        steps = [int(writer.stdout.readline()) for _ in range(3)]
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        steps += [int(line) for line in writer.stdout.read().split()]
    assert_usable(run, max(steps))
