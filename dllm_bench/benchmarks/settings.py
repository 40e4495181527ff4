"""The settings of a benchmark's configuration group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from dllm_bench.core.declared import Positive, Range
from dllm_bench.registry import RUNTIME


@dataclass(frozen=True, eq=False, kw_only=True)
class BenchmarkSettings:
    """Settings of benchmarks; one that has no use for a setting does not take it."""

    name: str
    """Name in records and tables."""
    max_new_tokens: Positive
    primary: str = ""
    """The metric that counts, as "<metric>,<filter>" of a task file."""
    shots: Annotated[int, Range(0, 1000)] = 0
    template: str = "plain"
    """How prompts are written."""
    chat: bool = True
    """Whether the model takes chat turns; if not, prompts are plain whatever `template` says."""
    stop: Sequence[str] = ()
    """Strings that end a text unless `escape_until` is set."""
    hard_stop: Sequence[str] = ()
    """Strings that always end a text."""
    escape_until: bool = False
    """Use the whole budget of new tokens: only `hard_stop` ends a text."""
    split: str = "test"
    repeats: Annotated[int, Range(1, 1024)] = 1
    """How many samples each item gets (avg@k, pass@k)."""
    data_dir: str | None = field(default=None, metadata=RUNTIME)
    """Directory of original files; None reads from the hub or its cache."""
    allow_code_execution: bool = field(default=False, metadata=RUNTIME)
    """Consent to run programs that a model wrote; without it there is no run."""
