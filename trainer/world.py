"""The ranks of a run: who am I, how many are we, and the few things that ranks tell each other."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cotutor.trainer.config import ConfigError, ParallelConfig

T = TypeVar("T")


class World:
    """Process group, device and mesh. Started by torchrun, or alone when its variables are unset.

    Tensors go over NCCL on GPUs and gloo on CPUs; Python objects always over gloo. The mesh has one
    dimension ("shard") or two ("replicate", "shard"): FSDP2 shards over the last and reduces
    gradients over both. Raises ConfigError, before any group stands, if `parallel` doesn't suit.
    """

    # Long: rank 0 may write 100 GB, or generate the longest texts, while the others wait. A rank
    # that dies does not make them wait so long: torchrun ends them all.
    def __init__(self, parallel: ParallelConfig | None = None, timeout_s: float = 7200.0) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        replicate, shard = mesh_shape(parallel or ParallelConfig(), self.size)
        cuda = torch.cuda.is_available()
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        shape = {"shard": shard} if replicate == 1 else {"replicate": replicate, "shard": shard}
        self.mesh: DeviceMesh = init_device_mesh(
            self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
        )
        self._objects = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    @property
    def main(self) -> bool:
        """True on the one rank that writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self._objects)
        return out

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up per-rank counts by name, in rank order (the same bits every time)."""
        total: Counter[str] = Counter()
        for part in self.gather(dict(values)):
            for name, value in part.items():
                total[name] += value  # type: ignore[assignment]
        return dict(total)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._objects)

    def close(self) -> None:
        dist.destroy_process_group()


def mesh_shape(parallel: ParallelConfig, ranks: int) -> tuple[int, int]:
    """(replicate, shard) for this many ranks. Raises ConfigError that names both options."""
    shard = parallel.shard or ranks // (parallel.replicate or 1)
    replicate = parallel.replicate or ranks // shard
    if replicate * shard != ranks:
        raise ConfigError(
            f"--parallel.replicate {parallel.replicate} and --parallel.shard {parallel.shard} don't"
            f" multiply to the {ranks} rank(s) of this run; 0 chooses"
        )
    return replicate, shard
