"""Entry point: `python -m dllm_bench` and the console script `dllm-bench` are the same command.

Kept apart from `cli` so that a worker process can import `dllm_bench.cli.main` under its real name.
"""

from __future__ import annotations

import sys

from dllm_bench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
