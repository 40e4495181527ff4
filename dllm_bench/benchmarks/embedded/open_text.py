"""open_text: continue, explain, ask or describe, in the model's own words; nothing is graded.

The prompts are made of the sentences of `sentences`, or of one of their words. The hash of either
decides the split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from dllm_bench.benchmarks.embedded.generated import GeneratedProblem, GeneratedTask, split_of
from dllm_bench.benchmarks.embedded.sentences import pool, vocabulary

OF_SENTENCES = {
    "continue": "Continue this story with two or three sentences: {}",
    "ask": "Write a question about this statement, and answer it: {}",
}
OF_WORDS = {
    "explain": 'Explain in two or three sentences what the word "{}" means.',
    "describe": 'Write a short description of a scene in which the word "{}" occurs.',
}
FORMS = {**OF_SENTENCES, **OF_WORDS}
"""Kind -> the prompt."""


def _stream(rng: random.Random, split: str) -> Iterator[GeneratedProblem]:
    sentences = pool(split)
    every = sorted({*vocabulary("train"), *vocabulary("test")})
    words = [word for word in every if split_of(word) == split]
    while True:
        kind = rng.choice(list(FORMS))
        content = rng.choice(words if kind in OF_WORDS else sentences)
        prompt = FORMS[kind].format(content)
        yield GeneratedProblem(content, prompt, "", {"prompt": prompt, "kind": kind})


TASK = GeneratedTask("open_text", _stream)
