"""A whole run: the algorithm, its baselines from the same start, the summary and the report."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cotutor.rollout.curriculum import SPECIALISTS
from cotutor.rollout.prompts import tutor_messages
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.break_rate import break_rate
from cotutor.trainer.collect import prompt_ids, training_sampler
from cotutor.trainer.config import Config, ConfigError, to_toml
from cotutor.trainer.evaluation import accuracy, evaluate
from cotutor.trainer.loop import Run, Stopped
from cotutor.trainer.plan import print_plan
from cotutor.trainer.problem_sets import ProblemSets, load_problem_sets
from cotutor.trainer.progress import pareto_table
from cotutor.trainer.report import write_report
from cotutor.trainer.run_folder import RunFolder, describe_environment
from cotutor.trainer.students import Student, release
from cotutor.trainer.world import World

MakeAlgorithm = Callable[[Config], Algorithm]


def run(config: Config, make_algorithm: MakeAlgorithm) -> int:
    """Train (or evaluate) and write everything; returns the process's exit code."""
    # A user's mistakes in data and models are told before any process group stands.
    problems = load_problem_sets(config.data)
    students = [Student.load(s, config) for s in config.students]
    world = World()
    try:
        if world.main:
            print(_opening_line(config, world, problems), flush=True)
        _DO[config.do](config, make_algorithm, students, problems, world)
        return 0
    except Stopped as stopped:
        if world.main:
            print(str(stopped), flush=True)
        return 0
    except (ConfigError, ValueError):
        raise
    except Exception as error:
        # The other ranks may be waiting for this one: leaving at once lets torchrun end them all.
        traceback.print_exc()
        print(f"error: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        world.close()


def _train(
    config: Config,
    make_algorithm: MakeAlgorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
) -> None:
    folder = Path(config.out if config.resume in ("", "auto") else config.resume)
    main_run, summary = _one(config, folder, make_algorithm, students, problems, world, None)
    per_student = sum(p.steps for p in main_run.schedule) // len(students)
    summary["baselines"] = {}
    for name in config.baselines:
        baseline = dataclasses.replace(config, algo=name, steps=per_student, baselines=())
        _, part = _one(
            baseline,
            folder / "baselines" / name,
            make_algorithm,
            students,
            problems,
            world,
            main_run.state.start,
        )
        summary["baselines"][name] = part
    run_folder = RunFolder(folder, world.main)
    run_folder.write_summary(summary)
    if world.main:
        write_report(folder)
        pareto_table(summary)


def _evaluate(
    config: Config,
    make_algorithm: MakeAlgorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
) -> None:
    """Score the students' models on the test problems; prints, and writes evaluation.json."""
    result: dict[str, Any] = {}
    with VerifierPool(config.rollout.verifier_workers, config.rollout.verifier_timeout_s) as pool:
        for student in students:
            engine = student.start_engine(student.config.model, config, world)
            samples = config.evaluation.samples
            scores = evaluate(engine, student, problems.test, samples, config, world, pool, "test")
            release(engine)
            result[student.name] = {
                domain: dataclasses.asdict(accuracy(values)) for domain, values in scores.items()
            }
    _write(config, world, "evaluation.json", {"samples": config.evaluation.samples, **result})


def _break_rate(
    config: Config,
    make_algorithm: MakeAlgorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
) -> None:
    """How often feedback turns right answers wrong; prints, and writes break_rate.json."""
    result = break_rate(config, make_algorithm(config), students, problems, world)
    _write(config, world, "break_rate.json", result)


def _plan(
    config: Config,
    make_algorithm: MakeAlgorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
) -> None:
    """Show the first prompts as the models will see them, memory and time; loads no weights."""
    algorithm = make_algorithm(config)
    for student in students:
        training_sampler(config, algorithm, student, problems)  # refuses lengths that can't be
        first = next(iter(problems.test.values()))[0]
        messages = tutor_messages(student.prompts, first, "(the peer's response)")
        for title, ids in (
            ("student", prompt_ids(student, first)),
            ("tutor", student.chat.prompt(messages)),
        ):
            if world.main:
                print(f"--- {student.name} as {title}, {len(ids)} tokens:")
                print(student.tokenizer.decode(ids))
    if world.main:
        print_plan(config, algorithm, world.size, world.device)


_DO = {"train": _train, "evaluate": _evaluate, "break-rate": _break_rate, "plan": _plan}


def _write(config: Config, world: World, name: str, result: Mapping[str, Any]) -> None:
    """Print a result and keep it in the run folder."""
    if world.main:
        path = Path(config.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{text}\nwritten to {path}", flush=True)


def _one(
    config: Config,
    path: Path,
    make_algorithm: MakeAlgorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
    start_scores: dict[str, Any] | None,
) -> tuple[Run, dict[str, Any]]:
    """Train one algorithm in its folder, going on where a checkpoint says so."""
    occupied = any(world.gather((path / "config.toml").exists()))
    if occupied and not config.resume:
        raise ConfigError(f"--out {path} already holds a run; add --resume auto, or name another")
    folder = RunFolder(path, world.main)
    folder.start(to_toml(config), describe_environment(), resume=occupied)
    world.barrier()
    current = Run(config, make_algorithm(config), students, problems, world, folder, start_scores)
    resumed = current.resume() if config.resume else False
    if world.main and config.resume:
        print(
            f"{path}: resuming after step {current.state.step}"
            if resumed
            else f"{path}: no complete checkpoint; starting from the beginning",
            flush=True,
        )
    scores = current.train()
    summary = summarise(config, current, scores)
    folder.write_summary(summary)
    return current, summary


def summarise(config: Config, run: Run, scores: Mapping[str, Any]) -> dict[str, Any]:
    """summary.json: accuracies in 0 … 1 with standard errors over problems, gate, feedback."""
    students: dict[str, Any] = {}
    for name, by_domain in scores["end"].items():
        students[name] = {}
        for domain, end in by_domain.items():
            start = scores["start"][name][domain]
            before, after = accuracy(start), accuracy(end)
            entry: dict[str, Any] = {
                "start": before.mean,
                "end": after.mean,
                "start_stderr": before.stderr,
                "end_stderr": after.stderr,
                "problems": after.problems,
                "truncated": after.truncated,
                "too_long": after.too_long,
            }
            blind = _blind_keys(run.problems, name, domain)
            if blind:
                b, a = accuracy(start, blind), accuracy(end, blind)
                entry |= {
                    "blind_start": b.mean,
                    "blind_end": a.mean,
                    "blind_start_stderr": b.stderr,
                    "blind_end_stderr": a.stderr,
                    "blind_problems": a.problems,
                }
            students[name][domain] = entry
    pareto = {
        name: all(e["end"] >= e["start"] for e in domains.values())
        and any(e["end"] > e["start"] for e in domains.values())
        for name, domains in students.items()
    }
    return {
        "algo": config.algo,
        "seed": config.seed,
        "steps": run.state.step,
        "wall_time_s": round(run.state.wall_time_s, 3),
        "students": students,
        "pareto": pareto,
        "mutual_pareto": bool(pareto) and all(pareto.values()),
        "feedback": {
            name.removeprefix("feedback/"): int(count)
            for name, count in sorted(run.state.feedback.items())
        },
        "gate": [
            {key: entry[key] for key in ("round", "scores", "deltas", "cognizant")}
            for entry in run.state.gate
        ],
        "problem_notes": dict(run.problems.notes),
    }


def _blind_keys(problems: ProblemSets, student: str, domain: str) -> list[str]:
    """Keys of the test problems that need a fact which this embedded specialist never learned."""
    blind = set(SPECIALISTS[student].blind) if student in SPECIALISTS else set()
    return [p.key for p in problems.test[domain] if blind.intersection(p.facts)]


def _opening_line(config: Config, world: World, problems: ProblemSets) -> str:
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    kernels = "Triton kernels" if world.device.type == "cuda" else "PyTorch kernels"
    sets = (problems.train, problems.validation, problems.test)
    counts = ", ".join(
        f"{d} " + "/".join(str(len(s.get(d, ()))) for s in sets) for d in problems.test
    )
    notes = json.dumps({k: v for k, v in problems.notes.items() if v})
    return (
        f"cotutor {config.algo} · {world.size} rank(s) on {device} · {kernels} ·"
        f" train/validation/test problems: {counts} · {notes} · run folder {config.out}"
    )
