"""What every kernel shares: argument errors, the choice of backend, temperatures, chunk sizes.

Nothing here computes a loss. Checks that need a tensor's *values* are free on the CPU and become
device-side assertions on an accelerator, so that no forward or backward waits for the device.
"""

import contextlib
import math
import mmap
import os
from importlib.util import find_spec

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HUGE_FROM = 1 << 25  # bytes from which `scratch` asks for huge pages

# Triton reads the variable when a kernel is decorated, hence once, when this package is imported.
TRITON_INSTALLED = find_spec("triton") is not None
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")


# Launch option of every kernel: Triton's default changes with its version, results should not.
FUSION = {"enable_fp_fusion": True}


def invalid(function: str, argument: str, wanted: str, got: object) -> ValueError:
    """A caller's mistake, always as "<function>: <argument> must be <wanted>; got <value>"."""
    return ValueError(f"{function}: {argument} must be {wanted}; got {got}")


def resolve_backend(function: str, backend: str, device: torch.device) -> str:
    """Return "triton" or "torch" for tensors on `device`.

    "auto" is Triton on CUDA tensors and PyTorch elsewhere; it never picks Triton's interpreter.

    Raises:
        ValueError: an unknown name, or Triton where it can't run.
    """
    if backend not in BACKENDS:
        raise invalid(
            function, "backend", "one of " + ", ".join(map(repr, BACKENDS)), repr(backend)
        )
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or TRITON_INTERPRETED)):
        return "torch"
    wanted = "'torch'"
    if not TRITON_INSTALLED:
        raise invalid(function, "backend", wanted, f"{backend!r}, but triton is not installed")
    if device.type == "cuda" or (device.type == "cpu" and TRITON_INTERPRETED):
        return "triton"
    if device.type == "cpu":
        why = "on CPU tensors, which need TRITON_INTERPRET=1 set before cotutor is imported"
    else:
        why = f"on {device.type} tensors, which Triton does not serve"
    raise invalid(function, "backend", wanted, f"{backend!r} {why}")


def check_float(function: str, argument: str, tensor: Tensor, dim: int | None = None) -> None:
    """Raise unless `tensor` has a supported floating dtype and, when given, `dim` dimensions."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise invalid(function, argument, "float32, bfloat16 or float16", tensor.dtype)
    if dim is not None and tensor.dim() != dim:
        raise invalid(function, argument, f"{dim}-dimensional", f"shape {tuple(tensor.shape)}")


def check_shape(function: str, argument: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise invalid(
            function, argument, f"of shape {tuple(shape)}", f"shape {tuple(tensor.shape)}"
        )


def check_device(function: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise invalid(function, argument, f"on {device}", tensor.device)


def check_values(
    function: str, argument: str, wanted: str, fine: Tensor, values: Tensor | None = None
) -> None:
    """Raise unless the boolean tensor `fine` is all true; `values` (same shape) is quoted.

    On the CPU this is a `ValueError`; on other devices a device-side assertion with the same
    sentence, because reading the answer would wait for the device. Call it inside a registered
    operator: a traced program can't branch on values.
    """
    if fine.device.type != "cpu":
        torch._assert_async(fine.all(), f"{function}: {argument} must be {wanted}")
    elif not bool(fine.all()):
        got = "other values" if values is None else values[~fine].flatten()[0].item()
        raise invalid(function, argument, wanted, got)


def split_temperature(
    function: str,
    argument: str,
    temperature: float | Tensor,
    rows: tuple[int, ...],
    device: torch.device,
) -> tuple[float, Tensor | None]:
    """Return (number, None), or (1.0, flat float32 tensor of one value per row).

    A tensor's values are checked later, by `check_values` with `TEMPERATURE_WANTED`.
    """
    if isinstance(temperature, Tensor):
        check_device(function, argument, temperature, device)
        if temperature.dim() > 0 and tuple(temperature.shape) != tuple(rows):
            raise invalid(
                function,
                argument,
                f"a number or one value per row, shape {tuple(rows)}",
                f"shape {tuple(temperature.shape)}",
            )
        taus = temperature.detach().to(torch.float32).expand(rows)
        return 1.0, taus.reshape(-1).contiguous()
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise invalid(function, argument, "a number or a tensor", repr(temperature))
    if not 0.0 < temperature < float("inf"):
        raise invalid(function, argument, TEMPERATURE_WANTED, temperature)
    return float(temperature), None


TEMPERATURE_WANTED = "greater than 0 and finite"


def temperature_fine(temperature: Tensor) -> Tensor:
    """True where a per-row temperature is legal."""
    return (temperature > 0) & torch.isfinite(temperature)


def choose_chunk_rows(
    function: str, chunk_rows: int | None, rows: int, vocab: int, device: torch.device
) -> int:
    """Rows of logits that are held at once: the caller's number, or one that suits the device.

    Small chunks starve the GEMMs. On a GPU a chunk is 2048 rows, or fewer where a float32 buffer
    would pass 1.25 GiB; on a CPU up to 1024 rows in at most 160 MiB.
    """
    if chunk_rows is None:
        most, elements = (1024, 5 << 23) if device.type == "cpu" else (2048, 5 << 26)
        chunk_rows = min(most, max(128, elements // max(vocab, 1) // 128 * 128))
    elif isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise invalid(function, "chunk_rows", "a whole number of at least 1", repr(chunk_rows))
    return max(1, min(chunk_rows, rows))


def scratch(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An uninitialised float32 tensor for use within one call.

    On a CPU under Linux a large one lies in huge pages: to touch as many small ones for the first
    time takes up to a tenth of the LM head's products.
    """
    size = 4 * math.prod(shape)
    if device.type != "cpu" or size < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that the LM-head GEMM multiplies in: autocast's, or else the widest input's."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def autocast_off(device: torch.device) -> torch.autocast:
    """Registered operators run their body under this: autocast would recast their GEMMs."""
    return torch.autocast(device.type, enabled=False)
