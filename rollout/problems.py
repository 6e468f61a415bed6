"""Readers: from the files that people publish to problems."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from cotutor.rollout.prompts import SHOWN_TESTS, fill
from cotutor.rollout.trajectory import Problem

FIELDS = {name: name for name in ("question", "answer", "options", "solution", "system", "imports")}
_OPTIONAL = ("options", "solution", "system", "imports")

_SCIKNOWEVAL_FIELDS = {"idx", "prompt", "answer", "system", "kind", "dataset"}
_SCIKNOWEVAL_CLOSING = "\nPlease reason step by step."
_OPTION = re.compile(r"([A-Z])([:.)])(?:[ \t]+|$)")
_GSM8K_MARK = "\n#### "

Row = tuple[str, Any]  # 1-based line, its item in an array, or Parquet row; and what stands there


class DataError(ValueError):
    """A user's mistake in data: one sentence with file and line, or option, and the way out."""


class _BadRow(ValueError):
    """What is wrong with one row."""


def read_problems(
    path: str | Path,
    *,
    domain: str,
    kind: str = "mcq",
    fields: Mapping[str, str] = FIELDS,
    skip_bad_rows: bool = False,
    shown_tests: int = 0,
) -> tuple[list[Problem], int]:
    """Read a file of problems.

    SciKnowEval's rows are recognised by their fields and read as published: the model sees their
    prompt word for word. Any other row is read through `fields`; a multiple-choice question
    without an options field has its options in the text, one a line ("A: …"). An answer in
    GSM8K's form ("solution", then "#### answer") is taken apart.

    Args:
        path: `.json` (an array, or JSON lines), `.jsonl` or `.parquet`, UTF-8.
        domain: the problems' domain.
        kind: the verifier's kind; "code" takes a list of tests as the answer, and `imports` that
            the tests need.
        fields: our name (question, answer, options, solution, system, imports) → the file's; names
            that are left out keep their own.
        skip_bad_rows: leave out rows that can't be used, and count them.
        shown_tests: how many of a program's tests stand in the question, the first ones (they name
            the function to be written); the others stay hidden. All of them are judged.

    Returns:
        The problems in the file's order, and how many rows were left out: repetitions of an
        earlier row, and bad rows.

    Raises:
        DataError: a file that can't be read or holds no problem, an unknown field name, a bad row.
    """
    path = Path(path)
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise DataError(
            f"fields of {path}: {min(unknown)!r} is none of {', '.join(FIELDS)}: rename it"
        )
    if kind != "code" and (shown_tests or fields.get("imports", "imports") != "imports"):
        raise DataError(
            f"{path}: only problems of kind 'code' have tests and imports, not {kind!r}: leave out "
            "shown_tests and the field"
        )
    problems: dict[str, Problem] = {}
    skipped = 0
    for line, row in _rows(path):
        try:
            problem = _problem(row, f"{path}:{line}", domain, kind, fields, shown_tests)
            earlier = problems.setdefault(problem.key, problem)
            if earlier.gold != problem.gold:
                raise _BadRow(f"it repeats the question of {earlier.source} with another answer")
            skipped += earlier is not problem
        except _BadRow as error:
            if not skip_bad_rows:
                raise DataError(
                    f"{path}:{line}: {error}; correct the row or pass --data.skip-bad-rows"
                ) from error
            skipped += 1
    if not problems:
        raise DataError(f"{path}: holds no problem that can be used; name another file")
    return list(problems.values()), skipped


def overlap(train: Sequence[Problem], test: Sequence[Problem]) -> list[str]:
    """The keys of the test problems whose question also stands in `train`.

    Questions are compared without their options, white space and case.
    """
    seen = {_normalised_question(problem) for problem in train}
    return [problem.key for problem in test if _normalised_question(problem) in seen]


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Split a multiple-choice question into its stem and its options, {} when it has none.

    The options are the last lines that begin with A, B, … in order, each with the same sign
    (":", "." or ")") after it; a line between two of them belongs to the option above. The last
    option ends with its line.
    """
    lines = text.split("\n")
    marks = [_OPTION.match(line.strip()) for line in lines]
    start = next((n for n in range(len(lines) - 1, -1, -1) if _letter(marks[n]) == "A"), None)
    if start is None:
        return text, {}
    sign = marks[start][2]  # type: ignore[index]
    options: dict[str, str] = {}
    above: list[str] = []  # lines that belong to the latest option if another one follows
    for line, mark in zip(lines[start:], marks[start:], strict=True):
        if mark is not None and mark[2] == sign and mark[1] == chr(ord("A") + len(options)):
            if options:
                latest = chr(ord("A") + len(options) - 1)
                options[latest] = "\n".join([options[latest], *above]).strip()
            options[mark[1]] = line.strip()[mark.end() :].strip()
            above = []
        else:
            above.append(line)
    if len(options) < 2:
        return text, {}
    return "\n".join(lines[:start]).strip(), options


def _letter(mark: re.Match[str] | None) -> str | None:
    return mark[1] if mark else None


def _normalised_question(problem: Problem) -> str:
    question = split_options(problem.question)[0] if problem.kind == "mcq" else problem.question
    return " ".join(question.casefold().split())


def _problem(
    row: Any, source: str, domain: str, kind: str, fields: Mapping[str, str], shown_tests: int
) -> Problem:
    """One row as a problem; raises _BadRow."""
    if isinstance(row, _BadRow):
        raise row
    if not isinstance(row, dict):
        raise _BadRow(f"expected an object with named fields, got {_describe(row)}")
    choices: dict[str, str] = {}
    system = solution = ""
    if row.keys() >= _SCIKNOWEVAL_FIELDS:
        if kind != row["kind"]:
            raise _BadRow(f"its kind is {row['kind']!r}, but kind {kind!r} was asked for")
        question, gold = _text(row, "prompt"), _text(row, "answer").strip()
        system = _text(row, "system")
        choices = split_options(question.removesuffix(_SCIKNOWEVAL_CLOSING))[1]
    else:
        names = {**FIELDS, **fields}
        question = _text(row, names["question"])
        gold = _answer(row, names["answer"], kind)
        given = {name for name in _OPTIONAL if name in fields and fields[name] != name}
        optional = {n: row.get(names[n]) for n in _OPTIONAL}
        for name in given:
            if names[name] not in row:
                raise _BadRow(f"the field {names[name]!r} is missing")
        if optional["system"] is not None:
            system = _text(row, names["system"])
        if optional["solution"] is not None:
            solution = _text(row, names["solution"])
        elif kind in ("math", "numeric", "expression") and _GSM8K_MARK in gold:
            solution, _, gold = gold.rpartition(_GSM8K_MARK)
        if kind == "mcq":
            question, choices = _with_options(question, optional["options"])
        if shown_tests:
            question = _with_tests(question, row[names["answer"]], shown_tests)
        if kind == "code" and optional["imports"] and gold.strip():
            gold = f"{_lines(row, names['imports'])}\n{gold}"
    gold = gold.strip()
    if kind == "mcq":
        gold = _gold_letter(gold, choices)
    if not question.strip() or not gold:
        raise _BadRow(f"its {'answer' if question.strip() else 'question'} is empty")
    return Problem(
        # One wording with other unit tests asks for another program.
        key=_key(domain, question, choices, gold if kind == "code" else ""),
        domain=domain,
        question=question,
        gold=gold,
        kind=kind,
        options={"options": choices} if choices else {},
        system=system,
        solution=solution,
        source=source,
    )


def _key(domain: str, question: str, choices: Mapping[str, str], tests: str) -> str:
    content = json.dumps([domain, question, sorted(choices.items()), tests])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise _BadRow(f"the field {name!r} is missing (it has {', '.join(map(str, row))})")
    value = row[name]
    if not isinstance(value, str):
        raise _BadRow(f"the field {name!r} should be a text, but is {_describe(value)}")
    return _checked(value, name)


def _checked(value: str, name: str) -> str:
    if "\0" in value:
        raise _BadRow(f"the field {name!r} contains a NUL character")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise _BadRow(f"the field {name!r} contains half of a surrogate pair")
    return value


def _answer(row: Mapping[str, Any], name: str, kind: str) -> str:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and kind != "mcq":
        return str(value)
    return _lines(row, name) if kind == "code" else _text(row, name)


def _lines(row: Mapping[str, Any], name: str) -> str:
    """A text, or a list of its lines."""
    value = row.get(name)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return _checked("\n".join(value), name)
    return _text(row, name)


def _with_tests(question: str, tests: Any, shown: int) -> str:
    """The question with its first tests below, the others hidden."""
    if not isinstance(tests, list) or len(tests) <= shown:
        raise _BadRow(f"{shown} of its tests would be shown, and none would stay hidden")
    return fill(SHOWN_TESTS, question=question, tests="\n".join(tests[:shown]))


def _with_options(question: str, options: Any) -> tuple[str, dict[str, str]]:
    """The question with its options below, and the options by letter."""
    if options is None:
        return question, split_options(question)[1]
    if isinstance(options, list):
        options = {chr(ord("A") + n): text for n, text in enumerate(options)}
    if not isinstance(options, dict) or not all(
        isinstance(text, str) and re.fullmatch("[A-Z]", letter) for letter, text in options.items()
    ):
        raise _BadRow("its options should be a list of texts, or an object of letters and texts")
    choices = {letter: _checked(text, "options") for letter, text in options.items()}
    lines = "\n".join(f"{letter}: {text}" for letter, text in choices.items())
    return f"{question}\n\n{lines}", choices


def _gold_letter(gold: str, choices: Mapping[str, str]) -> str:
    """The letter that the answer is, or whose option it spells out."""
    if len(choices) < 2:
        raise _BadRow("it has no options: give a field with them, or lines 'A: …' in the question")
    if gold in choices:
        return gold
    letters = [letter for letter, text in choices.items() if text.strip() == gold]
    if len(letters) != 1:
        raise _BadRow(f"the answer {gold[:40]!r} is none of the options {''.join(choices)}")
    return letters[0]


def _describe(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a text", bool: "a truth value"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a Parquet file ({error}); convert it again") from error
        yield from ((str(number), row) for number, row in enumerate(table.to_pylist(), start=1))
        return
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(
            f"{path}: can't tell the format from {path.suffix!r}; use .json, .jsonl or .parquet"
        )
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        yield from _array_rows(path, content)
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield str(number), _parse(line)


def _parse(line: bytes) -> Any:
    """The line's value, or the _BadRow that it is."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _BadRow(f"not UTF-8 at byte {error.start + 1} of the line")
    except (ValueError, RecursionError) as error:
        return _BadRow(f"not valid JSON ({error})")


def _array_rows(path: Path, content: bytes) -> Iterator[Row]:
    """The elements of one JSON array, each with the line on which it begins."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from error
    decoder = json.JSONDecoder()
    blank = re.compile(r"[ \t\r\n]*")
    position = blank.match(text).end() + 1  # type: ignore[union-attr]
    line, counted = 1, 0
    for number in itertools.count(1):
        position = blank.match(text, position).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]":
            break
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            at = getattr(error, "lineno", line)
            raise DataError(
                f"{path}:{at}: not valid JSON ({error}); a broken array can't be read in part: "
                "correct it"
            ) from error
        yield f"{line} (item {number})", value
        position = blank.match(text, position).end()  # type: ignore[union-attr]
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            raise DataError(f"{path}:{line}: a comma or ] is missing after the row; add it")
    if text[position + 1 :].strip():
        raise DataError(f"{path}:{line}: something follows the array; use JSON lines or one array")
