"""sentences: copy a real sentence, or change it in one way that has one right result.

The sentences are those of GSM8K's questions (train split, MIT licence in `pools/`). Seven kinds:
repeat it, replace a word, delete a word, insert a word, correct a spelling mistake, put its
numbered parts in order, and answer with the sentence of a passage that has a word. The hash of a
sentence decides its split, so no sentence of the test split is in a prompt of the train split.

open_text: continue, explain, ask or describe, in the model's own words; nothing is graded. Its
prompts hold one of the sentences or one of their words, whose hash decides the split.
"""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask, split_of, text_problem

POOL = Path(__file__).parent / "pools" / "gsm8k_sentences.txt.xz"
INNER_WORD = re.compile(r"(?<= )[a-z]{4,}(?= )")
"""A word that has a blank on both sides, so that removing it leaves a well-formed sentence."""
PASSAGE = 3  # sentences
PARTS = 3
SHORTEST_MISSPELLED = 5  # letters

Change = Callable[[random.Random, str, list[str]], tuple[str, str]]
"""(random stream, sentence, all sentences of the split) -> (prompt, answer)."""


@cache
def pool(split: str) -> list[str]:
    """Return the sentences of a split."""
    lines = lzma.decompress(POOL.read_bytes()).decode().splitlines()
    return [line for line in lines if split_of(line) == split]


@cache
def vocabulary(split: str) -> list[str]:
    """Return the words of a split that a change may put into a sentence, in the order of the
    alphabet."""
    return sorted({word for line in pool(split) for word in INNER_WORD.findall(line)})


def words_of(sentence: str) -> list[str]:
    """Return the words that a change may name: each occurs once, also as a part of other words."""
    return [word for word in INNER_WORD.findall(sentence) if sentence.lower().count(word) == 1]


def _repeat(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    return f"Repeat this sentence: {sentence}", sentence


def _replace(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    old, new = rng.choice(words_of(sentence)), _new_word(rng, sentence)
    prompt = f'Replace the word "{old}" with "{new}" in this sentence: {sentence}'
    return prompt, sentence.replace(old, new)


def _delete(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    word = rng.choice(words_of(sentence))
    prompt = f'Delete the word "{word}" from this sentence: {sentence}'
    return prompt, sentence.replace(f" {word} ", " ")


def _insert(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    word, new = rng.choice(words_of(sentence)), _new_word(rng, sentence)
    prompt = f'Insert the word "{new}" after the word "{word}" in this sentence: {sentence}'
    return prompt, sentence.replace(word, f"{word} {new}")


def _spell(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    """Return a spelling problem: two neighbouring letters inside of a word, except first and last,
    are swapped."""
    known = set(vocabulary(split_of(sentence)))
    wrong = [
        (word, swapped)
        for word in words_of(sentence)
        if len(word) >= SHORTEST_MISSPELLED
        for i in range(1, len(word) - 2)
        if (swapped := word[:i] + word[i + 1] + word[i] + word[i + 2 :]) not in {word} | known
    ]
    if not wrong:
        return _repeat(rng, sentence, others)
    shown = sentence.replace(*rng.choice(wrong))
    return f"Correct the misspelled word in this sentence: {shown}", sentence


def _order(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    words = sentence.split()
    cuts = [0, *sorted(rng.sample(range(1, len(words)), PARTS - 1)), len(words)]
    parts = [f"({i + 1}) {' '.join(words[cuts[i] : cuts[i + 1]])}" for i in range(PARTS)]
    shown = rng.sample(parts, PARTS)
    return f"Put these parts in order and write the sentence: {' '.join(shown)}", sentence


def _find(rng: random.Random, sentence: str, others: list[str]) -> tuple[str, str]:
    word = rng.choice(words_of(sentence))
    rest = [other for other in rng.sample(others, 4 * PASSAGE) if word not in other.lower()]
    passage = [sentence, *rest[: PASSAGE - 1]]
    rng.shuffle(passage)
    prompt = f'Passage: {" ".join(passage)}\nWhich sentence has the word "{word}"?'
    return prompt, sentence


def _new_word(rng: random.Random, sentence: str) -> str:
    words = vocabulary(split_of(sentence))
    return next(word for word in iter(lambda: rng.choice(words), None) if word not in sentence)


KINDS: dict[str, Change] = {
    "repeat": _repeat,
    "replace": _replace,
    "delete": _delete,
    "insert": _insert,
    "spelling": _spell,
    "order": _order,
    "find": _find,
}


OF_SENTENCES = {
    "continue": "Continue this story with two or three sentences: {}",
    "ask": "Write a question about this statement, and answer it: {}",
}
OF_WORDS = {
    "explain": 'Explain in two or three sentences what the word "{}" means.',
    "describe": 'Write a short description of a scene in which the word "{}" occurs.',
}
FORMS = {**OF_SENTENCES, **OF_WORDS}
"""Kind of `open_text` -> the prompt."""


def _changes(
    rng: random.Random, split: str, kinds: Sequence[str] = tuple(KINDS)
) -> Iterator[GeneratedProblem]:
    sentences = pool(split)
    while True:
        kind, sentence = rng.choice(kinds), rng.choice(sentences)
        prompt, answer = KINDS[kind](rng, sentence, sentences)
        yield text_problem(sentence, f"{prompt}\nAnswer:", answer, {"kind": kind})


def _open_prompts(rng: random.Random, split: str) -> Iterator[GeneratedProblem]:
    sentences = pool(split)
    every = sorted({*vocabulary("train"), *vocabulary("test")})
    words = [word for word in every if split_of(word) == split]
    while True:
        kind = rng.choice(list(FORMS))
        content = rng.choice(words if kind in OF_WORDS else sentences)
        prompt = FORMS[kind].format(content)
        yield GeneratedProblem(content, prompt, "", {"prompt": prompt, "kind": kind})


TASK = GeneratedTask("sentences", _changes)
SPELLING = GeneratedTask("sentences", partial(_changes, kinds=("spelling",)))
"""The kind that needs most examples, to be learned beside the others."""
OPEN_TEXT = GeneratedTask("open_text", _open_prompts)
