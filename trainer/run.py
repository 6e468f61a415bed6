"""A whole run: the algorithm, its baselines from the same start, the summary and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from cotutor.rollout.curriculum import LEARNERS
from cotutor.rollout.models import ModelError
from cotutor.rollout.problems import DataError
from cotutor.rollout.prompts import tutor_messages
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.break_rate import break_rate
from cotutor.trainer.collect import prompt_ids, training_sampler
from cotutor.trainer.config import Config, ConfigError
from cotutor.trainer.dialogues import evaluate_dialogues
from cotutor.trainer.engines import choose_engine, plan_caches, release
from cotutor.trainer.evaluation import accuracy, evaluate
from cotutor.trainer.figures import dialogue_curves
from cotutor.trainer.loop import Run, Stopped
from cotutor.trainer.memory import memory_plan, planned_machine
from cotutor.trainer.plan import memory_line, print_plan
from cotutor.trainer.preset import check_resumed, to_toml
from cotutor.trainer.problem_sets import ProblemSets, Sampler, load_problem_sets
from cotutor.trainer.progress import dialogue_table, pareto_table
from cotutor.trainer.report import write_report
from cotutor.trainer.run_folder import RunFolder, RunFolderError, describe_environment
from cotutor.trainer.run_state import RunState
from cotutor.trainer.students import Student
from cotutor.trainer.world import World

# What a user did wrong, told in one sentence, with exit code 2.
MISTAKES = (ConfigError, DataError, ModelError, RunFolderError)

MakeAlgorithm = Callable[[Config], Algorithm]


class Task(NamedTuple):
    """What was asked for, checked and loaded, before any process group stands."""

    config: Config
    make_algorithm: MakeAlgorithm
    students: Sequence[Student]
    problems: ProblemSets
    # By student: its training problems, and how many were left out because of their length.
    samplers: Mapping[str, tuple[Sampler, int]]


def run(config: Config, make_algorithm: MakeAlgorithm) -> int:
    """Train (or evaluate) and write everything; returns the process's exit code."""
    # A user's mistakes in data and models are told before any process group stands.
    why = ""
    if config.do != "plan":  # which is for another machine, perhaps
        engine, why = choose_engine(config)
        config = dataclasses.replace(config, engine=engine)
    problems = load_problem_sets(config)
    students = [Student.load(s, config) for s in config.students]
    algorithm = make_algorithm(config)
    drawn = {s.name: training_sampler(config, algorithm, s, problems) for s in students}
    # A plan is made for the ranks that it names, not for those that print it.
    world = World() if config.do == "plan" else World(config.parallel)
    try:
        config = config if config.do == "plan" else plan_caches(config, algorithm, world)
        task = Task(config, make_algorithm, students, problems, drawn)
        if world.main:
            print(_opening_line(config, why, world, problems), flush=True)
        _DO[config.do](task, world)
    except Stopped as stopped:
        if world.main:
            print(str(stopped), flush=True)
    except MISTAKES as error:
        _leave(world, f"error: {error}", 2)
    except Exception as error:
        traceback.print_exc()
        _leave(world, f"error: rank {world.rank}: {error}", 1)
    world.close()
    return 0


def _leave(world: World, message: str, code: int) -> NoReturn:
    """Say why and end this process at once.

    The other ranks may be waiting for this one, and closing the process group would wait for them:
    torchrun ends them all when one is gone.
    """
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _train(task: Task, world: World) -> None:
    config, folder = task.config, Path(task.config.out)
    if world.main and config.engine == "vllm":
        machine = planned_machine(config, world.size, world.device)
        plan = memory_plan(config, task.make_algorithm(config), machine)
        print(memory_line(plan, machine), flush=True)
    main_run, summary = _one(task, folder, world, None)
    per_student = sum(p.steps for p in main_run.schedule) // len(task.students)
    summary["baselines"] = {}
    for name in config.baselines:
        baseline = dataclasses.replace(config, algo=name, steps=per_student, baselines=())
        baseline_folder = folder / "baselines" / name
        _, part = _one(task._replace(config=baseline), baseline_folder, world, main_run.state)
        summary["baselines"][name] = part
    run_folder = RunFolder(folder, world.main)
    run_folder.write_summary(summary)
    if world.main:
        write_report(folder)
        pareto_table(summary)


def _evaluate(task: Task, world: World) -> None:
    """Score the students' models, or the checkpoints of the first; prints, and writes files.

    evaluation.json holds everything; evaluation.svg the dialogues' curves, where there are any.
    """
    config = task.config
    first = task.students[0]
    folders = config.evaluation.checkpoints
    models = (
        [(path, first, path) for path in folders]
        if folders
        else [(s.name, s, s.config.model) for s in task.students]
    )
    result: dict[str, Any] = {}
    dialogues: dict[tuple[str, str], dict[str, Any]] = {}
    with VerifierPool(config.rollout.verifier_workers, config.rollout.verifier_timeout_s) as pool:
        for name, student, path in models:
            engine = student.start_engine(path, config, world)
            samples = config.evaluation.samples
            tested = task.problems.test
            scores = evaluate(engine, student, tested, samples, config, world, pool, "test")
            result[name] = {
                domain: dataclasses.asdict(accuracy(values)) for domain, values in scores.items()
            }
            if config.dialogue.evaluate:
                guide = student.start_engine(student.config.model, config, world, "tutor")
                records = evaluate_dialogues(engine, guide, student, tested, config, world, pool)
                release(guide)
                result[name]["dialogues"] = records
                for setting, record in records.items():
                    dialogues.setdefault(("", setting), {})[name] = record
            release(engine)
    _write(config, world, "evaluation.json", {"samples": config.evaluation.samples, **result})
    if world.main and dialogues:
        dialogue_table(dialogues)
        plot = Path(config.out) / "evaluation.svg"
        plot.write_text(dialogue_curves(dialogues), encoding="utf-8")
        print(f"written to {plot}", flush=True)


def _break_rate(task: Task, world: World) -> None:
    """How often feedback turns right answers wrong; prints, and writes break_rate.json."""
    algorithm = task.make_algorithm(task.config)
    result = break_rate(task.config, algorithm, task.students, task.problems, world)
    _write(task.config, world, "break_rate.json", result)


def _plan(task: Task, world: World) -> None:
    """Show the first prompts as the models will see them, memory and time; loads no weights."""
    for student in task.students:
        first = next(iter(task.problems.test.values()))[0]
        messages = tutor_messages(student.prompts, first, "(the peer's response)")
        for title, ids in (
            ("student", prompt_ids(student, first)),
            ("tutor", student.chat.prompt(messages)),
        ):
            if world.main:
                print(f"--- {student.name} as {title}, {len(ids)} tokens:")
                print(student.tokenizer.decode(ids))
    if world.main:
        algorithm = task.make_algorithm(task.config)
        print_plan(task.config, algorithm, world.size, world.device)


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
    task: Task, path: Path, world: World, start: RunState | None
) -> tuple[Run, dict[str, Any]]:
    """Train one algorithm in its folder, going on where a checkpoint says so."""
    config = task.config
    occupied = any(world.gather((path / "config.toml").exists()))
    if occupied and not config.resume:
        raise ConfigError(f"--out {path} already holds a run; add --resume auto, or name another")
    if occupied:
        check_resumed(config, path / "config.toml")
    folder = RunFolder(path, world.main)
    folder.start(to_toml(config), describe_environment(), resume=occupied)
    world.barrier()
    algorithm = task.make_algorithm(config)
    current = Run(
        config, algorithm, task.students, task.problems, task.samplers, world, folder, start
    )
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
        "dialogues": {
            name: {
                setting: {"start": record, "end": run.state.dialogues_end[name][setting]}
                for setting, record in records.items()
            }
            for name, records in run.state.dialogues_start.items()
        },
        "problem_notes": dict(run.problems.notes),
    }


def _blind_keys(problems: ProblemSets, student: str, domain: str) -> list[str]:
    """Keys of the test problems that need a fact which this embedded specialist never learned."""
    blind = set(LEARNERS[student].blind) if student in LEARNERS else set()
    return [p.key for p in problems.test[domain] if blind.intersection(p.facts)]


def _engine(config: Config, why: str) -> str:
    if config.engine != "vllm":
        return f"{config.engine} engine" + (f" ({why})" if why else "")
    student, tutor = config.vllm.student_kv_cache_gb, config.vllm.tutor_kv_cache_gb
    return f"vllm engine ({why}; caches {student:.3g} and {tutor:.3g} GB)"


def _opening_line(config: Config, why: str, world: World, problems: ProblemSets) -> str:
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    kernels = "Triton kernels" if world.device.type == "cuda" else "PyTorch kernels"
    sets = (problems.train, problems.validation, problems.test)
    counts = ", ".join(
        f"{d} " + "/".join(str(len(s.get(d, ()))) for s in sets) for d in problems.test
    )
    notes = json.dumps({k: v for k, v in problems.notes.items() if v})
    return (
        f"cotutor {config.algo} · {world.size} rank(s) on {device} · {kernels} ·"
        f" {_engine(config, why)} ·"
        f" train/validation/test problems: {counts} · {notes} · run folder {config.out}"
    )
