"""miniread: a short passage, a question about it and a short answer.

A passage says where three or four people live and what they have. The form "span" asks for words of
the passage, or for something it does not say (the answer is then ``unanswerable``), as SQuAD 2.0
does. The form "count" asks who has more, or for a sum, a difference or a number of people, as DROP
does. An answer first repeats the facts from the passage, the person before the place or thing, and
ends in ``#### X``. Answers without that step, and questions that give the place or thing and ask
for the person, are too hard for models of the embedded size. The content that decides the split is
the people and the question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import GeneratedProblem, GeneratedTask, text_problem
from scripts.embedded.tasks import from_draw
from scripts.embedded.tasks.minigsm import ITEMS, NAMES

UNANSWERABLE = "unanswerable"
MISSING_RATE = 0.2
"""How often a span question asks for something the passage does not say."""
SILENT_RATE = 0.4
"""How often a passage leaves out where a person lives, or what a person has."""
COUNTS = (2, 20)
"""Smallest and largest number of things a person has."""
SIDES = ("near", "behind", "under", "beside")
SIZES = ("old", "new", "tall", "small")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
BUILDINGS = ("mill", "church", "bridge", "tower", "school", "market")
LIVES = ("{who} lives {place}.", "The home of {who} is {place}.")
HAS = ("{who} has {things}.", "{who} owns {things}.")
SPAN_QUESTIONS = {"place": "Where does {0} live?", "things": "What does {0} have?"}
"""Field of `Person` -> the span question about it."""


@dataclass(frozen=True)
class Person:
    """What a passage says about one person."""

    who: str
    place: str | None
    """Where the person lives; None if the passage does not say."""
    count: int
    """How many `items` the person has; 0 if the passage does not say."""
    items: str

    @property
    def things(self) -> str | None:
        """Count and items as one text; None if the passage does not say."""
        return f"{self.count} {self.items}" if self.count else None


Question = tuple[str, str, str]
"""(question, what the answer repeats from the passage or works out, final answer)"""


def draw_span(rng: random.Random) -> GeneratedProblem:
    """Return one problem of the form "span"."""
    return _draw(rng, _span, SILENT_RATE)


def draw_count(rng: random.Random) -> GeneratedProblem:
    """Return one problem of the form "count"; the passage says of everyone what they have."""
    return _draw(rng, _count, 0.0)


SPAN = GeneratedTask("miniread", from_draw(draw_span))
COUNT = GeneratedTask("miniread_count", from_draw(draw_count))


def _draw(
    rng: random.Random,
    draw_question: Callable[[random.Random, list[Person]], Question],
    silent_rate: float,
) -> GeneratedProblem:
    people = _people(rng, silent_rate)
    question, work, answer = draw_question(rng, people)
    sentences = [sentence for person in people for sentence in _sentences(rng, person)]
    rng.shuffle(sentences)
    prompt = f"Passage: {' '.join(sentences)}\nQuestion: {question}\nAnswer:"
    # Names of `Person` and its fields enter the content: renaming one changes the splits.
    content = "|".join([*sorted(map(repr, people)), question])
    answers = [] if answer == UNANSWERABLE else [answer]
    return text_problem(content, prompt, f"{work}.\n#### {answer}", {"answers": answers})


def _people(rng: random.Random, silent_rate: float) -> list[Person]:
    """Return three or four people with two kinds of items among them; each has a place or items."""
    kinds = rng.sample(ITEMS, 2)
    people = []
    for who in rng.sample(list(NAMES), rng.randint(3, 4)):
        place = None if rng.random() < SILENT_RATE else _place(rng)
        owns = place is None or rng.random() >= silent_rate
        people.append(Person(who, place, rng.randint(*COUNTS) * owns, rng.choice(kinds)))
    return people


def _place(rng: random.Random) -> str:
    looks = rng.choice(((SIZES,), (COLORS,), (SIZES, COLORS)))
    words = [rng.choice(kind) for kind in (*looks, BUILDINGS)]
    return f"{rng.choice(SIDES)} the {' '.join(words)}"


def _sentences(rng: random.Random, person: Person) -> list[str]:
    forms = [LIVES] * (person.place is not None) + [HAS] * (person.count > 0)
    words = {"who": person.who, "place": person.place, "things": person.things}
    return [rng.choice(form).format(**words) for form in forms]


def _span(rng: random.Random, people: list[Person]) -> Question:
    """Return a question for a person's place or things, sometimes for what the passage does not
    say."""
    about = rng.choice(list(SPAN_QUESTIONS))
    known = {p.who: str(getattr(p, about)) for p in people if getattr(p, about)}
    missing = rng.random() < MISSING_RATE
    candidates = [p.who for p in people if (p.who in known) != missing]
    who = rng.choice(candidates or [people[0].who])
    answer = known.get(who, UNANSWERABLE)
    return SPAN_QUESTIONS[about].format(who), f"{who} {answer}", answer


def _count(rng: random.Random, people: list[Person]) -> Question:
    """Return a question about the people who have one kind of items."""
    items = rng.choice([p.items for p in people])
    owners = [p for p in people if p.items == items]
    if len({p.count for p in owners}) < 2 or rng.random() < 0.2:
        named = " and ".join(p.who for p in owners)
        return f"How many people have {items}?", named, str(len(owners))
    one, other = rng.sample(owners, 2)
    less, more = sorted((one, other), key=lambda p: p.count)
    total, gap = one.count + other.count, more.count - less.count
    question = f"How many {items} do {one.who} and {other.who} have together?"
    forms = [
        (question, f"{_counts(one, other)}. {one.count} + {other.count} = {total}", str(total))
    ]
    if gap:
        question = f"Who has more {items}, {one.who} or {other.who}?"
        forms.append((question, _counts(one, other), more.who))
        question = f"How many more {items} does {more.who} have than {less.who}?"
        work = f"{_counts(more, less)}. {more.count} - {less.count} = {gap}"
        forms.append((question, work, str(gap)))
    return rng.choice(forms)


def _counts(*people: Person) -> str:
    """Return names and numbers, as an answer repeats them from the passage."""
    return ". ".join(f"{person.who} {person.count}" for person in people)
