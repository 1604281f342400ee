"""Tasks whose answers stand in the context: made facts between paragraphs of real text, from seeds.

An item is drawn from its task, its number and the seed alone, so that an interrupted run goes on with the same items.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvloom_eval.text import NAME, functions, some_paragraphs

CHOICES = 8
_DOCUMENTS = 8
_PEOPLE = 8
_PAIRS = 12
_NEEDLES = 8
_ASKED = 4
_FUNCTIONS = 4
_TURN = 12
"""Tokens that a chat template puts around what a user and an assistant say."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Alice Bruno Carla David Elena Felix Greta Henry Irene Jonas Karen Louis Maria Nadia Oscar Paula Robert "
    "Sofia Tomas Vera Walter Xenia Yusuf Zoe"
)
CITIES = _words(
    "Athens Berlin Cairo Dublin Geneva Havana Istanbul Jakarta Kyoto Lisbon Madrid Nairobi Oslo Paris Quito "
    "Rome Sydney Tokyo Vienna Warsaw Zagreb Boston Chicago Denver"
)
JOBS = _words(
    "baker carpenter dentist electrician farmer gardener historian inspector judge librarian mechanic nurse "
    "optician painter pilot plumber sailor singer surgeon tailor teacher translator"
)
ANIMALS = _words(
    "badger camel dolphin eagle falcon giraffe hamster jaguar koala lizard monkey otter parrot rabbit tiger"
)
COLOURS = _words("amber black blue brown coral gold green grey indigo orange pink purple red silver white yellow")
THINGS = _words(
    "anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror needle table"
)
RELATIVES = ("sister", "brother", "neighbour", "teacher", "cousin", "uncle", "aunt", "boss")


@dataclass(frozen=True, slots=True)
class Question:
    ask: str
    lead: str
    """The beginning of the answer; a choice follows it, and the choice is what is scored."""
    choices: tuple[str, ...]
    """Each begins with a space."""
    right: int
    """The index of the right choice."""


@dataclass(frozen=True, slots=True)
class Item:
    """A context and questions about it."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    turns: tuple[tuple[str, str], ...] = ()
    """For a conversation, in place of documents: what a user and an assistant said in turn."""


@dataclass(frozen=True, slots=True)
class Room:
    """The size that an item should have."""

    tokens: int
    """Maximum tokens of all documents or turns together."""
    count: Callable[[str], int]
    """The number of tokens of a text."""


def needle(chance: random.Random, room: Room) -> Item:
    """One number in real text; the other choices are the same digits in other orders, which a worn number becomes."""
    city = chance.choice(CITIES)
    digits = "".join(chance.sample("123456789", 5))
    others: list[str] = []
    while len(others) < CHOICES - 1:
        swapped = list(digits)
        one, other = chance.sample(range(5), 2)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        if (made := "".join(swapped)) not in others:
            others.append(made)
    fact = f"The magic number of {city} is {digits}."
    asked = _question(chance, f"What is the magic number of {city}?", f"The magic number of {city} is", digits, others)
    return Item(_spread(chance, room, [fact]), (asked,))


def multi_needle(chance: random.Random, room: Room) -> Item:
    """Numbers of several cities; the other choices are the numbers of the other cities."""
    cities = chance.sample(CITIES, _NEEDLES)
    numbers = [str(each) for each in chance.sample(range(10_000, 100_000), _NEEDLES)]
    facts = [f"The magic number of {city} is {number}." for city, number in zip(cities, numbers, strict=True)]
    asked = chance.sample(range(_NEEDLES), _ASKED)
    questions = tuple(
        _among(
            chance, f"What is the magic number of {cities[at]}?", f"The magic number of {cities[at]} is", numbers, at
        )
        for at in asked
    )
    return Item(_spread(chance, room, facts), questions)


def key_value(chance: random.Random, room: Room) -> Item:
    """A table of keys and values in parts, with real text between; the other choices are other keys' values."""
    keys, values = chance.sample(COLOURS, _PAIRS), chance.sample(THINGS, _PAIRS)
    lines = [f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True)]
    tables = ["{" + ", ".join(lines[at : at + 4]) + "}" for at in range(0, _PAIRS, 4)]
    questions = tuple(
        _among(chance, f'What is the value of the key "{keys[at]}"?', f'"{keys[at]}": "',
               values, at, space=False)
        for at in chance.sample(range(_PAIRS), _ASKED)
    )  # fmt: skip
    return Item(_spread(chance, room, tables), questions)


def multi_document(chance: random.Random, room: Room) -> Item:
    """A document for each person; questions need one of them."""
    people, documents = _people(chance, room)
    questions = []
    for at in chance.sample(range(_PEOPLE), _ASKED):
        ask, lead, field = chance.choice(
            [
                ("Which city is the home of {}?", "The home of {} is", "city"),
                ("What is the profession of {}?", "The profession of {} is", "job"),
                ("What is the pet of {}?", "The pet of {} is a", "animal"),
            ]
        )
        name = people[at]["name"]
        questions.append(_among(chance, ask.format(name), lead.format(name), [each[field] for each in people], at))
    return Item(documents, tuple(questions))


def two_documents(chance: random.Random, room: Room) -> Item:
    """The same documents; questions need two of them."""
    people, documents = _people(chance, room)
    names = [each["name"] for each in people]
    questions = []
    for at in chance.sample(range(_PEOPLE), _ASKED):
        friend = names.index(people[at]["friend"])
        ask = f"Which city is the home of the best friend of {names[at]}?"
        lead = f"The home of the best friend of {names[at]} is"
        questions.append(_among(chance, ask, lead, [each["city"] for each in people], friend))
    return Item(documents, tuple(questions))


def recall(chance: random.Random, room: Room) -> Item:
    """A conversation of many turns; asked is what was said long ago."""
    cities = chance.sample(CITIES, CHOICES)
    facts = [f"The home of my {who} is {city}." for who, city in zip(RELATIVES, cities, strict=True)]
    order = chance.sample(facts, len(facts))
    thanks, please, done = "Thank you, I will remember that.", "Please read this: ", "I have read it."
    cost = sum(room.count(each) + room.count(thanks) + _TURN for each in order)
    extra = room.count(please) + room.count(done) + _TURN
    turns = [(each, thanks) for each in order]
    for paragraph in _paragraphs(chance, room.tokens - cost, room.count, extra=extra):
        turns.insert(chance.randrange(len(turns) + 1), (f"{please}{paragraph}", done))
    questions = tuple(
        _among(
            chance, f"Which city is the home of my {RELATIVES[at]}?", f"The home of your {RELATIVES[at]} is", cities, at
        )
        for at in chance.sample(range(CHOICES), _ASKED)
    )
    return Item((), questions, tuple(turns))


def summary(chance: random.Random, room: Room) -> Item:
    """Functions of the standard library without their names; the choices are the first lines of their docstrings."""
    every = functions()
    chosen: list[int] = []
    left = room.tokens
    for at in chance.sample(range(len(every)), 40 * _FUNCTIONS):
        cost = room.count(every[at].source) + 12
        if cost <= left and len(chosen) < _FUNCTIONS:
            chosen.append(at)
            left -= cost
    if len(chosen) < _FUNCTIONS:
        raise ValueError(f"the facts of summary take more than the {room.tokens:,} tokens of the context")
    names = [f"function_{letter}" for letter in "abcd"]
    sources = [every[at].source.replace(NAME, name) for at, name in zip(chosen, names, strict=True)]
    summaries = [every[at].summary for at in chosen]
    fill = iter(_paragraphs(chance, left, room.count))
    documents = [*sources, *fill]
    questions = tuple(
        _among(
            chance, f"What is the docstring of {name}?", f'{_first_line(source)}\n    """', summaries, at, space=False
        )
        for at, (name, source) in enumerate(zip(names, sources, strict=True))
    )
    return Item(tuple(chance.sample(documents, len(documents))), questions)


TASKS: dict[str, Callable[[random.Random, Room], Item]] = {
    "needle": needle,
    "multi-needle": multi_needle,
    "key-value": key_value,
    "multi-document": multi_document,
    "two-documents": two_documents,
    "recall": recall,
    "summary": summary,
}


def item(task: str, number: int, room: Room, *, seed: int = 0) -> Item:
    """The item of this number. KeyError for an unknown task, ValueError if its facts alone need more room."""
    chance = random.Random(f"{task}/{number}/{seed}")
    made = TASKS[task](chance, room)
    used = sum(map(room.count, made.documents)) + sum(room.count(text) for turn in made.turns for text in turn)
    if used > room.tokens:
        raise ValueError(f"the facts of {task} take {used:,} tokens, and the context has {room.tokens:,}")
    return made


def chance_level(task: Item) -> float:
    """The score of answers by chance, 0 to 1."""
    return sum(1 / len(each.choices) for each in task.questions) / len(task.questions)


# -- inside ------------------------------------------------------------------------------------------------------------


def _among(
    chance: random.Random, ask: str, lead: str, values: Sequence[str], at: int, *, space: bool = True
) -> Question:
    """A question whose other choices are taken from the other values."""
    others = [each for number, each in enumerate(values) if number != at]
    return _question(chance, ask, lead, values[at], chance.sample(others, min(CHOICES - 1, len(others))), space=space)


def _question(
    chance: random.Random, ask: str, lead: str, right: str, others: Sequence[str], *, space: bool = True
) -> Question:
    choices = chance.sample([right, *others], 1 + len(others))
    before = " " if space else ""
    return Question(ask, lead, tuple(f"{before}{each}" for each in choices), choices.index(right))


def _first_line(source: str) -> str:
    return source.partition("\n")[0]


def _people(chance: random.Random, room: Room) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    names = chance.sample(FIRST_NAMES, _PEOPLE)
    columns = [chance.sample(pool, _PEOPLE) for pool in (CITIES, JOBS, ANIMALS)]
    friends = names[1:] + names[:1]
    people = [
        dict(zip(("name", "city", "job", "animal", "friend"), row, strict=True))
        for row in zip(names, *columns, friends, strict=True)
    ]
    facts = [
        f"The home of {one['name']} is {one['city']}. The profession of {one['name']} is {one['job']}. "
        f"The pet of {one['name']} is a {one['animal']}. The best friend of {one['name']} is {one['friend']}."
        for one in people
    ]
    order = chance.sample(range(_PEOPLE), _PEOPLE)
    fill = _paragraphs(chance, room.tokens - sum(map(room.count, facts)) - 4 * _PEOPLE, room.count)
    shares = [fill[number::_PEOPLE] for number in range(_PEOPLE)]
    documents = tuple(" ".join([facts[at], *share]) for at, share in zip(order, shares, strict=True))
    return people, documents


def _spread(chance: random.Random, room: Room, facts: Sequence[str]) -> tuple[str, ...]:
    """Facts at random places of documents of real text, in random order."""
    fill = _paragraphs(chance, room.tokens - sum(map(room.count, facts)) - 2 * len(facts), room.count)
    lines = list(fill)
    for fact in chance.sample(facts, len(facts)):
        lines.insert(chance.randrange(len(lines) + 1), fact)
    count = min(_DOCUMENTS, len(lines))
    cuts = [len(lines) * at // count for at in range(count + 1)]
    return tuple(" ".join(lines[begin:end]) for begin, end in pairwise(cuts))


def _paragraphs(chance: random.Random, tokens: int, count: Callable[[str], int], *, extra: int = 2) -> list[str]:
    """Real paragraphs of `tokens` at most, `extra` added to each."""
    return list(_fitting(some_paragraphs(chance), tokens, count, extra))


def _fitting(lines: Iterator[str], tokens: int, count: Callable[[str], int], extra: int) -> Iterator[str]:
    misses = 0
    for line in lines:
        cost = count(line) + extra
        if cost > tokens:
            misses += 1
            if misses == 3:
                return
            continue
        tokens -= cost
        yield line
