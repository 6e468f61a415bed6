"""A user's mistake is one sentence that names the option or the file and line, and exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotutor.rollout import sandbox
from cotutor.trainer import engines
from cotutor.trainer.config import Config
from cotutor.trainer.main import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs/tiny.toml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command line, expect exit code 2, and return the one sentence."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def preset(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "preset.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--opcod.k", "0"], r"--opcod\.k must be at least 1; got 0"),
        (["--opcod.alpha", "1.5"], r"--opcod\.alpha must be in \[0, 1\]; got 1\.5"),
        (["--opcod.kk", "3"], r"--opcod\.kk.*did you mean --opcod\.k"),
        (["--opcod.k", "many"], r"--opcod\.k.*many"),
        (["--algo", "magic"], r"magic.*--algo"),
        (["--config", "nowhere.toml"], r"--config nowhere\.toml: No such file.*configs/"),
        (["--baselines", "sdpo,magic"], r"--baselines: 'magic'"),
        (["--baselines"], r"--baselines needs a value"),
        (["--rollout.top-p", "0.8"], r"--rollout\.top-p must be 1"),
        (["--rollout.temperature", "0"], r"--rollout\.temperature must be above 0"),
        (["--policy.micro-batch-tokens", "0"], r"--policy\.micro-batch-tokens must be at least 1"),
        (["--steps", "-1"], r"--steps must be at least 0"),
        (["--students.0.model", "nowhere"], r"model nowhere: no such folder.*--students"),
        (["--students.1.name", "s1"], r"names must differ"),
        (["--students.1.name", "../s1"], r"students: a name is made of letters"),
        (["--baselines", "sdpo,sdpo"], r"--baselines: sdpo is named twice"),
        (["--baselines", "rl2f"], r"--baselines: rl2f"),
        (["--algo", "rl2f", "--rl2f.world-model-coef", "-1"], r"--rl2f\.world-model-coef must be"),
        (
            ["--algo", "rl2f", "--dialogue.max-dialogue-tokens", "100"],
            r"--dialogue\.max-dialogue-tokens 100 must be at least 128",
        ),
        (["--algo", "rl2f", "--dialogue.leak-judge"], r"--dialogue\.leak-judge.*--data\.prompts"),
        (["--algo", "rl2f", "--dialogue.max-turns", "0"], r"--dialogue\.max-turns must be"),
        (["--dialogue.evaluate", "games"], r"--dialogue\.evaluate games needs .*--dialogue\.games"),
        (["--dialogue.evaluate", "self", "self"], r"--dialogue\.evaluate: names a setting twice"),
        (["--data.source", "games"], r"data\.domains: coins needs a `game`"),
        (["--optimizer.beta1", "1.5"], r"--optimizer\.beta1 must be in \[0, 1\)"),
        (["--data.domains.0.name", "stars"], r"data\.domains: stars is not embedded"),
        (["--data.train-problems-per-domain", "0"], r"--data\.train-problems-per-domain must be"),
        (["--students.0.model", "package:a.b"], r"package a\.b is not installed"),
        (["--rollout.max-reprompt-tokens", "5"], r"--rollout\.max-reprompt-tokens 5 must be"),
        (["--parallel.shard", "3"], r"--parallel\.shard 3 don't multiply to the 1 rank\(s\)"),
        (["--parallel.replicate", "-1"], r"--parallel\.replicate must be at least 0"),
        (["--policy.liger", "on"], r"--policy\.liger on needs a GPU"),
        (["--plan.gpus", "2"], r"--plan\.gpus and --plan\.gpu-memory-gb .*give both"),
        (["--plan.gpu-memory-gb", "inf"], r"--plan\.gpu-memory-gb must be finite"),
        (["--vllm.tutor-kv-cache-gb", "nan"], r"--vllm\.tutor-kv-cache-gb must be at least 0"),
        (["--resume", "nowhere"], r"--resume nowhere: no run with checkpoints"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], pattern: str, told: Callable[..., str], tmp_path: Path
) -> None:
    assert re.search(pattern, told("--out", str(tmp_path / "run"), *arguments), re.DOTALL)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("seed = 1\n\n[opcod]\nkk = 3\n", r"preset\.toml:4.*unknown key 'kk'; did you mean 'k'\?"),
        ("[opcod]\nk = 'many'\n", r"preset\.toml:2.*k must be int; got 'many'"),
        ("algo = 'magic'\n", r"preset\.toml:1.*algo must be one of .*got 'magic'"),
        ("algo = \n", r"preset\.toml: .*line 1"),
        ("opcod = 3\n", r"preset\.toml:1.*opcod must be a table"),
        ("algo = 'opcod'\n", r"students: name at least one"),
    ],
)
def test_mistakes_in_a_preset(
    text: str, pattern: str, told: Callable[..., str], preset: Callable[[str], str]
) -> None:
    assert re.search(pattern, told("--config", preset(text)))


def test_vllm_where_it_is_missing(
    told: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "why_not", lambda: "vLLM is not installed")
    assert re.fullmatch(
        r"--engine vllm: vLLM is not installed; `make vllm` installs it .*--engine transformers",
        told("--engine", "vllm", "--out", str(tmp_path / "run")),
    )


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(engine: Any, reason: str) -> tuple[str, str]:
        monkeypatch.setattr(engines, "why_not", lambda: reason)
        return engines.choose_engine(Config(engine=engine))

    assert chosen("auto", "") == ("vllm", "it is installed")
    assert chosen("vllm", "") == ("vllm", "as configured")
    assert chosen("auto", "vLLM is not installed") == ("transformers", "vLLM is not installed")
    assert chosen("transformers", "") == ("transformers", "as configured")


FILES = """
algo = "sdpo"
[[students]]
name = "s"
model = "{model}"
[data]
root = "{root}"
validation_problems_per_domain = 1
[[data.domains]]
name = "physics"
train = "train.json"
test = "test.json"
[rollout]
max_prompt_tokens = {limit}
"""
ROW = {
    "prompt": "Which one?\nA: this\nB: that\nPlease reason step by step.",
    "answer": "A",
    "system": "Answer.",
    "kind": "mcq",
    "dataset": "sciknoweval",
}


def write_rows(path: Path, n: int, broken: str = "", of: str = "") -> None:
    prompts = [f"{i} {of}{ROW['prompt']}" for i in range(n)]
    rows = [json.dumps({**ROW, "idx": i, "prompt": prompt}) for i, prompt in enumerate(prompts)]
    path.write_text("\n".join([*rows, *([broken] if broken else [])]) + "\n")


def test_mistakes_in_data_and_models(
    told: Callable[..., str], preset: Callable[[str], str], tmp_path: Path
) -> None:
    def run(model: str = "configs/tiny/s1", limit: int = 4096) -> str:
        config = preset(FILES.format(model=model, root=tmp_path, limit=limit))
        return told("--config", config, "--out", str(tmp_path / "run"))

    assert re.search(r"train\.json: no such file; set --data\.root", run())
    write_rows(tmp_path / "train.json", 3, broken='{"prompt": ')
    write_rows(tmp_path / "test.json", 2)
    assert re.search(r"train\.json:4", run())
    write_rows(tmp_path / "train.json", 3)
    (tmp_path / "empty").mkdir()
    assert re.search(r"empty: the folder has no config\.json", run(model=str(tmp_path / "empty")))
    (tmp_path / "empty/config.json").write_text("{}")
    assert re.search(r"empty: the folder has no tokenizer", run(model=str(tmp_path / "empty")))
    sft = [
        "--algo",
        "sft",
        "--config",
        preset(FILES.format(model="configs/tiny/s1", root=tmp_path, limit=4096)),
        "--out",
        str(tmp_path / "run"),
    ]
    assert re.search(r"train\.json:\d: no worked solution to train on", told(*sft))
    assert re.search(r"--rollout\.max-prompt-tokens 3: no prompt of physics", run(limit=3))


def test_programs_need_a_sandbox(
    told: Callable[..., str],
    preset: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"question": "Write f.", "answer": ["assert f(1)", "assert f(2)"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    text = f"""
algo = "grpo"
students = [{{ name = "s1", model = "configs/tiny/s1" }}]
[data]
source = "files"
root = "{tmp_path}"
[[data.domains]]
name = "code"
train = "rows.jsonl"
test = "rows.jsonl"
kind = "KIND"
shown_tests = 1
"""
    out = ("--out", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", "/nonexistent")
    sandbox._bubblewrap_missing.cache_clear()
    try:
        assert re.search(
            r"data\.domains: code is judged by running programs, but code can't be run safely: .*"
            r"install bubblewrap, or pass --rollout\.allow-restricted-sandbox to run it",
            told("--config", preset(text.replace("KIND", "code")), *out),
        )
    finally:
        sandbox._bubblewrap_missing.cache_clear()
    assert re.search(
        "shown_tests of code must be at least 0, and 0 unless its kind is code; got 1",
        told("--config", preset(text.replace("KIND", "math")), *out),
    )
