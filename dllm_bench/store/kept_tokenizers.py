"""Tokenizers of model objects, kept in this user's folder of caches so that reports show texts.

A model that exists only as an object is in no file, and its runs are read by other processes. Its
tokenizer is found by the hash that its runs hold as an input.
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
    """The folder of the tokenizer that has a hash; None for what is no hash."""
    is_hash = isinstance(sha256, str) and SHA256.fullmatch(sha256)
    return user_folder() / "tokenizers" / str(sha256) if is_hash else None


def keep_tokenizer(tokenizer: Any, sha256: object) -> None:
    """Write a tokenizer as tokenizer.json; one without such a form is left out."""
    folder, backend = kept_tokenizer(sha256), getattr(tokenizer, "backend_tokenizer", None)
    if folder is None or backend is None or is_file(folder / "tokenizer.json"):
        return
    with suppress(DllmBenchError):  # then ids are shown
        write_atomic(folder / "tokenizer.json", backend.to_str())
