"""`make perf`: measure the decoding loops and store the results, with a history.

    .venv/bin/python -m scripts.perf [--quick] [--parts a,b,...] [--dry] [--out results/perf]

Writes one JSON file per call and appends a line to `history.jsonl`. With one thread on the CPU,
times are CPU time of the process; otherwise wall time, which needs an idle machine. The machine's
load is stored with the results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dllm_bench.site.texts import align
from dllm_bench.store.provenance import environment
from scripts.perf import device, measures

PARTS = {
    "split": "milliseconds per step: forward, score, select, bookkeeping",
    "speculative": "milliseconds per round of draft and verification",
    "ratio": "steps per second, compared with a plain loop",
    "batch": "requests per second, unbatched and batched",
    "memory": "peak memory in addition to the model",
    "growth": "milliseconds per step without the forward, by what may make it grow",
    "kernel": "the Triton kernel that reads the logits on a CUDA device, compared with torch",
    "device": "a model of 7B shape on a CUDA device, compared with its roofline",
}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.perf", description="Measure the decoding loop."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and cases; takes about a minute"
    )
    parser.add_argument("--parts", default="all", help=f"some of {', '.join(PARTS)}, with commas")
    parser.add_argument(
        "--dry", action="store_true", help="parts device and kernel: a small case on the CPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/perf"), help="folder of the files"
    )
    args = parser.parse_args(argv)
    args.parts = list(PARTS) if args.parts == "all" else args.parts.split(",")
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; choose some of {', '.join(PARTS)}")
    return args


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a text table."""
    if not rows:
        return "  nothing to measure on this machine"
    names = list(rows[0] | rows[-1])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"  {line}".rstrip() for line in align(cells))


def _cell(value: Any) -> str:
    """Return a value as text; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one part."""
    size = measures.QUICK if args.quick else measures.Size()
    if part == "device":
        return device.rounds(args.dry, args.quick)
    if part == "kernel":
        return device.reads(args.dry)
    functions = {
        "split": measures.splits,
        "speculative": measures.speculative,
        "ratio": measures.ratios,
        "batch": measures.batches,
        "memory": measures.memory,
        "growth": measures.growth,
    }
    return functions[part](size)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, store."""
    args = options(argv)
    torch.set_num_threads(args.threads)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"at": time.time(), "quick": args.quick, "parts": {}}
    report["environment"] = environment(kind)
    for part in args.parts:
        started = time.perf_counter()
        report["parts"][part] = measure(part, args)
        seconds = time.perf_counter() - started
        print(f"\n{PARTS[part]} ({seconds:.0f} s)\n{table(report['parts'][part])}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / time.strftime("%Y%m%d-%H%M%S.json", time.localtime(report["at"]))
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    with (args.out / "history.jsonl").open("a") as history:
        history.write(json.dumps(report, ensure_ascii=False) + "\n")
    print(f"\nstored in {path}")


if __name__ == "__main__":
    main()
