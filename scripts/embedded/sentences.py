"""Write the pool of sentences of the benchmark `sentences` from GSM8K's questions, and the words
that training on it misspells from the vocabulary of SmolLM2.

    .venv/bin/python -m scripts.embedded.sentences GSM8K_TRAIN.jsonl
    .venv/bin/python -m scripts.embedded.sentences imported/smollm2/tokenizer.json

Only after a change that is meant to change the sentences: then scripts.embedded.items sentences.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dllm_bench.benchmarks.embedded import POOL, SHORTEST_MISSPELLED, WORDS, words_of

COUNT, SIZES = 4_000, range(7, 17)
PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,'$%-]+\.")
AFTER_BLANK = "Ġ"  # begins a piece that follows a blank
END = re.compile(r"(?<=[.?])\s+")


def sentences(file: Path) -> Iterator[str]:
    """Plain statements in which a word can be named, in the order of the file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        for sentence in END.split(json.loads(line)["question"].strip()):
            if PLAIN.fullmatch(sentence) and len(sentence.split()) in SIZES and words_of(sentence):
                yield sentence


def words(file: Path) -> Iterator[str]:
    """The words among the pieces of a tokenizer; some are the first parts of longer words."""
    word = re.compile(f"{AFTER_BLANK}([a-z]{{{SHORTEST_MISSPELLED},}})")
    pieces = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    return (match[1] for piece in sorted(pieces) if (match := word.fullmatch(piece)))


def write(lines: Iterator[str], out: Path, count: int | None = None) -> None:
    """Write the first `count` different lines, or all."""
    kept = list(dict.fromkeys(lines))[:count]
    text = "".join(f"{line}\n" for line in kept)
    out.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(kept)} lines, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    given = Path(sys.argv[1])
    if given.suffix == ".jsonl":
        write(sentences(given), POOL, COUNT)
    else:
        write(words(given), WORDS)
