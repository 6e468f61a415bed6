"""Compile every Triton kernel for GPUs that aren't here, and record what each one needs.

    python bench/aot_record.py                       writes bench/results/aot.json
    python bench/aot_record.py --out FILE --vocab 151936 --arch 90

The launches are the library's own, recorded on "meta" tensors of the real sizes. Any local memory
or stack is a failure (exit code 1): it means spilled registers. Must not run under
TRITON_INTERPRET=1, where there is nothing to compile.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="cotutor-aot-"))

import kernel_registry as registry  # noqa: E402 (from tests/kernels)
import torch  # noqa: E402 (the cache has to be named first)
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
DIVISIBLE = [["tt.divisibility", 16]]


class Recorder:
    """Stands in for `JITFunction.run` and keeps the launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[JITFunction, tuple, dict[str, Any], tuple]] = []

    def __enter__(self) -> "Recorder":
        self.original = JITFunction.run
        JITFunction.run = lambda fn, *args, grid, warmup, **kwargs: self.launches.append(
            (fn, args, kwargs, grid)
        )
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self.original


def specialise(fn: JITFunction, args: tuple, kwargs: dict[str, Any]):
    """Signature, constants, attributes and options as Triton's own launcher derives them."""
    names = fn.arg_names
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k not in names}
    constant_names = {p.name for p in fn.params if p.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(names):
        value = given[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = DIVISIBLE  # torch allocates on 256 bytes
        elif name in constant_names or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = DIVISIBLE
        else:
            signature[name] = "fp32"
    return signature, constants, attributes, options


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of local memory and stack, as cuobjdump reads a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: re.search(rf"{key}:(\d+)", text) for key in ("REG", "LOCAL", "STACK")}
    if not all(found.values()):
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return {key.lower(): int(match[1]) for key, match in found.items() if match}


def compile_launch(launch, arch: int, cache: dict[str, dict[str, int]]) -> dict[str, int]:
    """Compile one recorded launch for one architecture; equal specialisations only once."""
    fn, args, kwargs, _ = launch
    signature, constants, attributes, options = specialise(fn, args, kwargs)
    key = repr((fn.__name__, signature, constants, attributes, options, arch))
    if key not in cache:
        source = ASTSource(fn, signature=signature, constexprs=constants, attrs=attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cache[key] = resources(kernel.asm["cubin"]) | {"shared": kernel.metadata.shared}
    return cache[key]


def record(vocabs: list[int], archs: list[int], only: str = "") -> list[dict[str, Any]]:
    """One entry per case, kernel, architecture and vocabulary."""
    entries, cache = [], {}
    for case in registry.CASES:
        if only not in case.name:
            continue
        for vocab in vocabs if case.by_vocab else vocabs[:1]:
            with Recorder() as recorder:
                case.run(registry.CHUNK if case.by_vocab else 1 << 20, vocab, "meta")
            for launch in recorder.launches:
                sizes = {k: v for k, v in launch[2].items() if k.isupper() or k == "num_warps"}
                for arch in archs:
                    entries.append(
                        {
                            "case": case.name,
                            "kernel": launch[0].__name__,
                            "arch": arch,
                            "vocab": vocab if case.by_vocab else None,
                            "constants": sizes,
                            **compile_launch(launch, arch, cache),
                        }
                    )
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "aot.json")
    parser.add_argument("--vocab", type=int, nargs="*", default=list(registry.VOCABS))
    parser.add_argument("--arch", type=int, nargs="*", default=list(registry.ARCHITECTURES))
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    entries = record(options.vocab, options.arch, options.case)
    spilled = [entry for entry in entries if entry["local"] or entry["stack"]]
    from provenance import write_record

    write_record(options.out, entries=entries)
    print(f"{len(entries)} kernel launches compiled, {len(spilled)} use local memory or stack")
    for entry in spilled:
        print("spills:", entry)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
