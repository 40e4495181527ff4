"""Write the pool of sentences of the benchmark `sentences` from GSM8K's questions.

    .venv/bin/python -m scripts.embedded.sentences GSM8K_TRAIN.jsonl

Only after a change that is meant to change the sentences: then scripts.embedded.items sentences.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dllm_bench.benchmarks.embedded import POOL, words_of

COUNT, WORDS = 4_000, range(7, 17)
PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,'$%-]+\.")
END = re.compile(r"(?<=[.?])\s+")


def sentences(file: Path) -> Iterator[str]:
    """Plain statements in which a word can be named, in the order of the file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        for sentence in END.split(json.loads(line)["question"].strip()):
            if PLAIN.fullmatch(sentence) and len(sentence.split()) in WORDS and words_of(sentence):
                yield sentence


def write(file: Path) -> None:
    """Write the first `COUNT` different sentences."""
    kept = list(dict.fromkeys(sentences(file)))[:COUNT]
    text = "".join(f"{sentence}\n" for sentence in kept)
    POOL.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(kept)} sentences, {POOL.stat().st_size:,} bytes")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
