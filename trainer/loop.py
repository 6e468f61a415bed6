"""The run, from top to bottom: rounds, phases, steps. Knows no algorithm by name.

A step: sample rollouts ▸ judge ▸ annotate (contexts, advantages, feedback) ▸ micro-batches ▸ loss ▸
backward ▸ clip, AdamW, EMA ▸ hand the weights to the engine. Everything random is a function of
(seed, step, problem, sample), so a run that was killed and resumed gives the same bits.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cotutor.rollout.chat import fit_reprompt
from cotutor.rollout.engine import Engine, Sampling, request_seed
from cotutor.rollout.trajectory import Problem, Trajectory
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.algos.base import Algorithm, Phase, StepContext, Tutor
from cotutor.trainer.collect import (
    given_solutions,
    judge,
    prompt_ids,
    record,
    sample_groups,
    share,
)
from cotutor.trainer.config import Config
from cotutor.trainer.dialogues import evaluate_dialogues, sample_dialogues, timed
from cotutor.trainer.engines import release
from cotutor.trainer.evaluation import accuracy, evaluate
from cotutor.trainer.peers import open_gate, start_tutors
from cotutor.trainer.policy import Policy
from cotutor.trainer.problem_sets import ProblemSets, Sampler
from cotutor.trainer.progress import Progress
from cotutor.trainer.run_folder import RunFolder
from cotutor.trainer.run_state import INSIDE, RunState
from cotutor.trainer.step import accumulate_gradients, check_canary, loss_metrics, rollout_counts
from cotutor.trainer.stopping import Stopped, StopRequest
from cotutor.trainer.students import Student
from cotutor.trainer.world import World


class Run:
    """One algorithm's training of all students.

    Args:
        config: the resolved configuration; `config.algo` is the algorithm of this run.
        samplers: by student its training problems, and how many prompts were too long.
        start: the state of another run that has measured the initial students.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        students: Sequence[Student],
        problems: ProblemSets,
        samplers: Mapping[str, tuple[Sampler, int]],
        world: World,
        folder: RunFolder,
        start: RunState | None = None,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.students = list(students)
        self.problems = problems
        self.world = world
        self.folder = folder
        self.state = RunState(exports={s.name: [s.config.model] for s in students})
        if start is not None:
            self.state.start, self.state.dialogues_start = start.start, start.dialogues_start
        self.pool = VerifierPool(config.rollout.verifier_workers, config.rollout.verifier_timeout_s)
        self.samplers = {name: sampler for name, (sampler, _) in samplers.items()}
        self.prompts_too_long = {name: left_out for name, (_, left_out) in samplers.items()}
        n_problems = max(s.n_problems for s in self.samplers.values())
        self.schedule = algorithm.schedule(len(students), n_problems, config.steps)
        self.progress = Progress(sum(p.steps for p in self.schedule), world.main)
        self._handed_over = 0
        self._stop = StopRequest()
        self._started = time.monotonic()

    # --- the run --------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Run all phases that are left; returns the test scores at start and end by student."""
        if self.state.step == 0:
            notes = {"kind": "data", "step": 0, "prompts_too_long": self.prompts_too_long}
            self.folder.log({**notes, **self.problems.notes})
        with self.pool, self._stop:
            if not self.state.start and self.algorithm.on_policy:
                self.state.dialogues_start = self._evaluate_dialogues()
                self.state.start = self._evaluate_all("test")
            while self.state.phase < len(self.schedule):
                phase = self.schedule[self.state.phase]
                if self.algorithm.feedback and len(self.state.gate) < phase.round:
                    self._open_gate(phase.round)
                self._run_phase(phase)
            if self.state.start and not self.state.end:
                self.state.dialogues_end = self._evaluate_dialogues()
                self.state.end = self._evaluate_all("test")
                self._count_time()
                self.folder.renew_state(self.state.step, asdict(self.state))
        self.progress.close()
        return {"start": self.state.start, "end": self.state.end}

    def _run_phase(self, phase: Phase) -> None:
        student = self.students[phase.student]
        policy = self._policy(student, fresh=self.state.step_in_phase == 0)
        engine = self._student_engine(student, policy)
        guide = self._guide_engine(student, engine)
        tutors, tutor_engines = self._tutors(phase)
        sampler, total_steps, done_before = self._student_schedule(phase)
        index = self.state.phase
        try:
            while self.state.phase == index:
                own_step = done_before + self.state.step_in_phase
                lr = self.algorithm.learning_rate(own_step, total_steps)
                problems = sampler.step(own_step)
                self._step(phase, student, policy, engine, guide, tutors, problems, lr)
                self._after_step(phase, student, policy)
        finally:
            for each in {id(e): e for e in (*tutor_engines, engine, guide) if e}.values():
                release(each)
            # FSDP's hooks are reference cycles: without a collection the next phase's weights
            # would stand beside this one's.
            del policy, engine, guide, tutors, tutor_engines
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _step(
        self,
        phase: Phase,
        student: Student,
        policy: Policy,
        engine: Engine | None,
        guide: Engine | None,
        tutors: Sequence[Tutor],
        problems: Sequence[Problem],
        lr: float,
    ) -> None:
        seconds: dict[str, float] = defaultdict(float)
        mine = share(problems, self.world.rank, self.world.size)
        groups = self._rollouts(student, engine, guide, mine, seconds)
        if engine is not None:
            engine.sleep(level=2)  # until the step's weights are handed over
        rollouts = [rollout for group in groups for rollout in group]
        cut: dict[str, float] = defaultdict(float)
        context = self._step_context(student, tutors, seconds, cut)
        before = seconds["feedback"]
        with timed(seconds, "annotate"):
            counts = self.algorithm.annotate(groups, context)
        seconds["annotate"] -= seconds["feedback"] - before
        with timed(seconds, "train"):
            losses, grad_norm, skipped = self._update(policy, rollouts, lr)
        with timed(seconds, "handover"):
            if engine is not None:
                engine.wake()
                engine.load_weights(policy.full_tensors())
        totals = self.world.sum(
            {**counts, **{f"cut/{k}": v for k, v in cut.items()}, **rollout_counts(rollouts)}
        )
        for name, value in totals.items():
            if name.startswith("feedback/"):
                self.state.feedback[name] = self.state.feedback.get(name, 0.0) + value
        line = {
            "kind": "step",
            "step": self.state.step,
            "round": phase.round,
            "phase": self.state.phase,
            "student": student.name,
            "reward": totals.pop("right") / max(1.0, totals["rollouts"]),
            "lr": lr,
            "grad_norm": grad_norm,
            "skipped": skipped,
            **({"engine_version": engine.version + self._handed_over} if engine else {}),
            **losses,
            **totals,
            **{f"seconds/{k}": round(v, 4) for k, v in seconds.items()},
        }
        self.folder.log(line)
        self._write_rollouts(student, rollouts)
        self.progress.step(line)

    # --- what a step is made of -----------------------------------------------------------------

    def _rollouts(
        self,
        student: Student,
        engine: Engine | None,
        guide: Engine | None,
        problems: Sequence[Problem],
        seconds: dict[str, float],
    ) -> list[list[Trajectory]]:
        """Judged rollouts, or the given solutions where nobody samples."""
        if engine is None:
            return given_solutions(student, problems)
        r = self.config.rollout
        sampling = Sampling(r.temperature, r.top_p, r.max_response_tokens)
        seed_parts = (self.config.seed, self.state.step, "rollout")
        n = r.samples_per_question
        if guide is None:
            with timed(seconds, "generate"):
                groups = sample_groups(engine, student, problems, n, sampling, seed_parts)
            with timed(seconds, "verify"):
                judge(groups, self.pool)
            return groups
        with timed(seconds, "generate"):
            if guide is not engine:
                guide.wake()
            groups = sample_dialogues(
                engine, guide, student, problems, n, sampling, self.config, self.pool, seed_parts,
                seconds=seconds,
            )  # fmt: skip
            if guide is not engine:
                guide.sleep(level=1)
        seconds["generate"] -= seconds["feedback"] + seconds["verify"]
        return groups

    def _step_context(
        self,
        student: Student,
        tutors: Sequence[Tutor],
        seconds: dict[str, float],
        cut: dict[str, float],
    ) -> StepContext:
        limit = self.config.rollout.max_reprompt_tokens

        def reprompt(problem: Problem, demonstration: str, feedback: str) -> list[int] | None:
            if not demonstration and not feedback:
                return None
            shown = (student.chat.known(demonstration), student.chat.known(feedback))
            ids, removed = fit_reprompt(student.chat, student.prompts, problem, *shown, limit)
            for name, tokens in removed.items():
                cut[f"{name}_tokens"] += tokens
                cut[name] += tokens > 0
            # Cut to nothing, the reprompt is the question alone: no context.
            return None if ids == prompt_ids(student, problem) else ids

        def clocked(write: Callable[..., list[str]]) -> Callable[..., list[str]]:
            def call(requests: Sequence[tuple[Any, str, int]]) -> list[str]:
                with timed(seconds, "feedback"):
                    return write(requests)

            return call

        return StepContext(
            tutors=[Tutor(t.name, t.cognizant, t.best_domains, clocked(t.write)) for t in tutors],
            reprompt=reprompt,
            seed=lambda *key: request_seed(self.config.seed, self.state.step, *key),
        )

    def _update(
        self, policy: Policy, rollouts: Sequence[Trajectory], lr: float
    ) -> tuple[dict[str, float], float, bool]:
        """Loss and gradients over all micro-batches of all ranks, then one optimizer step."""
        sums, has_signal = accumulate_gradients(
            policy, self.algorithm, rollouts, self.config, self.world
        )
        metrics = loss_metrics(sums)
        if self.algorithm.on_policy and has_signal:
            check_canary(metrics, policy, self.state.step)
        if not has_signal:
            policy.end_of_step()
            return metrics, 0.0, True
        grad_norm, skipped = policy.step(lr)
        return metrics, grad_norm, skipped

    def _after_step(self, phase: Phase, student: Student, policy: Policy) -> None:
        self.state.step += 1
        self.state.step_in_phase += 1
        stop = any(self.world.gather(self._stop.requested))
        if self.state.step_in_phase >= phase.steps:
            export = f"models/{student.name}/round_{phase.round}"
            policy.export(self.folder.path / export, student.tokenizer)
            self.state.exports[student.name].append(INSIDE + export)
            self.state.phase += 1
            self.state.step_in_phase = 0
            self._checkpoint(student, policy)
        elif stop or self.state.step_in_phase % self.config.checkpoint.every_steps == 0:
            self._checkpoint(student, policy)
        if stop:
            self._raise_stopped()

    def _raise_stopped(self) -> None:
        raise Stopped(
            f"stopped after step {self.state.step}; --resume auto --out {self.config.out} goes on"
        )

    # --- engines, schedule, evaluation ----------------------------------------------------------

    def _open_gate(self, round_number: int) -> None:
        entry = open_gate(self.algorithm, self._evaluate_all("validation"))
        entry = {"kind": "gate", "step": self.state.step, "round": round_number, **entry}
        self.state.gate.append(entry)
        self.folder.log(entry)
        self.progress.gate(entry)

    def _tutors(self, phase: Phase) -> tuple[list[Tutor], list[Engine]]:
        """The frozen peers of this phase's student, each with an engine of its own."""
        if not self.algorithm.feedback:
            return [], []
        snapshot = self.algorithm.config.tutor_snapshot
        gate = self.state.gate[-1]
        peers = [s for n, s in enumerate(self.students) if n != phase.student]
        peers = [p for p in peers if self.algorithm.may_speak(gate["cognizant"][p.name])]
        engines = []
        for peer in peers:
            exports = self.state.exports[peer.name]
            path = exports[phase.round - 1] if snapshot == "round_start" else exports[-1]
            engines.append(peer.start_engine(self._resolve(path), self.config, self.world, "tutor"))
        return start_tutors(self.algorithm, self.config, peers, engines, gate), engines

    def _student_engine(self, student: Student, policy: Policy) -> Engine | None:
        if not self.algorithm.on_policy:
            return None
        engine = student.start_engine(student.config.model, self.config, self.world, "student")
        engine.load_weights(policy.full_tensors())
        # A new engine counts its hand-overs from here; those of the phase before a restart add up.
        self._handed_over = self.state.step_in_phase - engine.version
        return engine

    def _guide_engine(self, student: Student, engine: Engine | None) -> Engine | None:
        """Who knows the solution and replies in dialogues; None: there are none."""
        if self.algorithm.guide != "frozen":
            return engine if self.algorithm.guide == "self" else None
        guide = student.start_engine(student.config.model, self.config, self.world, "tutor")
        guide.sleep(level=1)
        return guide

    def _student_schedule(self, phase: Phase) -> tuple[Sampler, int, int]:
        """The student's sampler, its steps over the whole run, and those of its earlier phases."""
        own = [(n, p.steps) for n, p in enumerate(self.schedule) if p.student == phase.student]
        total = sum(steps for _, steps in own)
        before = sum(steps for n, steps in own if n < self.state.phase)
        return self.samplers[self.students[phase.student].name], total, before

    def _evaluate_all(self, which: str) -> dict[str, Any]:
        """Scores of every student's newest weights: {student: {domain: {problem key: share}}}."""
        e = self.config.evaluation
        problems = self.problems.test if which == "test" else self.problems.validation
        samples = e.samples if which == "test" else e.validation_samples
        scores = {}
        for student in self.students:
            path = self._resolve(self.state.exports[student.name][-1])
            engine = student.start_engine(path, self.config, self.world)
            scores[student.name] = evaluate(
                engine, student, problems, samples, self.config, self.world, self.pool, which
            )
            release(engine)
            if any(self.world.gather(self._stop.requested)):
                self._raise_stopped()  # an evaluation is repeated on resuming, a step is not
            means = {d: asdict(accuracy(s)) for d, s in scores[student.name].items()}
            line = {"kind": "evaluation", "step": self.state.step, "set": which}
            self.folder.log({**line, "student": student.name, "accuracy": means})
            self.progress.evaluation(student.name, which, means)
        return scores

    def _evaluate_dialogues(self) -> dict[str, Any]:
        """Records of every student's newest weights in each setting: {student: {setting: …}}."""
        records: dict[str, Any] = {}
        for student in self.students if self.config.dialogue.evaluate else ():
            path = self._resolve(self.state.exports[student.name][-1])
            engine = student.start_engine(path, self.config, self.world)
            guide = student.start_engine(student.config.model, self.config, self.world, "tutor")
            records[student.name] = evaluate_dialogues(
                engine, guide, student, self.problems.test, self.config, self.world, self.pool
            )
            release(engine)
            release(guide)
            line = {"kind": "dialogues", "step": self.state.step, "student": student.name}
            self.folder.log({**line, **records[student.name]})
            self.progress.dialogues(student.name, records[student.name])
            if any(self.world.gather(self._stop.requested)):
                self._raise_stopped()
        return records

    def _resolve(self, path: str) -> str:
        """Exports are stored relative to the run folder; initial models are named by the user."""
        if path.startswith(INSIDE):
            return str(self.folder.path / path.removeprefix(INSIDE))
        return path

    # --- checkpoints ----------------------------------------------------------------------------

    def _policy(self, student: Student, *, fresh: bool) -> Policy:
        policy = Policy(
            student.config,
            self.config.policy,
            self.config.optimizer,
            self.world,
            teacher=self.algorithm.teacher,
            teacher_rate=self.algorithm.teacher_rate,
            seed=self.config.seed,
            vocab_size=len(student.tokenizer),
        )
        saved = self.state.policies.get(student.name)
        if saved:
            policy.load(self.folder.path / saved)
        if fresh:
            policy.restart_teacher()
        return policy

    def _checkpoint(self, student: Student, policy: Policy) -> None:
        step = self.state.step
        temporary = self.folder.checkpoint_dir(step)
        self.world.barrier()
        policy.save(temporary / student.name)
        self.world.barrier()
        self.state.policies[student.name] = f"checkpoints/step_{step:06d}/{student.name}"
        self._count_time()
        self.folder.commit_checkpoint(step, asdict(self.state))
        self.folder.prune(
            self.config.checkpoint.keep, {Path(p).parts[1] for p in self.state.policies.values()}
        )
        self.world.barrier()

    def _count_time(self) -> None:
        now = time.monotonic()
        self.state.wall_time_s += now - self._started
        self._started = now

    def resume(self) -> bool:
        """Go back to the newest complete checkpoint; False if there is none. Collective."""
        found = self.folder.latest_checkpoint() if self.world.main else None
        state = self.world.gather(found[1] if found else None)[0]
        if state is None:
            self.folder.rewind(0)
            return False
        self.state = RunState(**state)
        self.folder.rewind(self.state.step)
        self.progress.resume(self.state.step)
        return True

    def _write_rollouts(self, student: Student, rollouts: Sequence[Trajectory]) -> None:
        step = self.state.step
        parts = self.world.gather([record(r, student, step) for r in rollouts])
        self.folder.rollouts(step, [line for part in parts for line in part])
