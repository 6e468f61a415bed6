"""The repository as a whole: import names, layering, sizes, and what must not stand in it."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "rollout", "trainer")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 120  # a device kernel; others aim for 60


def tracked() -> list[Path]:
    """The files under version control, or of the whole tree where there is no checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the repository isn't known")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any level of nesting."""
    package = ["cotutor", *path.relative_to(ROOT).with_suffix("").parts][:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def run_python(code: str, extra_path: Path | None = None) -> None:
    path = os.pathsep.join(filter(None, [str(extra_path or ""), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "error::ImportWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


# Enough of Hugging Face's `kernels` for transformers, which imports it where it finds a
# distribution of that name in a version that it knows: every name is a decorator that does nothing.
FOREIGN_KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, function=None, *args, **kwargs): return function
    def __getattr__(self, name): return Anything()

def __getattr__(name):
    return Anything
"""


def foreign_kernels(folder: Path) -> Path:
    from transformers.utils.import_utils import KERNELS_MIN_VERSION as VERSION

    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(FOREIGN_KERNELS)
    info = folder / f"kernels-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {VERSION}\n")
    return folder


LOAD_A_MODEL = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_kernels_available

assert is_kernels_available()
sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=1, vocab_size=9))
assert model(torch.zeros(1, 2, dtype=torch.int64)).logits.shape == (1, 2, 9)
"""


def test_a_foreign_kernels_package_beside_ours_does_no_harm(tmp_path: Path) -> None:
    run_python(
        f"{LOAD_A_MODEL}\n"
        "import kernels, cotutor.kernels\n"
        f"assert kernels.__file__.startswith({str(tmp_path)!r})\n"
        f"assert cotutor.kernels.__file__.startswith({str(ROOT)!r})\n",
        foreign_kernels(tmp_path),
    )


def test_the_same_code_fails_where_our_folder_is_imported_as_kernels(tmp_path: Path) -> None:
    # The reason for the import root `cotutor`, and the proof that the test above can fail.
    with pytest.raises(AssertionError, match=r"cannot import name .* from 'kernels'"):
        run_python(
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOAD_A_MODEL}",
            foreign_kernels(tmp_path),
        )


def test_kernels_work_where_triton_is_not_installed() -> None:
    run_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from cotutor.kernels import linear_topk_jsd\n"
        "h, w = torch.randn(3, 4), torch.randn(7, 4)\n"
        "assert linear_topk_jsd(h, w, h, w, k=2).loss == 0\n"
    )


def test_no_file_in_trainer_is_named_like_a_module_that_anything_imports() -> None:
    # `torchrun trainer/main.py` puts trainer/ first on sys.path.
    ours = {path.stem for path in (ROOT / "trainer").glob("*.py")} - {"__init__", "main"}
    ours |= {path.name for path in (ROOT / "trainer").iterdir() if path.is_dir()}
    installed = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if set(owners) != {"cotutor"}
    }
    assert len(installed) > 20
    assert ours & (set(sys.stdlib_module_names) | installed) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_import_only_what_they_may(package: str) -> None:
    forbidden = {
        "kernels": ("cotutor.rollout", "cotutor.trainer"),
        "rollout": ("cotutor.kernels", "cotutor.trainer"),
        "trainer": (),
    }[package]
    for path in (ROOT / package).rglob("*.py"):
        names = imported_modules(path)
        for name in names:
            assert not name.startswith(forbidden or "\0"), f"{path} imports {name}"
            if package == "kernels":
                top = name.split(".")[0]
                allowed = {"cotutor", "torch", "triton", *sys.stdlib_module_names}
                assert top in allowed, f"{path} imports {name}"


def test_the_loop_names_no_algorithm() -> None:
    names = imported_modules(ROOT / "trainer" / "loop.py")
    algorithms = {p.stem for p in (ROOT / "trainer" / "algos").glob("*.py")} - {"__init__", "base"}
    assert len(algorithms) >= 4
    for algorithm in algorithms:
        assert f"cotutor.trainer.algos.{algorithm}" not in names


def test_nothing_names_a_path_of_the_machine_it_was_written_on() -> None:
    # Absolute paths of people's and workplaces' folders; /tmp, /proc and /dev are everybody's.
    pattern = re.compile(rb"(?<![\w.~/-])/(?:home|work|root|Users|mnt|opt|srv|data)/[\w.-]+")
    for path in tracked():
        found = pattern.findall(path.read_bytes()) if path.suffix != ".safetensors" else []
        assert not found, f"{path}: {found}"


def test_files_and_functions_stay_readable() -> None:
    for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_FILE_LINES, f"{path} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_every_package_folder_is_declared_for_installation() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = set(project["tool"]["setuptools"]["package-dir"].values())
    found = {str(p.parent.relative_to(ROOT)) for p in sources() if p.name == "__init__.py"}
    assert declared == found
    names = project["tool"]["setuptools"]["package-dir"].keys()
    assert set(project["tool"]["setuptools"]["packages"]) == set(names)


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#!")
    assert lines[1:] == ['cd "$(dirname "$0")/.." && exec make test']


def test_first_command_stands_early_in_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("make opcod" in line for line in lines[:40])
