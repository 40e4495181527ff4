"""Keep tokenizers of model objects in this user's cache directory, so that reports can show texts.

A model that exists only as an object has no file, but other processes read its runs. Its tokenizer
is found by the hash that its runs store as an input.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import user_folder
from dllm_bench.store.files import write_atomic
from dllm_bench.store.nolinks import is_file

SHA256 = re.compile(r"[0-9a-f]{64}")


def kept_tokenizer(sha256: object) -> Path | None:
    """Return the folder of the tokenizer with this hash; None if it is not a hash."""
    is_hash = isinstance(sha256, str) and SHA256.fullmatch(sha256)
    return user_folder() / "tokenizers" / str(sha256) if is_hash else None


def keep_tokenizer(tokenizer: Any, sha256: object) -> None:
    """Write a tokenizer as tokenizer.json; one without that form is skipped."""
    folder, backend = kept_tokenizer(sha256), getattr(tokenizer, "backend_tokenizer", None)
    if folder is None or backend is None or is_file(folder / "tokenizer.json"):
        return
    with suppress(DllmBenchError):  # then ids are shown
        write_atomic(folder / "tokenizer.json", backend.to_str())
