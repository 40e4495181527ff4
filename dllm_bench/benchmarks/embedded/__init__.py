"""The embedded tasks' items, which are read from files, the interface of their generators, and the
tasks made of sentences.

To add a task, write a function that draws one `GeneratedProblem` from a random stream, wrap it as
`TASK = GeneratedTask("name", from_draw(draw))` in `scripts/embedded/tasks`, list it in
`scripts/embedded/items.py`, which writes the files, and its name in `EMBEDDED` of
`tasks/sources.py`, and add its task file (`tasks/NAME.yaml`) and its configuration
(`conf/benchmark/NAME.yaml`).

The split of a problem is decided by a hash of its content (the question, without its wording), so
the train and test splits never share a problem, for any seed. Within a split no prompt occurs
twice. A run's identity contains the hash of the file with its items. The splits `unseen` and
`later` contain the test problems drawn after the test items, for confirming claims on new items;
`train` gives few-shot examples.

The tasks made of sentences are drawn here, since training draws from them without end. `sentences`:
copy a real sentence, or change it in one way that has one right result. The sentences are those of
GSM8K's questions (train split, MIT licence in `pools/`). Seven kinds: repeat it, replace a word,
delete a word, insert a word, correct a spelling mistake, put its numbered parts in order, and
answer with the sentence of a passage that has a word. The hash of a sentence decides its split, so
no sentence of the test split is in a prompt of the train split. `open_text`: continue, explain, ask
or describe, in the model's own words; nothing is graded. Its prompts hold one of the sentences or
one of their words, whose hash decides the split.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError

FROZEN = Path(__file__).parent / "items"
TEXTS = Path(__file__).parent / "texts"
SPLITS = (TRAIN := "train", TEST := "test", UNSEEN := "unseen", LATER := "later")
TEST_ONE_IN = 8
"""One problem in this many belongs to the test split (by the hash of its content)."""
SPLIT_SIZE = 1000
"""Items of `test` and `train`; training draws as many problems as it needs instead."""
HELD_OUT = {TEST: range(SPLIT_SIZE), UNSEEN: range(SPLIT_SIZE, 1200), LATER: range(1200, 1700)}
"""Split -> which of the test problems it has, in the order in which they are drawn."""
MOST_REPEATS = 100_000
"""Known prompts drawn one after the other, after which a stream has no others."""


@dataclass(frozen=True)
class GeneratedProblem:
    """One problem with its gold answer."""

    content: str
    """The question without its wording; the hash of this text decides the split."""
    prompt: str
    """The whole plain prompt."""
    continuation: str
    """The gold answer as it follows the prompt, a leading space included."""
    fields: Mapping[str, Any]
    """Fields of the item: what the harness builds the prompt from and grades with."""


Stream = Callable[[random.Random, str], Iterator[GeneratedProblem]]
"""(random stream, split) -> endless problems of that split; a prompt may come twice."""


@dataclass(frozen=True)
class FrozenTask:
    """A named set of items, stored in a file for each split."""

    name: str
    """Prefix of the item ids and of the files."""
    splits: tuple[str, ...] = field(default=SPLITS, kw_only=True)
    """The names that `items` takes."""

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the items of a split, each a plain dictionary with a stable `id`."""
        return read_lines(self.frozen_file(split))

    def frozen_file(self, split: str = TEST) -> Path:
        """Return the file of a split's items: a JSON object a line, compressed by xz."""
        name = self.name.replace("/", "-")
        return FROZEN / f"{name}{'' if split == TEST else '-' + split}.jsonl.xz"

    def items_hash(self, split: str) -> str | None:
        """Return the sha256 of the file with a split's items; None for `train`, whose items enter
        a run's identity themselves.
        """
        if split == TRAIN:
            return None
        return hashlib.sha256(self.frozen_file(split).read_bytes()).hexdigest()


@dataclass(frozen=True)
class GeneratedTask(FrozenTask):
    """A set whose problems can be drawn, which the frozen items were."""

    stream: Stream
    """Where the problems come from. The name is part of the seed."""

    def problems(self, split: str, limit: int, seed: int = 0) -> Iterator[GeneratedProblem]:
        """Yield `limit` problems with distinct prompts; a larger limit extends the same list.

        Raises ValueError for an unknown split; DllmBenchError if the stream has no `limit` prompts.
        """
        if split not in (TRAIN, TEST):
            raise ValueError(f"{self.name} has the splits 'train' and 'test', not {split!r}")
        seen, repeats = set[str](), 0
        for problem in self.stream(random.Random(f"{self.name}/{split}/{seed}"), split):
            if len(seen) >= limit:
                return
            repeats = repeats + 1 if problem.prompt in seen else 0
            if not repeats:
                seen.add(problem.prompt)
                yield problem
            elif repeats == MOST_REPEATS:
                raise DllmBenchError(
                    f"{limit} prompts of {self.name} were asked for, and its {split} split has no "
                    f"more than {len(seen)} different ones; ask for fewer."
                )

    def items(self, split: str) -> list[dict[str, Any]]:
        """Return the items of a split. Those of `train` are drawn, the others read from a file."""
        return self.draw_items(split) if split == TRAIN else super().items(split)

    def draw_items(self, split: str, limit: int = SPLIT_SIZE) -> list[dict[str, Any]]:
        """Draw the first `limit` items of a split, which `items` returns of the frozen ones.

        Held-out splits share no prompt, since each continues the list of the one before.
        """
        places = HELD_OUT.get(split, range(limit))
        drawn = self.problems(TEST if split in HELD_OUT else split, places.stop)
        problems = islice(drawn, places.start, places.start + limit)
        return [{"id": f"{self.name}/{split}/{i}", **p.fields} for i, p in enumerate(problems)]


def texts_file(task: str) -> Path:
    """Return the file with a task's texts for training: [prompt, answer] a line."""
    return TEXTS / f"{task}.jsonl.xz"


def read_lines(file: Path) -> list[Any]:
    """Return what the lines of a compressed file hold, each in JSON."""
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]


def split_of(content: str) -> str:
    """Return the split that a problem with this content belongs to."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_ONE_IN == 0 else "train"


def text_problem(
    content: str, prompt: str, answer: str, grading: Mapping[str, Any]
) -> GeneratedProblem:
    """Return a problem whose item holds `prompt`, `answer` and the fields only a grader reads."""
    fields = {"prompt": prompt, "answer": answer, **grading}
    return GeneratedProblem(content, prompt, f" {answer}", fields)


# --- sentences ------------------------------------------------------------------------------------


POOL = Path(__file__).parent / "pools" / "gsm8k_sentences.txt.xz"
WORDS = POOL.with_name("smollm2_words.txt.xz")
INNER_WORD = re.compile(r"(?<= )[a-z]{4,}(?= )")
"""A word that has a blank on both sides, so that removing it leaves a well-formed sentence."""
PASSAGE = 3  # sentences
PARTS = 3
SHORTEST_MISSPELLED = 5  # letters
_SPELL = "Correct the misspelled word in this sentence: "

Change = Callable[[random.Random, str], tuple[str, str]]
"""(random stream, sentence) -> (prompt, answer)."""


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


@cache
def common_words() -> list[str]:
    """Return common words of English, which training alone reads."""
    return lzma.decompress(WORDS.read_bytes()).decode().split()


def words_of(sentence: str) -> list[str]:
    """Return the words that a change may name: each occurs once, also as a part of other words."""
    return [word for word in INNER_WORD.findall(sentence) if sentence.lower().count(word) == 1]


def _repeat(rng: random.Random, sentence: str) -> tuple[str, str]:
    return f"Repeat this sentence: {sentence}", sentence


def _replace(rng: random.Random, sentence: str) -> tuple[str, str]:
    old, new = rng.choice(words_of(sentence)), _new_word(rng, sentence)
    prompt = f'Replace the word "{old}" with "{new}" in this sentence: {sentence}'
    return prompt, sentence.replace(old, new)


def _delete(rng: random.Random, sentence: str) -> tuple[str, str]:
    word = rng.choice(words_of(sentence))
    prompt = f'Delete the word "{word}" from this sentence: {sentence}'
    return prompt, sentence.replace(f" {word} ", " ")


def _insert(rng: random.Random, sentence: str) -> tuple[str, str]:
    word, new = rng.choice(words_of(sentence)), _new_word(rng, sentence)
    prompt = f'Insert the word "{new}" after the word "{word}" in this sentence: {sentence}'
    return prompt, sentence.replace(word, f"{word} {new}")


def _spell(rng: random.Random, sentence: str) -> tuple[str, str]:
    """Return a spelling problem: a word of the sentence is misspelled."""
    known = set(vocabulary(split_of(sentence)))
    wrong = [(word, form) for word in words_of(sentence) for form in _misspelled(word, known)]
    if not wrong:
        return _repeat(rng, sentence)
    return _SPELL + sentence.replace(*rng.choice(wrong)), sentence


def _spell_many(rng: random.Random, sentence: str) -> tuple[str, str]:
    """Return a spelling problem for training alone: first any words take the place of some words of
    the sentence, then some words are misspelled in the prompt."""
    words = vocabulary(split_of(sentence))
    known, shown, right = set(words), sentence.split(" "), sentence.split(" ")
    for place, word in enumerate(right):
        if _misspelled(word, known):
            right[place] = rng.choice(rng.choice([[word], words, common_words()]))
            shown[place] = rng.choice([right[place], *_misspelled(right[place], known)])
    return _SPELL + " ".join(shown), " ".join(right)


def _misspelled(word: str, known: Set[str]) -> list[str]:
    """Return the misspellings of a word: two neighbours among its inner letters are swapped, and no
    known word results. A short word, or one with other than small letters, has none."""
    if not (word.isalpha() and word.islower() and len(word) >= SHORTEST_MISSPELLED):
        return []
    forms = (word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(1, len(word) - 2))
    return [form for form in forms if form not in {word} | known]


def _order(rng: random.Random, sentence: str) -> tuple[str, str]:
    words = sentence.split()
    cuts = [0, *sorted(rng.sample(range(1, len(words)), PARTS - 1)), len(words)]
    parts = [f"({i + 1}) {' '.join(words[cuts[i] : cuts[i + 1]])}" for i in range(PARTS)]
    shown = rng.sample(parts, PARTS)
    return f"Put these parts in order and write the sentence: {' '.join(shown)}", sentence


def _find(rng: random.Random, sentence: str) -> tuple[str, str]:
    word = rng.choice(words_of(sentence))
    others = rng.sample(pool(split_of(sentence)), 4 * PASSAGE)
    rest = [other for other in others if word not in other.lower()]
    passage = [sentence, *rest[: PASSAGE - 1]]
    rng.shuffle(passage)
    prompt = f'Passage: {" ".join(passage)}\nWhich sentence has the word "{word}"?'
    return prompt, sentence


def _new_word(rng: random.Random, sentence: str) -> str:
    words = vocabulary(split_of(sentence))
    return next(word for word in iter(lambda: rng.choice(words), None) if word not in sentence)


CHANGES: dict[str, Change] = {
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
    rng: random.Random, split: str, changes: Mapping[str, Change] = CHANGES
) -> Iterator[GeneratedProblem]:
    sentences, kinds = pool(split), list(changes)
    while True:
        kind, sentence = rng.choice(kinds), rng.choice(sentences)
        prompt, answer = changes[kind](rng, sentence)
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


SENTENCES = GeneratedTask("sentences", _changes)
SPELLING = GeneratedTask("sentences", partial(_changes, changes={"spelling": _spell}))
MISSPELLED = GeneratedTask("sentences", partial(_changes, changes={"spelling": _spell_many}))
"""The kind that needs most examples, for training: with one misspelled word a text, or many."""
OPEN_TEXT = GeneratedTask("open_text", _open_prompts)
