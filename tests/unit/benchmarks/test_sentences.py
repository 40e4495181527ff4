"""The benchmark `sentences`: every answer is right, worked out here from the prompt alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from dllm_bench.benchmarks.embedded import sentences

Right = Callable[[str, str], bool]
"""(prompt without its last line, answer) -> whether the answer is the one that was asked for."""


def shown(prompt: str) -> str:
    """Return the sentence that a prompt shows."""
    return prompt.partition("sentence: ")[2]


def named(prompt: str) -> list[str]:
    """Return the words that a prompt names."""
    return re.findall(r'"(\w+)"', prompt)


def replaced(prompt: str, answer: str) -> bool:
    old, new = named(prompt)
    words = shown(prompt).split(" ")
    place = words.index(old)
    return words.count(old) == 1 and answer.split(" ") == [*words[:place], new, *words[place + 1 :]]


def deleted(prompt: str, answer: str) -> bool:
    (word,) = named(prompt)
    words = shown(prompt).split(" ")
    words.remove(word)
    return word not in words and answer.split(" ") == words


def inserted(prompt: str, answer: str) -> bool:
    new, old = named(prompt)
    words = shown(prompt).split(" ")
    words.insert(words.index(old) + 1, new)
    return words.count(old) == 1 and answer.split(" ") == words


def mended(prompt: str, answer: str) -> bool:
    pairs = zip(shown(prompt).split(" "), answer.split(" "), strict=True)
    ((wrong, right),) = [(a, b) for a, b in pairs if a != b]
    (first, second) = [i for i in range(len(right)) if wrong[i] != right[i]]
    swapped = wrong[first] == right[second] and wrong[second] == right[first]
    return swapped and second == first + 1 and wrong[0] == right[0] and wrong[-1] == right[-1]


def ordered(prompt: str, answer: str) -> bool:
    parts = re.split(r"\((\d)\) ", prompt.partition("sentence: ")[2])[1:]
    pairs = sorted(zip(parts[::2], parts[1::2], strict=True))
    return answer == " ".join(part.strip() for _, part in pairs)


def found(prompt: str, answer: str) -> bool:
    passage = prompt.removeprefix("Passage: ").partition("\n")[0]
    (word,) = named(prompt)
    having = [one for one in re.split(r"(?<=\.) ", passage) if word in one.lower()]
    return having == [answer]


RIGHT: dict[str, Right] = {
    "repeat": lambda prompt, answer: answer == shown(prompt),
    "replace": replaced,
    "delete": deleted,
    "insert": inserted,
    "order": ordered,
    "find": found,
}


@pytest.mark.parametrize("kind", sentences.KINDS)
def test_every_answer_is_what_its_prompt_asks_for(kind: str) -> None:
    items = [item for item in sentences.TASK.items("test") if item["kind"] == kind]
    asked = [(item["prompt"].removesuffix("\nAnswer:"), item["answer"]) for item in items]
    if kind == "spelling":  # where no word can be misspelled, the sentence is to be repeated
        asked = [(prompt, answer) for prompt, answer in asked if not prompt.startswith("Repeat")]
        assert len(asked) > 0.9 * len(items)
    assert [pair for pair in asked if not RIGHT.get(kind, mended)(*pair)] == []


def test_kinds_are_about_equally_frequent_and_answers_are_single_lines() -> None:
    items = sentences.TASK.items("test")
    counts = Counter(item["kind"] for item in items)
    assert set(counts) == set(sentences.KINDS) and min(counts.values()) > 100
    assert all(
        item["answer"] == item["answer"].strip() and "\n" not in item["answer"] for item in items
    )


def test_no_sentence_of_the_test_split_is_shown_in_training() -> None:
    train = [problem.prompt for problem in sentences.TASK.problems("train", 2_000)]
    held_out = sentences.pool("test")
    assert len(held_out) > 400 and not set(held_out) & set(sentences.pool("train"))
    assert not [prompt for prompt in train if any(one in prompt for one in held_out)]


def test_the_sentences_ship_with_their_licence_and_are_small() -> None:
    licence = sentences.POOL.with_name("gsm8k_sentences.LICENSE").read_text()
    assert "MIT License" in licence and "OpenAI" in licence
    assert sentences.POOL.stat().st_size + sentences.TASK.frozen_file().stat().st_size < 200_000
