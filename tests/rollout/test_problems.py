"""Readers: files as published, mapped fields, and every kind of broken row."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from cotutor.rollout import sandbox
from cotutor.rollout.leak import leaks
from cotutor.rollout.problems import DataError, overlap, read_problems, split_options
from cotutor.rollout.trajectory import Problem
from cotutor.rollout.verifiers import verify

ROW = {"question": "How many?", "answer": "42"}
SCIKNOWEVAL = {
    "idx": 1,
    "kind": "mcq",
    "dataset": "sciknoweval",
    "answer": "B",
    "elo": 1500,
    "prompt": "Which field?\nC. Fermi asked.\n\nA: 50 pC\nB: 56 pC\nPlease reason step by step.",
    "description": "Which field? The solution will be evaluated in a mcq environment.",
    "tests": "-",
    "embedding": [],
    "system": "\nAnswer in tags.\n",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to_file(content: str | bytes | list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to_file


def read(path: Path, **options: Any) -> tuple[list[Problem], int]:
    return read_problems(path, **{"domain": "d", "kind": "numeric", **options})


def test_sciknoweval_rows_are_read_as_published(write: Callable[..., Path]) -> None:
    path = write([SCIKNOWEVAL], "train.json")
    (problem,), skipped = read(path, kind="mcq")
    assert problem.question == SCIKNOWEVAL["prompt"]
    assert problem.system == SCIKNOWEVAL["system"]
    assert problem.gold == "B"
    assert problem.options == {"options": {"A": "50 pC", "B": "56 pC"}}
    assert problem.source == f"{path}:1"
    assert skipped == 0
    assert verify(problem.kind, problem.gold, "<answer>\nB\n</answer>", **problem.options).correct


def test_fields_are_mapped(write: Callable[..., Path]) -> None:
    path = write([{"problem": "1 + 1?", "answer": 2, "solution": "Add.", "note": None}])
    (problem,), _ = read(path, fields={"question": "problem"})
    assert (problem.question, problem.gold, problem.solution) == ("1 + 1?", "2", "Add.")


def test_gsm8k_answers_are_taken_apart(write: Callable[..., Path]) -> None:
    path = write([{"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42.\n#### 42"}])
    (problem,), _ = read(path)
    assert (problem.gold, problem.solution) == ("42", "6 * 7 = <<6*7=42>>42.")


def test_tests_are_the_gold_of_code(write: Callable[..., Path]) -> None:
    rows = [
        {"prompt": "Write f.", "test_list": ["assert f(1) == 1", "assert f(2) == 4"], "code": "x"},
        {"prompt": "Write f.", "test_list": ["assert f(3) == 9"], "code": "x"},
    ]
    fields = {"question": "prompt", "answer": "test_list", "solution": "code"}
    problems, skipped = read(write(rows), kind="code", fields=fields)
    assert problems[0].gold == "assert f(1) == 1\nassert f(2) == 4"
    assert len({p.key for p in problems}) == 2
    assert skipped == 0


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["red", "blue", "green"], "B"),
        (["red", "blue", "green"], "blue"),
        ({"A": "red", "B": "blue", "C": "green"}, "B"),
    ],
)
def test_options_of_generic_rows(options: Any, answer: str, write: Callable[..., Path]) -> None:
    path = write([{"question": "Which?", "options": options, "answer": answer}])
    (problem,), _ = read(path, kind="mcq")
    assert problem.question == "Which?\n\nA: red\nB: blue\nC: green"
    assert problem.gold == "B"
    assert problem.options["options"]["C"] == "green"


@pytest.mark.parametrize(
    ("text", "stem", "options"),
    [
        ("Q?\nA: x\nB: y", "Q?", {"A": "x", "B": "y"}),
        ("Q?\n\nA. x\nB. y\nC. z", "Q?", {"A": "x", "B": "y", "C": "z"}),
        ("Q?\n(no)\nA) x\n  B) y", "Q?\n(no)", {"A": "x", "B": "y"}),
        ("A: speaks\nB: too\nQ?\nA: x\nB: y", "A: speaks\nB: too\nQ?", {"A": "x", "B": "y"}),
        ("Q?\nA: x\nmore x\nB: y\nafter", "Q?", {"A": "x\nmore x", "B": "y"}),
        ("Q?\nA:\nB: y", "Q?", {"A": "", "B": "y"}),
        ("Q?\nA: x", "Q?\nA: x", {}),
        ("A cat. Q?\nB: y", "A cat. Q?\nB: y", {}),
        ("", "", {}),
    ],
)
def test_options_are_split_off(text: str, stem: str, options: dict[str, str]) -> None:
    assert split_options(text) == (stem, options)


def test_blank_lines_line_ends_and_byte_order_mark(write: Callable[..., Path]) -> None:
    first, second = json.dumps(ROW), json.dumps({**ROW, "question": "Größe?"}, ensure_ascii=False)
    path = write(f"\ufeff\r\n{first}\r\n\r\n  \n{second}\r\n\n")
    problems, skipped = read(path)
    assert [p.question for p in problems] == ["How many?", "Größe?"]
    assert [p.source.rpartition(":")[2] for p in problems] == ["2", "5"]
    assert skipped == 0


def test_all_formats_agree(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{**ROW, "question": f"How many of {n}?"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [
        write(rows),
        write(rows, "rows.json"),
        write(json.dumps(rows), "flat.json"),
        write("\ufeff" + json.dumps(rows, indent=2), "pretty.json"),
        tmp_path / "rows.parquet",
    ]
    wanted = [(p.key, p.question, p.gold) for p in read(files[0])[0]]
    assert len(wanted) == 3
    for path in files[1:]:
        assert [(p.key, p.question, p.gold) for p in read(path)[0]] == wanted
    assert [p.source.rpartition(":")[2] for p in read(files[3])[0]] == [
        "2 (item 1)",
        "6 (item 2)",
        "10 (item 3)",
    ]


BROKEN = [  # (line, what the message says)
    (b'{"question": "x", "answer": ', "not valid JSON"),
    (b"question,answer", "not valid JSON"),
    (b'["x", "42"]', "expected an object with named fields, got a list"),
    (b'"x"', "got a text"),
    (b"null", "got null"),
    (b'{"question": "x"}', "the field 'answer' is missing"),
    (b'{"answer": "42"}', "the field 'question' is missing"),
    (b'{"question": 3, "answer": "42"}', "'question' should be a text, but is a number"),
    (b'{"question": "x", "answer": null}', "'answer' should be a text, but is null"),
    (b'{"question": "x", "answer": true}', "'answer' should be a text, but is a truth value"),
    (b'{"question": " ", "answer": "42"}', "question is empty"),
    (b'{"question": "x", "answer": ""}', "answer is empty"),
    (b'{"question": "x\\u0000y", "answer": "42"}', "NUL"),
    (b'{"question": "x\0y", "answer": "42"}', "not valid JSON"),
    (b'{"question": "x\\ud800y", "answer": "42"}', "surrogate"),
    (b'{"question": "x", "answer": "\\udc00"}', "surrogate"),
    (b'{"question": "\xff\xfe", "answer": "42"}', "not UTF-8"),
    (b'{"question": "\xed\xa0\x80", "answer": "42"}', "not UTF-8"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"question": "x", "answer": ' + b"9" * 5000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_bad_rows_are_named_or_skipped_and_counted(
    line: bytes, message: str, write: Callable[..., Path]
) -> None:
    good = json.dumps(ROW).encode()
    path = write(b"\n".join([b"", good, line, good.replace(b"many", b"few"), b""]))
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "--data.skip-bad-rows" in str(caught.value)
    assert "\n" not in str(caught.value)
    problems, skipped = read(path, skip_bad_rows=True)
    assert (len(problems), skipped) == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "C"}, "'C' is none of the options AB"),
        ({"prompt": "Which?\nPlease reason step by step."}, "no options"),
        ({"kind": "code"}, "its kind is 'code'"),
        ({"answer": 1}, "should be a text"),
    ],
)
def test_bad_multiple_choice_rows(
    change: dict[str, Any], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=message):
        read(write([{**SCIKNOWEVAL, **change}]), kind="mcq")


@pytest.mark.parametrize("options", [["red", 3], {"A": "red", "blue": "x"}, "red", 5])
def test_bad_options(options: Any, write: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="options should be a list of texts"):
        read(write([{"question": "Q", "options": options, "answer": "A"}]), kind="mcq")


def test_repetitions_are_left_out_and_contradictions_named(write: Callable[..., Path]) -> None:
    other = {**ROW, "question": "How few?"}
    problems, skipped = read(write([ROW, other, ROW]))
    assert ([p.question for p in problems], skipped) == (["How many?", "How few?"], 1)
    path = write([ROW, other, {**ROW, "answer": "43"}])
    with pytest.raises(DataError, match=r":3: it repeats the question of .*:1 with another answer"):
        read(path)
    problems, skipped = read(path, skip_bad_rows=True)
    assert ([p.gold for p in problems], skipped) == (["42", "42"], 1)


def test_keys_depend_on_content_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    (first,), _ = read(write([ROW]))
    (again,), _ = read(write([{"id": 7, **ROW}], "other.jsonl"))
    (elsewhere,), _ = read(write([ROW]), domain="other")
    assert first.key == again.key != elsewhere.key


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b'[{"question": "x", "answer": "1"}, {"question": ', "a.json", r"a\.json:1: not valid"),
        (b'[\n{"question": "x", "answer": "1"}\n{}]', "a.json", r"a\.json:2: a comma or \]"),
        (b'[\n{"question": "x", "answer": "1"}]\n{}', "a.json", r"a\.json:2: something follows"),
        (b'[{"question": "\xff"}]', "a.json", r"a\.json:1: not UTF-8"),
        (b"[]", "a.json", "holds no problem"),
        (b"", "a.jsonl", "holds no problem"),
        (b"a,b", "a.csv", "can't tell the format"),
        (b"PAR1 not really", "a.parquet", "not a Parquet file"),
    ],
)
def test_unusable_files(
    content: bytes, name: str, message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(content, name))


def test_missing_files_and_unknown_fields(tmp_path: Path, write: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="'prompt' is none of question, answer"):
        read(write([ROW]), fields={"prompt": "question"})
    with pytest.raises(DataError, match="the field 'proof' is missing"):
        read(write([ROW]), fields={"solution": "proof"})


CODE = {
    "prompt": "Write a function that adds one.",
    "code": "def g(x):\n    return math.floor(x) + 1",
    "test_imports": ["import math"],
    "test_list": ["assert g(1) == 2", "assert g(math.e) == 3"],
}
CODE_FIELDS = {
    "question": "prompt",
    "answer": "test_list",
    "solution": "code",
    "imports": "test_imports",
}


def test_programs_with_some_tests_shown(write: Callable[..., Path]) -> None:
    path = write([CODE])
    (hidden,), _ = read(path, kind="code", fields=CODE_FIELDS)
    (shown,), _ = read(path, kind="code", fields=CODE_FIELDS, shown_tests=1)
    assert hidden.question == CODE["prompt"]
    assert shown.question.startswith(f"{CODE['prompt']}\n\n")
    assert "```python\nassert g(1) == 2\n```" in shown.question
    assert "math.e" not in shown.question
    assert shown.gold == "import math\nassert g(1) == 2\nassert g(math.e) == 3" == hidden.gold
    assert shown.solution == CODE["code"]
    assert shown.key != hidden.key
    (bare,), _ = read(write([{**CODE, "test_imports": []}]), kind="code", fields=CODE_FIELDS)
    assert bare.gold == "assert g(1) == 2\nassert g(math.e) == 3"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (CODE, {"shown_tests": 2}, "2 of its tests would be shown, and none would stay hidden"),
        ({**CODE, "test_list": "assert g(1) == 2"}, {"shown_tests": 1}, "none would stay hidden"),
        ({**CODE, "test_imports": 3}, {}, "'test_imports' should be a text, but is a number"),
        ({**CODE, "test_list": [3]}, {}, "'test_list' should be a text, but is a list"),
    ],
)
def test_programs_whose_tests_do_not_fit(
    row: dict[str, Any], options: dict[str, Any], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        read(write([row]), kind="code", fields=CODE_FIELDS, **options)


def test_only_programs_have_tests_and_imports(write: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="only problems of kind 'code' have tests"):
        read(write([ROW]), shown_tests=1)
    with pytest.raises(DataError, match="only problems of kind 'code' have tests and imports"):
        read(write([ROW]), fields={"imports": "test_imports"})


def data(name: str) -> Path:
    root = os.environ.get("COTUTOR_DATA")
    if not root:
        pytest.skip("COTUTOR_DATA is not set: the published files are not at hand")
    path = Path(root) / name
    if not path.is_file():
        pytest.skip(f"COTUTOR_DATA has no {name}")
    return path


@pytest.mark.parametrize(
    ("domain", "train", "test", "shared"),
    [
        ("physics", 720, 80, 7),
        ("chemistry", 1890, 210, 0),
        ("material", 841, 94, 3),
        ("biology", 450, 50, 19),
    ],
)
def test_published_sciknoweval(domain: str, train: int, test: int, shared: int) -> None:
    sets = []
    for split, count in (("train", train), ("test", test)):
        path = data(f"sciknoweval/{domain}/{split}.json")
        problems, skipped = read_problems(path, domain=domain)
        assert (len(problems), skipped) == (count, 0)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, problem in zip(rows, problems, strict=True):
            assert problem.question == row["prompt"]
            stem, _ = split_options(problem.question)
            constant = " The solution will be evaluated in a mcq environment."
            assert stem == row["description"].removesuffix(constant).strip()
            assert list(problem.options["options"]) in (list("ABCD"), list("AB"))
            told = f"<answer>\n{row['answer']}\n</answer>"
            assert verify("mcq", problem.gold, told, **problem.options).correct
        sets.append(problems)
    assert len(overlap(*sets)) == shared


@pytest.mark.parametrize(
    ("name", "kind", "fields", "count"),
    [
        ("gsm8k/test.jsonl", "numeric", {}, 1319),
        ("math500/first_half.jsonl", "math", {"question": "problem"}, 250),
        (
            "mbpp/sanitized-mbpp.json",
            "code",
            CODE_FIELDS,
            427,
        ),
    ],
)
def test_other_published_files(name: str, kind: str, fields: dict[str, str], count: int) -> None:
    problems, skipped = read_problems(data(name), domain="d", kind=kind, fields=fields)
    assert (len(problems), skipped) == (count, 0)
    assert all(p.gold and p.solution for p in problems)


def test_published_gsm8k_has_worked_solutions() -> None:
    problems, _ = read_problems(data("gsm8k/test.jsonl"), domain="gsm8k", kind="math")
    assert len(problems) == 1319
    first = problems[0]
    assert (first.gold, first.solution.split("\n")[-1][:19]) == ("18", "She makes 9 * 2 = $")
    for problem in problems[:200]:
        assert "####" not in problem.solution
        assert verify("math", problem.gold, f"So it is {problem.gold}.").correct
        assert not leaks(problem.solution.split("\n")[0], problem, problem.question) or (
            problem.gold in problem.solution.split("\n")[0]
        )
        assert leaks(f"The answer is {problem.gold}.", problem, problem.question)


def test_published_mbpp_shows_a_test_and_hides_the_others() -> None:
    path = data("mbpp/sanitized-mbpp.json")
    problems, _ = read_problems(path, domain="mbpp", kind="code", fields=CODE_FIELDS, shown_tests=1)
    rows = json.loads(path.read_text())
    for row, problem in zip(rows, problems, strict=True):
        assert row["test_list"][0] in problem.question
        assert not any(test in problem.question for test in row["test_list"][1:])
        assert problem.gold.split("\n") == [
            line for part in [*row["test_imports"], *row["test_list"]] for line in part.split("\n")
        ]
        assert leaks(problem.solution, problem, problem.question)
    try:
        sandbox.level(allow_restricted=True)
    except sandbox.SandboxUnavailable as error:
        pytest.skip(str(error))
    with_imports = [p for p, row in zip(problems, rows, strict=True) if row["test_imports"]]
    for problem in (*problems[:8], *with_imports[:4]):
        verdict = verify("code", problem.gold, problem.solution, allow_restricted=True)
        assert verdict.correct, (problem.source, verdict.detail)
