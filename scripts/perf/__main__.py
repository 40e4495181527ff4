"""`make perf`: measure the decoding loop and store what was found, with a history.

    .venv/bin/python -m scripts.perf [--quick] [--parts a,b,...] [--dry] [--out results/perf]

Writes one JSON per call and a line of `history.jsonl`; nothing is judged here. Times are CPU time
where one thread computes, else wall time, which wants a quiet machine; the load is stored beside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dllm_bench.store.provenance import environment
from scripts.perf import batch, device, kernel, measures

PARTS = {
    "split": "milliseconds per step: forward, score, select, bookkeeping",
    "speculative": "milliseconds per round of draft and verify",
    "ratio": "steps per second beside a plain loop",
    "batch": "requests per second, one at a time and in a batch",
    "memory": "most memory beyond the model",
    "growth": "milliseconds per step without the forward",
    "kernel": "one read of the logits on a CUDA device, beside torch's passes",
    "device": "a 7B shape on a CUDA device, beside its roofline",
}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.perf", description="Measure the decoding loop."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases: a minute")
    parser.add_argument("--parts", default="all", help=f"of {', '.join(PARTS)}, by commas")
    parser.add_argument(
        "--dry", action="store_true", help="device, kernel: something small on the CPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("results/perf"), help="folder of the JSON")
    asked = parser.parse_args(argv)
    asked.parts = list(PARTS) if asked.parts == "all" else asked.parts.split(",")
    unknown = sorted(set(asked.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; choose of {', '.join(PARTS)}")
    return asked


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "  nothing to measure here"
    names = list(rows[0]) + [name for name in rows[-1] if name not in rows[0]]
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one part."""
    size = measures.QUICK if asked.quick else measures.Size()
    if part == "device":
        return device.rounds(asked.dry, asked.quick)
    if part == "kernel":
        return kernel.reads(asked.dry)
    functions = {
        "split": measures.splits,
        "speculative": measures.speculative,
        "ratio": measures.ratios,
        "batch": batch.batches,
        "memory": measures.memory,
        "growth": measures.growth,
    }
    return functions[part](size)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, store."""
    asked = options(argv)
    torch.set_num_threads(asked.threads)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"at": time.time(), "quick": asked.quick, "parts": {}}
    report["environment"] = environment(kind)
    for part in asked.parts:
        begun = time.perf_counter()
        report["parts"][part] = measure(part, asked)
        seconds = time.perf_counter() - begun
        print(f"\n{PARTS[part]} ({seconds:.0f} s)\n{table(report['parts'][part])}", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / time.strftime("%Y%m%d-%H%M%S.json", time.localtime(report["at"]))
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    with (asked.out / "history.jsonl").open("a") as history:
        history.write(json.dumps(report, ensure_ascii=False) + "\n")
    print(f"\nstored in {path}")


if __name__ == "__main__":
    main()
