"""Render bench/results/*.json: tables in Markdown, and a roofline plot.

    python bench/render.py                     prints the tables
    python bench/render.py --readme README.md  puts them between the file's bench markers
    python bench/render.py --plot bench/results/roofline.svg

A figure that was never measured is called unmeasured; nothing here is typed by hand.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
UNMEASURED = "unmeasured on a GPU"


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def load_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Recorded benchmarks of "cpu" or "gpu", by operation."""
    files = sorted(RESULTS.glob(f"*.{kind}.json")) if RESULTS.exists() else []
    found = {
        path.name.removesuffix(f".{kind}.json"): json.loads(path.read_text()) for path in files
    }
    return {name: content for name, content in found.items() if _ours(content)}


def _ours(content: dict[str, Any]) -> bool:
    results = content.get("results")
    return isinstance(results, list) and bool(results) and "gemm_ratio" in results[0]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _source(provenance: dict[str, Any]) -> str:
    machine, versions = provenance["machine"], provenance["versions"]
    where = machine["gpu"] or f"{machine['processor']}, {machine['torch_threads']} threads"
    load = machine.get("load")  # of other programs, as the run began
    busy = f", on a busy machine (load {load})" if load is not None and load >= 1 else ""
    return (
        f"{where}{busy}; torch {versions['torch']}, triton {versions.get('triton', 'none')}; "
        f"commit {provenance['commit']}; {provenance['date']}; `{provenance['command']}`"
    )


def speed_tables(kind: str) -> str:
    """One table per operation, each with where its figures come from."""
    found = load_kind(kind)
    if not found:
        return f"All speeds: {UNMEASURED}." if kind == "gpu" else "No CPU run is recorded."
    parts = []
    for operation, content in found.items():
        shape = content["results"][0]["shape"]
        title = (
            f"**{operation}** at N = {shape['rows']}, V = {shape['vocab']}, D = {shape['width']}, "
            f"K = {shape['k']}, {shape['dtype']}"
        )
        rows = [
            [
                result["implementation"],
                f"{result['seconds'] * 1e3:.1f} ms",
                _number(result["gemm_ratio"], ".2f", " ×"),
                _number(result["copy_share"], ".0%"),
                _number(_mib(result["peak_extra_bytes"]), ",.0f", " MiB"),
                "; ".join(x for x in (result["note"], result["checked"]) if x),
            ]
            for result in content["results"]
        ]
        head = ["implementation", "time", "bare GEMMs", "of copy rate", "extra memory", "notes"]
        absent = "; ".join(f"{a['implementation']}: {a['why']}" for a in content.get("absent", []))
        source = _source(content["provenance"]) + (f"\nNot measured: {absent}." if absent else "")
        parts.append(f"{title}\n\n{_table(head, rows)}\n\n{source}")
    return "\n\n".join(parts)


def _mib(size: int | None) -> float | None:
    return None if size is None else size / (1 << 20)


def rollout_table(kind: str) -> str:
    """Generated tokens per second of the engines, where they were recorded."""
    content = load(f"rollout.{kind}.json")
    if content is None:
        return ""
    rates: dict[str, dict[int, float]] = {}
    for result in content["results"]:
        rates.setdefault(result["implementation"], {})[result["requests"]] = result["tokens_per_s"]
    batches = sorted({n for by_batch in rates.values() for n in by_batch})
    rows = [
        [name, *(_number(by_batch.get(n), ",.0f") for n in batches)]
        for name, by_batch in rates.items()
    ]
    first = content["results"][0]
    title = (
        f"**rollout**: generated tokens/s of the embedded specialist, {first['prompt_tokens']} "
        f"tokens read and {first['new_tokens']} written per request"
    )
    table = _table(["engine", *(f"{n} requests" for n in batches)], rows)
    return f"{title}\n\n{table}\n\n{_source(content['provenance'])}"


def proof_table() -> str:
    """Registers, shared and local memory of every kernel, and bytes moved over the floor."""
    aot, counted = load("aot.json"), load("bytes.json")
    if aot is None:
        return "No ahead-of-time compilation is recorded."
    ratios = {e["case"]: e["ratio"] for e in counted["entries"]} if counted else {}
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in aot["entries"]:
        cases.setdefault((entry["case"], entry["kernel"]), []).append(entry)
    rows = []
    for (case, kernel), entries in cases.items():
        by_arch = {e["arch"]: e["reg"] for e in entries}
        rows.append(
            [
                case,
                f"`{kernel}`",
                " / ".join(str(by_arch[arch]) for arch in sorted(by_arch)),
                str(max(e["shared"] for e in entries)),
                str(max(e["local"] + e["stack"] for e in entries)),
                _number(ratios.get(case), ".3f"),
            ]
        )
    archs = " / ".join(f"sm_{arch}" for arch in sorted({e["arch"] for e in aot["entries"]}))
    head = ["launch", "kernel", f"registers {archs}", "shared B", "local B", "bytes / floor"]
    return f"{_table(head, rows)}\n\n{_source(aot['provenance'])}"


def reread_table() -> str:
    """How much of a row the selection reads after its statistics, by kind of row."""
    counted = load("bytes.json")
    if counted is None:
        return "What the selection reads again is not recorded."
    rows = [
        [
            f"{e['row']}, K = {e['k']}",
            f"{e['reread_share']:.1%}",
            "yes" if e["exact"] else "**no**",
        ]
        for e in counted["reread"]
    ]
    head = [f"row of V = {counted['reread'][0]['vocab']}", "read again by the selection", "exact"]
    return f"{_table(head, rows)}\n\n{_source(counted['provenance'])}"


def plot(path: Path) -> None:
    """Rooflines of the recorded machines with a point per measured implementation of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for kind, colour in (("cpu", "tab:blue"), ("gpu", "tab:green")):
        results = [r for content in load_kind(kind).values() for r in content["results"]]
        points = [
            r for r in results if r["flops"] and r["traffic"] and "cotutor" in r["implementation"]
        ]
        rates = [r["gemm_flops"] / r["gemm_seconds"] for r in results if r["gemm_seconds"]]
        if not points or not rates:
            continue
        copy, peak = max(r["copy_rate"] for r in results), max(rates)
        x = [0.1, peak / copy, 1e4]
        axes.loglog(x, [min(peak, copy * i) for i in x], color=colour, label=f"{kind}: copy, GEMM")
        for r in points:
            at = r["flops"] / r["traffic"], r["flops"] / r["seconds"]
            axes.plot(*at, "o", color=colour)
            axes.annotate(f"{r['operation']}: {r['implementation']}", at, fontsize=5)
    if not load_kind("gpu"):
        axes.set_title(UNMEASURED, fontsize=9)
    axes.set_xlabel("FLOP per byte of memory traffic")
    axes.set_ylabel("FLOP/s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("cpu", "gpu", "both"), default="both")
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    kinds = ("gpu", "cpu") if options.kind == "both" else (options.kind,)
    parts = [part(kind) for kind in kinds for part in (speed_tables, rollout_table)]
    text = "\n\n".join(filter(None, parts))
    if options.kind == "both":
        text += f"\n\n{proof_table()}\n\n{reread_table()}"
    if options.plot:
        plot(options.plot)
    if options.readme is None:
        print(text)
        return 0
    readme = options.readme.read_text()
    if BEGIN not in readme or END not in readme:
        print(f"{options.readme}: needs the lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    before, rest = readme.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    options.readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
