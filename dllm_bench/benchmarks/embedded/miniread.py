"""miniread: a short passage, a question and a short answer, made from a seed.

A passage says of three or four people where they live and what they have. Form "span" asks for
words of the passage, or for what it does not say (the answer is then ``unanswerable``), as SQuAD
2.0 does; form "count" asks who has more, for a sum, a difference or a number of people, as DROP
does. An answer first says what it looked up, who was asked for before what was found there. Bare
answers, and questions for the person of whom something is said, are beyond models of this size.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dllm_bench.benchmarks.embedded import generated as mini
from dllm_bench.benchmarks.embedded.minigsm import ITEMS, NAMES

UNANSWERABLE = "unanswerable"
MISSING_RATE = 0.2
"""How often a span question asks for what the passage does not say."""
SILENT_RATE = 0.4
"""How often a passage does not say where someone lives, or what someone has."""
COUNTS = (2, 20)
SIDES = ("near", "behind", "under", "beside")
SIZES = ("old", "new", "tall", "small")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
BUILDINGS = ("mill", "church", "bridge", "tower", "school", "market")
LIVES = ("{who} lives {place}.", "The home of {who} is {place}.")
HAS = ("{who} has {things}.", "{who} owns {things}.")
ASKED = {"place": "Where does {0} live?", "things": "What does {0} have?"}
"""What a span question is about."""


@dataclass(frozen=True)
class Person:
    """What a passage says of one person; `place` None where it says nothing, `count` 0 likewise."""

    who: str
    place: str | None
    count: int
    items: str

    @property
    def things(self) -> str | None:
        return f"{self.count} {self.items}" if self.count else None


Question = tuple[str, str, str]
"""(question, what is looked up for it, answer)"""


def span(rng: random.Random) -> mini.Problem:
    """One problem of form "span"."""
    return _draw(rng, _span, SILENT_RATE)


def count(rng: random.Random) -> mini.Problem:
    """One problem of form "count"; all have something."""
    return _draw(rng, _count, 0.0)


def _draw(
    rng: random.Random, ask: Callable[[random.Random, list[Person]], Question], silent: float
) -> mini.Problem:
    people = _people(rng, silent)
    question, work, answer = ask(rng, people)
    sentences = [sentence for person in people for sentence in _sentences(rng, person)]
    rng.shuffle(sentences)
    prompt = f"Passage: {' '.join(sentences)}\nQuestion: {question}\nAnswer:"
    content = "|".join([*sorted(map(repr, people)), question])
    answers = [] if answer == UNANSWERABLE else [answer]
    return mini.Problem(content, prompt, f"{work}.\n#### {answer}", {"answers": answers})


def _people(rng: random.Random, silent: float) -> list[Person]:
    """Three or four people who share two kinds of items; something is said of each."""
    kinds = rng.sample(ITEMS, 2)
    people = []
    for who in rng.sample(list(NAMES), rng.randint(3, 4)):
        place = None if rng.random() < SILENT_RATE else _place(rng)
        owns = place is None or rng.random() >= silent
        people.append(Person(who, place, rng.randint(*COUNTS) * owns, rng.choice(kinds)))
    return people


def _place(rng: random.Random) -> str:
    looks = rng.choice(((SIZES,), (COLORS,), (SIZES, COLORS)))
    words = [rng.choice(kind) for kind in (*looks, BUILDINGS)]
    return f"{rng.choice(SIDES)} the {' '.join(words)}"


def _sentences(rng: random.Random, person: Person) -> list[str]:
    said = [LIVES] * (person.place is not None) + [HAS] * (person.count > 0)
    facts = {"who": person.who, "place": person.place, "things": person.things}
    return [rng.choice(forms).format(**facts) for forms in said]


def _span(rng: random.Random, people: list[Person]) -> Question:
    """A question for a person's place or things, sometimes for what is not said."""
    about = rng.choice(list(ASKED))
    known = {p.who: str(getattr(p, about)) for p in people if getattr(p, about)}
    missing = rng.random() < MISSING_RATE
    fitting = [p.who for p in people if (p.who in known) != missing]
    who = rng.choice(fitting or [people[0].who])
    found = known.get(who, UNANSWERABLE)
    return ASKED[about].format(who), f"{who} {found}", found


def _count(rng: random.Random, people: list[Person]) -> Question:
    """A question about how many there are of one kind of items."""
    items = rng.choice([p.items for p in people])
    owners = [p for p in people if p.items == items]
    if len({p.count for p in owners}) < 2 or rng.random() < 0.2:
        named = " and ".join(p.who for p in owners)
        return f"How many people have {items}?", named, str(len(owners))
    one, other = rng.sample(owners, 2)
    less, more = sorted((one, other), key=lambda p: p.count)
    total, gap = one.count + other.count, more.count - less.count
    asked = f"How many {items} do {one.who} and {other.who} have together?"
    forms = [(asked, f"{_told(one, other)}. {one.count} + {other.count} = {total}", str(total))]
    if gap:
        asked = f"Who has more {items}, {one.who} or {other.who}?"
        forms.append((asked, _told(one, other), more.who))
        asked = f"How many more {items} does {more.who} have than {less.who}?"
        work = f"{_told(more, less)}. {more.count} - {less.count} = {gap}"
        forms.append((asked, work, str(gap)))
    return rng.choice(forms)


def _told(*people: Person) -> str:
    return ". ".join(f"{person.who} {person.count}" for person in people)
