"""Two fake runs that get stuck in two workers: `python -m tests.resume.parent ROOT LOG N`."""

import sys
from pathlib import Path

from dllm_bench.launch.local import run_all
from dllm_bench.store.store import Store
from tests.resume import fakes

if __name__ == "__main__":
    root, log, n = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    decoder = fakes.StuckDecoder(log=log)
    specs = [fakes.spec(n), fakes.spec(n + 1)]
    run_all(specs, store=Store(root), jobs=2, deps=fakes.deps(decoder=decoder))
