"""From problems to judged rollouts: prompts, sampling, verification, feedback requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cotutor.rollout.dialogue import answer
from cotutor.rollout.engine import Engine, Sampling, request_seed
from cotutor.rollout.prompts import student_messages, tutor_messages
from cotutor.rollout.trajectory import Problem, Trajectory
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.config import Config, ConfigError, RolloutConfig
from cotutor.trainer.problem_sets import ProblemSets, Sampler, curriculum_problems
from cotutor.trainer.students import Student


def prompt_ids(student: Student, problem: Problem) -> list[int]:
    """The prompt of a problem as this student reads it, ready for its answer.

    Given messages that end with the assistant's are ready for the user's next one.
    """
    chat = student.chat
    if not problem.messages:
        return chat.prompt(student_messages(student.prompts, problem))
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    if messages[-1]["role"] != "assistant":
        return chat.prompt(messages)
    response = chat.response(messages[-1]["content"])
    return [*chat.prompt(messages[:-1]), *response, *chat.open_turn(response)]


def share(problems: Sequence[Problem], rank: int, ranks: int) -> list[Problem]:
    """The problems of rank `rank` of `ranks`: each goes to one rank, counts differ by at most one.

    Dealt out by expected length, the longest first, in rounds of one for each rank, where the rank
    with the least so far takes the longest: so no rank waits long for another's engine. Expected is
    the text shown and, where it is given, the worked solution, in characters: tokens would make
    each rank read the others' problems.
    """
    order = sorted(range(len(problems)), key=lambda i: -_expected_length(problems[i]))
    loads = [0] * ranks
    mine = []
    for start in range(0, len(order), ranks):
        lightest_first = sorted(range(ranks), key=loads.__getitem__)
        for taker, i in zip(lightest_first, order[start : start + ranks], strict=False):
            loads[taker] += _expected_length(problems[i])
            if taker == rank:
                mine.append(i)
    return [problems[i] for i in sorted(mine)]


def _expected_length(problem: Problem) -> int:
    shown = sum(len(content) for _, content in problem.messages) or len(problem.question)
    return shown + len(problem.solution)


def training_sampler(
    config: Config, algorithm: Algorithm, student: Student, problems: ProblemSets
) -> tuple[Sampler, int]:
    """The student's training problems, and how many were left out because of their length.

    Raises ConfigError if no prompt of a domain fits.
    """
    if config.data.source == "curriculum":
        held_out = [*problems.test.values(), *problems.validation.values()]
        questions = frozenset(p.question for domain in held_out for p in domain)
        sets = {"curriculum": curriculum_problems(config, student.name, questions)}
    else:
        sets = dict(problems.train)
    if not algorithm.on_policy or "sft" in config.baselines:
        for problem in (p for members in sets.values() for p in members):
            if not problem.solution:
                raise ConfigError(
                    f"{problem.source}: no worked solution to train on; map the field that holds it"
                    " (data.domains.fields.solution)"
                )
    limit = config.rollout.max_prompt_tokens
    kept: dict[str, list[Problem]] = {}
    left_out = 0
    for domain, members in sets.items():
        kept[domain] = [p for p in members if len(prompt_ids(student, p)) <= limit]
        left_out += len(members) - len(kept[domain])
        if not kept[domain]:
            raise ConfigError(
                f"--rollout.max-prompt-tokens {limit}: no prompt of {domain} is that short for"
                f" {student.name}; raise the limit"
            )
    on_policy = algorithm.on_policy
    per_step = config.rollout.questions_per_step if on_policy else algorithm.config.batch_size
    return Sampler(kept, per_step, config.seed), left_out


def sample_groups(
    engine: Engine,
    student: Student,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed_parts: tuple[object, ...],
) -> list[list[Trajectory]]:
    """`samples` rollouts of each problem. Request seeds depend on (seed_parts, problem, sample)."""
    starts = [prompt_ids(student, problem) for problem in problems]
    groups = [
        [Trajectory.start(problem, n, start) for n in range(samples)]
        for problem, start in zip(problems, starts, strict=True)
    ]
    rollouts = [rollout for group in groups for rollout in group]
    seeds = [request_seed(*seed_parts, r.problem.key, r.sample) for r in rollouts]
    answer(engine, student.chat, rollouts, sampling, seeds)
    return groups


def judge(groups: Sequence[Sequence[Trajectory]], pool: VerifierPool) -> None:
    """Put reward, extracted answer and status on every rollout; a truncated one is worth 0."""
    rollouts = [rollout for group in groups for rollout in group]
    finished = [r for r in rollouts if r.finish_reason == "stop"]
    verdicts = pool.verify_many(
        [(r.problem.kind, r.problem.gold, r.text, r.problem.options) for r in finished]
    )
    for rollout in rollouts:
        rollout.reward, rollout.status = 0.0, "truncated"
    for rollout, verdict in zip(finished, verdicts, strict=True):
        rollout.reward = float(verdict.correct)
        rollout.extracted = verdict.extracted
        rollout.status = verdict.status


def given_solutions(student: Student, problems: Sequence[Problem]) -> list[list[Trajectory]]:
    """Trajectories whose response is the problem's worked solution; groups of one."""
    groups = []
    for problem in problems:
        trajectory = Trajectory.start(problem, 0, prompt_ids(student, problem))
        trajectory.append("student", student.chat.response(problem.solution))
        trajectory.text = problem.solution
        trajectory.reward = 1.0
        groups.append([trajectory])
    return groups


def ask_tutor(
    engine: Engine,
    tutor: Student,
    requests: Sequence[tuple[Problem, str, int]],
    config: RolloutConfig,
    *,
    anchored: bool,
) -> list[str]:
    """The tutor's raw words on (problem, response, seed) triples; "" where nothing can be asked.

    A request that doesn't fit into the reprompt budget isn't cut: it is answered with "" (counted
    as `fb_none` by the caller).
    """
    prompts = [
        tutor.chat.prompt(
            tutor_messages(tutor.prompts, problem, tutor.chat.known(response), anchored)
        )
        for problem, response, _ in requests
    ]
    fitting = [n for n, prompt in enumerate(prompts) if len(prompt) <= config.max_reprompt_tokens]
    completions = engine.generate(
        [prompts[n] for n in fitting],
        Sampling(config.temperature, config.top_p, config.max_feedback_tokens),
        [requests[n][2] for n in fitting],
    )
    texts = [""] * len(requests)
    for n, completion in zip(fitting, completions, strict=True):
        texts[n] = tutor.chat.decode(completion.ids)
    return texts


def record(trajectory: Trajectory, student: Student, step: int) -> dict[str, Any]:
    """A rollout as one line of rollouts/step_NNNNNN.jsonl."""
    decode = student.tokenizer.decode
    turn_ids = trajectory.turn_ids()
    feedback = trajectory.feedback
    return {
        "step": step,
        "student": student.name,
        "problem": trajectory.problem.key,
        "domain": trajectory.problem.domain,
        "sample": trajectory.sample,
        "gold": trajectory.problem.gold,
        "turns": [
            {
                "role": turn.role,
                "text": decode(trajectory.ids[turn.start : turn.stop]),
                "tokens": [turn.start, turn.stop],
                "trained": turn.stop > turn.start and turn_ids[turn.start] >= 0,
            }
            for turn in trajectory.turns
        ],
        "reward": trajectory.reward,
        "extracted": trajectory.extracted,
        "status": trajectory.status,
        "finish_reason": trajectory.finish_reason,
        "advantage": trajectory.advantage,
        "answers": [
            {"extracted": a.extracted, "score": a.score, "status": a.status}
            for a in trajectory.answers
        ],
        "guidance": [dataclasses.asdict(g) for g in trajectory.guidance],
        "feedback": None
        if feedback is None
        else {
            "tutor": feedback.tutor,
            "outcome": feedback.outcome,
            "revealed": feedback.revealed,
            "raw": feedback.raw,
            "text": feedback.text,
        },
        "teacher_prompt": None
        if trajectory.teacher_prompt_ids is None
        else decode(trajectory.teacher_prompt_ids),
    }
