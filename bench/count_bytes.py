"""Count the bytes that each Triton kernel loads and stores while the interpreter runs it.

    python bench/count_bytes.py            writes bench/results/bytes.json

Masked lanes don't count. The floor is what the kernel's docstring says it has to move. Loads that
hit a cache on a GPU are counted in full, so a ratio near 1 needs no cache. The selection reads more
of some rows than of others: its share of the row is counted for rows made to be hard as well.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

import kernel_registry as registry  # noqa: E402 (from tests/kernels)
import numpy  # noqa: E402 (the interpreter has to be chosen first)
import test_topk_jsd_selection as hard  # noqa: E402
import torch  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

ROWS = 3
TOKENS = 8192
SUPPORT = 100  # K of the rows made to be hard
MANY = 3000  # more than the row has blocks


class Traffic:
    """While entered, adds up bytes loaded and stored, by kernel."""

    def __init__(self) -> None:
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self.kernel = ""

    def __enter__(self) -> "Traffic":
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        self.originals = (
            builder.create_masked_load,
            builder.create_masked_store,
            executor.__call__,
        )
        load, store, call = self.originals

        def size(pointers, mask) -> int:
            lanes = int(numpy.broadcast_to(mask.data, pointers.data.shape).sum())
            return lanes * max(1, pointers.get_element_ty().primitive_bitwidth // 8)

        def counted_load(this, pointers, mask, *others):
            self.loaded[self.kernel] += size(pointers, mask)
            return load(this, pointers, mask, *others)

        def counted_store(this, pointers, value, mask, *others):
            self.stored[self.kernel] += size(pointers, mask)
            return store(this, pointers, value, mask, *others)

        def named_call(this, *arguments, **options):
            self.kernel = this.fn.__name__
            return call(this, *arguments, **options)

        builder.create_masked_load = counted_load
        builder.create_masked_store = counted_store
        executor.__call__ = named_call
        return self

    def __exit__(self, *error: object) -> None:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = self.originals

    def total(self) -> int:
        return sum(self.loaded.values()) + sum(self.stored.values())


def count(case: registry.Case, rows: int, vocab: int) -> dict[str, Any]:
    """Bytes of one case, its floor and their ratio."""
    with Traffic() as traffic, numpy.errstate(all="ignore"):
        case.run(rows, vocab, "cpu")
    floor = None if case.floor is None else case.floor(rows, vocab)
    return {
        "case": case.name,
        "rows": rows,
        "vocab": vocab if case.by_vocab else None,
        "loaded": dict(traffic.loaded),
        "stored": dict(traffic.stored),
        "floor": floor,
        "ratio": None if floor is None else round(traffic.total() / floor, 4),
    }


def record(vocab: int) -> list[dict[str, Any]]:
    """All cases that promise a floor."""
    return [
        count(case, ROWS if case.by_vocab else TOKENS, vocab)
        for case in registry.CASES
        if case.floor is not None
    ]


def reread(name: str, row: torch.Tensor, k: int) -> dict[str, Any]:
    """What the selection reads of a row (V,) after its statistics; whether it is exact."""
    from cotutor.kernels.triton_select import select
    from cotutor.kernels.triton_topk import block_statistics

    z = row[None]
    with numpy.errstate(all="ignore"):
        statistics = block_statistics(z, 1.0)
        with Traffic() as traffic:
            ids, values = select(z, statistics, k, 1.0)
    wanted = hard.by_sorting(z, k).sort(dim=1).values
    return {
        "row": name,
        "vocab": len(row),
        "k": k,
        "reread_share": round(sum(traffic.loaded.values()) / (len(row) * row.element_size()), 4),
        "exact": torch.equal(ids, wanted) and torch.equal(values, z.float().gather(1, wanted)),
    }


def reread_record(vocab: int) -> list[dict[str, Any]]:
    """A random row, every row made to be hard, and a support that no block can be spared for."""
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    rows = {"random": noise, **hard.adversarial_rows(vocab)}
    entries = [reread(name, row, SUPPORT) for name, row in rows.items()]
    return [*entries, reread("random", noise, MANY)]


def main() -> None:
    from provenance import write_record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "bytes.json")
    parser.add_argument("--vocab", type=int, default=registry.VOCABS[0])
    options = parser.parse_args()
    entries = record(options.vocab)
    rows = reread_record(options.vocab)
    write_record(options.out, entries=entries, reread=rows)
    for row in rows:
        right = "exact" if row["exact"] else "WRONG"
        print(f"{row['reread_share']:.1%} read again, {right}  {row['row']}, K = {row['k']}")
    for entry in entries:
        print(f"{entry['ratio']:.3f} x floor  {entry['case']}")


if __name__ == "__main__":
    main()
