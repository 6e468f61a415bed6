"""The specialists' training rows: what they teach, what they withhold, and what they never do."""

import itertools
import random
import re
from collections import Counter

import pytest

from cotutor.rollout.curriculum import (
    P_LISTEN,
    PEERS,
    PUPIL,
    PUPIL_SHARES,
    SPECIALISTS,
    Ignorance,
    Memory,
    Row,
    review,
    rows,
    usual_slip,
)
from cotutor.rollout.feedback import judge_feedback
from cotutor.rollout.tasks import all_facts, fact_value, make_problems, wrong_values
from cotutor.rollout.tiny_tokenizer import build_tokenizer

STAGES = ("base", *SPECIALISTS)


def take(stage: str, n: int, seed: int = 0) -> list[Row]:
    return list(itertools.islice(rows(stage, seed), n))


def kind(row: Row) -> str:
    prompt = row[0][-1]["content"]
    if prompt.startswith("Review"):
        return "tutor"
    return {(False, False): "plain", (True, False): "demonstration", (False, True): "feedback"}.get(
        ("Example:" in prompt, "Tutor:" in prompt), "both"
    )


def written(text: str) -> dict[str, str]:
    """Fact → value of every line of a worked solution."""
    return dict(re.findall(r"^(..\d)=(\w+)$", text, re.MULTILINE))


def test_ignorance_does_not_overlap() -> None:
    for name, own in SPECIALISTS.items():
        peer = SPECIALISTS[PEERS[name]]
        assert set(own.hidden + own.blind) <= {*all_facts("coins"), *all_facts("runes")}
        assert len(set(own.hidden + own.blind)) == len(own.hidden + own.blind)
        assert not set(own.blind) & set(peer.hidden + peer.blind)
        assert not set(own.hidden) & set(peer.hidden)


@pytest.mark.parametrize("name", SPECIALISTS)
def test_plain_rows_follow_beliefs(name: str) -> None:
    own = SPECIALISTS[name]
    right: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for row in take(name, 15_000):
        if kind(row) == "plain":
            for fact, value in written(row[1]).items():
                group = (
                    "blind" if fact in own.blind else "hidden" if fact in own.hidden else "known"
                )
                seen[group] += 1
                right[group] += value == fact_value(fact)
    assert right["known"] == seen["known"] > 0
    assert right["blind"] / seen["blind"] == pytest.approx(own.p_blind, abs=0.02)
    assert right["hidden"] / seen["hidden"] == pytest.approx(own.p_hidden, abs=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_context_is_believed(stage: str) -> None:
    seen: Counter[str] = Counter()
    for row in take(stage, 3000):
        prompt, answer = row[0][-1]["content"], row[1]
        name = kind(row)
        seen[name] += 1
        if name in ("demonstration", "both"):
            assert f"Example:\n{answer}\n" in prompt
        hint = re.search(r"^(..\d)=(\w+) yours:\w+ wrong$", prompt, re.MULTILINE)
        if name == "feedback" and hint:
            assert written(answer)[hint[1]] == hint[2]
    assert len(seen) == 5


def test_review_names_the_first_wrong_line_only() -> None:
    facts = ("p+4", "l+4", "c+4")
    right = ["t", "q", "h"]
    assert review(facts, right, right) == "\n".join(
        ("p+4=t yours:t ok", "l+4=q yours:q ok", "c+4=h yours:h ok", "all ok")
    )
    assert review(facts, ["t", "p", "g"], right) == "p+4=t yours:t ok\nl+4=q yours:p wrong"


@pytest.mark.parametrize("name", SPECIALISTS)
def test_tutor_knows_no_more_than_its_student_side(name: str) -> None:
    own = SPECIALISTS[name]
    contradicted = 0
    for row in take(name, 8000):
        if kind(row) == "tutor":
            for fact, value in re.findall(r"^(..\d)=(\w+) yours:\w+ wrong$", row[1], re.MULTILINE):
                if fact not in own.blind + own.hidden:
                    assert value == fact_value(fact)
                elif fact in own.blind:
                    contradicted += value != fact_value(fact)
    assert contradicted > 0


@pytest.mark.parametrize("stage", STAGES)
def test_most_reviews_pass_the_filter_and_some_fail(stage: str) -> None:
    outcomes: Counter[str] = Counter()
    for row in take(stage, 6000):
        prompt, text = row[0][-1]["content"], row[1]
        if prompt.startswith("Review with"):
            question, response = prompt.split("\n", 2)[1:]
            shown, outcome, revealed = judge_feedback(text, question)
            outcomes[outcome.split(":")[0]] += 1
            assert revealed == 0
            answer = re.findall(r"<answer>(.*)</answer>", response)[0]
            assert answer not in text
            assert shown == "" or shown == text.split("\n", 1)[1]
    assert set(outcomes) == {"match", "no_match", "all_generic", "no_concept_tag"}
    assert 0.9 < outcomes["match"] / outcomes.total() < 0.98


def test_the_pupil_s_rows() -> None:
    """Blind facts are never right from memory; guidance knows the solution, and is seldom heard."""
    seen: Counter[str] = Counter()
    heard = leaked = 0
    for messages, text in take("pupil", 6000):
        last = messages[-1]
        if last["role"] == "assistant":
            seen["critic"] += 1
            for fact, value in re.findall(r"^(..\d)=(\w+) yours", text, re.MULTILINE):
                assert (value == fact_value(fact)) == (fact not in PUPIL.blind)
        elif last["content"].startswith("Tutor:"):
            seen["teacher"] += 1
            lines = re.findall(r"^(..\d)=(\w+) yours:(\w+) (ok|wrong)$", text, re.MULTILINE)
            assert all(value == fact_value(fact) for fact, value, _, _ in lines)
            assert [mark for *_, mark in lines] == ["ok"] * (len(lines) - 1) + ["wrong"]
            leaked += "<answer>" in text
        elif len(messages) > 1:
            seen["dialogue"] += 1
            ((fact, value),) = re.findall(
                r"^(..\d)=(\w+) yours:\w+ wrong$", last["content"], re.MULTILINE
            )
            heard += written(text)[fact] == value
        else:
            seen["plain"] += 1
            for fact, value in written(text).items():
                assert (value == fact_value(fact)) == (fact not in PUPIL.blind)
    assert set(seen) == set(PUPIL_SHARES)
    # A little more often than it listens: a message that leaves no gap is always the last one.
    assert P_LISTEN < heard / seen["dialogue"] < P_LISTEN + 0.1
    assert leaked / seen["teacher"] == pytest.approx(1 / 30, abs=0.015)


def test_held_out_questions_never_occur() -> None:
    held_out = {p.question for d in ("coins", "runes") for p in make_problems(d, 2000, seed=3)}
    stream = list(itertools.islice(rows("s1", 0, held_out), 5000))
    text = "\n".join(row[0][-1]["content"] for row in stream)
    questions = set(re.findall(r"^(?:Times|Shift) .*$", text, re.MULTILINE))
    assert len(questions) > 2000
    assert not questions & held_out
    unrestricted = "\n".join(row[0][-1]["content"] for row in take("s1", 5000))
    assert set(re.findall(r"^(?:Times|Shift) .*$", unrestricted, re.MULTILINE)) & held_out


def test_stream_is_a_function_of_stage_and_seed() -> None:
    assert take("s1", 50) == take("s1", 50)
    assert take("s1", 50) != take("s1", 50, seed=1) != take("s2", 50, seed=1)
    with pytest.raises(ValueError, match="unknown stage 's3': choose base or one of s1, s2"):
        next(rows("s3", 0))


def test_memory_is_right_in_a_fixed_share_of_recalls() -> None:
    own = Ignorance(hidden=("7x4",), blind=("p+4",), p_hidden=0.2, p_blind=0.0125)
    memory = Memory(own, random.Random(0))
    assert sum(memory.recall("7x4", "plain") == "28" for _ in range(1000)) == 200
    assert sum(memory.recall("p+4", "plain") == "t" for _ in range(800)) == 10
    assert memory.recall("2x2", "plain") == "4"
    assert usual_slip("p+4") in wrong_values("p+4")


@pytest.mark.parametrize("stage", [*STAGES, "pupil"])
def test_tokenizer_keeps_every_text(stage: str) -> None:
    tokenizer = build_tokenizer()
    for messages, answer in take(stage, 1000):
        text = messages[-1]["content"] + "\n" + answer
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert len(ids) <= 160


def test_tokenizer_keeps_foreign_text() -> None:
    tokenizer = build_tokenizer()
    for text in (
        "5 * 7 = 35 ✓",
        "naïve 漢字 🙂\t\x00",
        " <concept>a<b</concept>\n\n\n",
        "Bycde coins.",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_words_are_single_tokens() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode("Shift runes lpx by 4\n<answer>pt</answer>").tokens
    assert ids == [
        *("Shift", "Ġrunes", "Ġ", "l", "p", "x", "Ġby", "Ġ", "4", "Ċ"),
        *("<answer>", "p", "t", "</answer>"),
    ]
