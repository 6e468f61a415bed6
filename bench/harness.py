"""What the kernel benchmarks share: shapes, time, memory, the bare GEMMs, the copy rate, results.

Every figure is taken in this process, next to the GEMMs and the copy that it is compared with, and
only after the implementation's values and gradients were compared with float64.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import write_record
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE_VARIABLE = "COTUTOR_BENCH_SHAPE"  # "N,V,D,K", replaces the shape below
NAME_VARIABLE = "COTUTOR_BENCH_NAME"  # a word added to the records' names, to keep older ones


@dataclass(frozen=True)
class Shape:
    """N rows, V vocabulary, D hidden size, K support size, and the working dtype."""

    rows: int
    vocab: int
    width: int
    k: int
    dtype: torch.dtype

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def choose_shape(device: torch.device) -> Shape:
    """The reference shape (Qwen3-8B, bfloat16) on a GPU, a moderate float32 one on a CPU."""
    gpu = device.type == "cuda"
    sizes = (8192, 151_936, 4096, 100) if gpu else (512, 32_768, 256, 100)
    if given := os.environ.get(SHAPE_VARIABLE):
        sizes = tuple(int(size) for size in given.split(","))
        if len(sizes) != 4:
            raise ValueError(f"{SHAPE_VARIABLE} must be N,V,D,K; got {given!r}")
    return Shape(*sizes, torch.bfloat16 if gpu else torch.float32)


class Bench:
    """Device, shape, references measured in this run, and the results so far."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.shape = choose_shape(self.device)
        self.rounds = 10 if self.device.type == "cuda" else 7
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.absent: dict[str, list[dict[str, Any]]] = {}  # what could not run here, and why
        self._copy_rate: float | None = None
        self._checked: dict[str, str] = {}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *sizes: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Normal numbers in the working dtype on the device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(*sizes, generator=generator, device=self.device)
        return numbers.mul_(scale).to(self.shape.dtype)

    def _seconds(self, step: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        step()
        self.synchronize()
        return time.perf_counter() - start

    def gemms(self, *names: str) -> Callable[[], None]:
        """What does the bare GEMMs "forward", "hidden" and "weight", all rows at once, in turn."""
        shape = self.shape
        hidden = self.random(shape.rows, shape.width)
        weight = self.random(shape.vocab, shape.width, seed=1)
        logits = torch.empty(shape.rows, shape.vocab, dtype=shape.dtype, device=self.device)
        logits.normal_()
        steps = {
            "forward": lambda: torch.mm(hidden, weight.t(), out=logits),
            "hidden": lambda: torch.mm(logits, weight),
            "weight": lambda: torch.mm(logits.t(), hidden),
        }

        def multiply() -> None:
            for name in names:
                steps[name]()

        return multiply

    def gemm_flops(self, *names: str) -> int:
        """Multiplications and additions of so many GEMMs of one LM head."""
        return len(names) * 2 * self.shape.rows * self.shape.vocab * self.shape.width

    def gemm_traffic(self, *names: str) -> int:
        """Bytes of the operands and results of so many GEMMs, each moved once."""
        n, v, d = self.shape.rows, self.shape.vocab, self.shape.width
        return len(names) * (n * v + n * d + v * d) * self.shape.dtype.itemsize

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a large device-to-device copy."""
        size = (1 << 30) if self.device.type == "cuda" else (1 << 27)
        if self._copy_rate is None:
            source = torch.zeros(size, dtype=torch.uint8, device=self.device)
            target = torch.zeros_like(source)
            times = [self._seconds(lambda: target.copy_(source)) for _ in range(6)]
            self._copy_rate = 2 * size / median(times[1:])
        return self._copy_rate

    def peak_bytes(self, step: Callable[[], object]) -> int | None:
        """Extra memory at the highest point of `step`; None where the system won't say."""
        if self.device.type == "cuda":
            self.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            self.synchronize()
            return torch.cuda.max_memory_allocated() - before
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the resident peak
        except OSError:
            return None
        before = _resident("VmRSS")
        step()
        return _resident("VmHWM") - before

    def checked(self, name: str, check: Callable[[], str]) -> str:
        """Run an implementation's check once; it raises when red."""
        if name not in self._checked:
            self._checked[name] = check()
        return self._checked[name]

    def measure(
        self,
        benchmark,
        operation: str,
        implementation: str,
        step: Callable[[], object],
        *,
        checked: str,
        gemms: tuple[str, ...] = (),
        moved: int | None = None,
        traffic: int | None = None,
        flops: int | None = None,
        note: str = "",
    ) -> None:
        """Time `step`, then its peak memory, and keep one result.

        Args:
            gemms: the bare GEMMs that the operation can't do without.
            moved: bytes that the operation has to move, for a share of the copy rate.
            traffic: bytes for the roofline plot, where GEMMs make them more than `moved`.
            flops: floating-point operations for the plot; default: those of the GEMMs.
            note: what this implementation does otherwise than ours.
        """
        peak = self.peak_bytes(step)  # also warms up
        beside: list[
            float
        ] = []  # seconds of the bare GEMMs before the warm-up and before each round
        multiply = self.gemms(*gemms) if gemms else None

        def before() -> None:
            if multiply:
                beside.append(self._seconds(multiply))

        def timed() -> None:
            step()
            self.synchronize()

        benchmark.pedantic(timed, setup=before, rounds=self.rounds, iterations=1, warmup_rounds=1)
        seconds = benchmark.stats.stats.median
        bare = beside[1 : 1 + self.rounds]
        pairs = zip(benchmark.stats.stats.data, bare, strict=True) if bare else ()
        ratio = median(taken / least for taken, least in pairs) if bare else None
        result = {
            "operation": operation,
            "implementation": implementation,
            "shape": self.shape.describe(),
            "seconds": seconds,
            "seconds_min": benchmark.stats.stats.min,
            "rounds": self.rounds,
            "gemm_seconds": median(bare) if bare else None,
            "gemm_flops": self.gemm_flops(*gemms),
            "flops": flops or self.gemm_flops(*gemms) or None,
            "traffic": traffic or moved,
            "gemm_ratio": ratio,
            "bytes_moved": moved,
            "copy_share": moved / seconds / self.copy_rate() if moved else None,
            "copy_rate": self.copy_rate(),
            "peak_extra_bytes": peak,
            "checked": checked,
            "note": note,
        }
        benchmark.extra_info.update(
            {k: result[k] for k in ("gemm_ratio", "copy_share", "peak_extra_bytes")}
        )
        self.results.setdefault(operation, []).append(result)

    def write(self) -> list[Path]:
        """One file per operation and kind of device, with where its figures come from."""
        written = []
        kind = "gpu" if self.device.type == "cuda" else "cpu"
        word = os.environ.get(NAME_VARIABLE, "")
        for operation, results in self.results.items():
            path = RESULTS / f"{operation}{'-' if word else ''}{word}.{kind}.json"
            absent = self.absent.get(operation)
            write_record(path, results=results, **({"absent": absent} if absent else {}))
            written.append(path)
        return written


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest deviation over the truth's largest entry."""
    got, truth = got.detach().double().cpu(), truth.detach().double().cpu()
    return float((got - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


def compare(
    name: str, got: dict[str, Tensor], truth: dict[str, Tensor], plain: dict[str, Tensor]
) -> str:
    """Describe the largest error; raise unless each one is at most twice plain PyTorch's.

    The floor of 16 eps allows for sums in another order on a problem of this size.
    """
    worst = 0.0
    for key, value in got.items():
        error, usual = relative_error(value, truth[key]), relative_error(plain[key], truth[key])
        bound = 2 * usual + 16 * torch.finfo(value.dtype).eps
        worst = max(worst, error)
        if not error <= bound:
            raise AssertionError(f"{name}: {key} is off by {error:.2e}, allowed {bound:.2e}")
    return f"max error {worst:.1e} of the largest entry, against float64"
