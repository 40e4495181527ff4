"""Make one slow fake run in a process of its own: `python -m tests.resume.child ROOT LOG N`."""

import sys
from pathlib import Path

from dllm_bench.runs.runner import run
from dllm_bench.store.store import Store
from tests.resume import fakes

if __name__ == "__main__":
    root, log, n = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    decoder = fakes.FakeDecoder(log=log, pause_s=0.02)
    run(fakes.spec(n), store=Store(root), deps=fakes.deps(decoder=decoder))
