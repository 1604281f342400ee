"""Prompts of chunks whose answers need what tokens of later chunks know of earlier ones.

Dictionary chunks define keys: the token `D(key, meaning)`. Fact chunks say things about names: `N(name) F(key, code)`.
The true value of a name is `(code + meaning of the key) % VALUES`, so a fact token can know it only after it has seen
the dictionary, which is in another chunk. All else is filler. Three kinds of questions, two tokens each:

| kind    | question                    | answer    | where the answer is                                         |
|---------|-----------------------------|-----------|-------------------------------------------------------------|
| `name`  | `ASK_NAME R(group, value)`  | `N(name)` | only in what the fact token made of the dictionary          |
| `value` | `ASK_VALUE N(name)`         | `V(value)`| the same, though a patient model can look twice             |
| `code`  | `ASK_CODE N(name)`          | `C(code)` | inside one chunk: reuse must not hurt these                 |

`name` cannot be answered late: a question that gives a value would have to undo the sum for every key and compare the
outcome with every fact. Values are unique among the names of a group, and a name's group is fixed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

IGNORED = -100
"""The label of a token at which nothing is asked."""
KEYS, VALUES, GROUPS, WORDS, TOPICS = 16, 8, 4, 48, 4
NAMES = GROUPS * VALUES
PAD, BOS, SEP, ASK_NAME, ASK_VALUE, ASK_CODE, UNKNOWN = range(7)
N = 7
"""The token of name 0; those of other names follow. So for all below."""
V = N + NAMES
C = V + VALUES
R = C + VALUES
D = R + GROUPS * VALUES
F = D + KEYS * VALUES
X = F + KEYS * VALUES
VOCABULARY = X + WORDS
KINDS = ("name", "value", "code")


def _successors() -> list[list[int]]:
    """The order of filler words for each topic. It has its own seed, because it is part of the language."""
    chance = random.Random(7)
    return [chance.sample(range(WORDS), WORDS) for _ in range(TOPICS)]


SUCCESSORS = _successors()


@dataclass(frozen=True)
class Shape:
    """The size of a prompt."""

    dictionaries: int = 2
    """Chunks that define keys; they come first."""
    chunks: int = 8
    """Number of chunks of both sorts."""
    length: tuple[int, int] = (48, 80)
    """Tokens of a chunk with its separator, at least and at most."""
    keys: int = 8
    facts: int = 24
    questions: int = 16
    """At most `facts`."""


FULL = Shape()
"""About 550 tokens; 24 of them depend on other chunks."""


class Sample(NamedTuple):
    """One prompt: `prefix`, the chunks in their order, then `question`. All are token ids."""

    prefix: list[int]
    chunks: list[list[int]]
    question: list[int]
    answers: list[int]
    """The prediction wanted at each token of `question`, or IGNORED."""
    kinds: list[str]
    """The kind of each question that has an answer, in their order."""
    chunk_labels: list[list[int]]
    """The prediction wanted at each token of `chunks`, for training: the true value at a fact token, the next word in
    filler, or IGNORED."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prefix, *(token for chunk in self.chunks for token in chunk), *self.question]

    @property
    def labels(self) -> list[int]:
        """Labels for all of `tokens`."""
        of_chunks = [label for labels in self.chunk_labels for label in labels]
        return [*(IGNORED for _ in self.prefix), *of_chunks, *self.answers]


class Fact(NamedTuple):
    name: int
    key: int
    code: int
    value: int

    @property
    def tokens(self) -> list[int]:
        return [N + self.name, F + self.key * VALUES + self.code]


def sample(
    rng: random.Random, *, shape: Shape = FULL, bos: bool = True, defined: bool = True, kinds: tuple[str, ...] = KINDS
) -> Sample:
    """Draws a prompt.

    Args:
        bos: Whether the prefix is BOS; it is empty otherwise.
        defined: False leaves the dictionaries out. True values are UNKNOWN then, and names are not asked for.
        kinds: Which kinds of questions are asked, each as often as the others.
    """
    meanings = {key: rng.randrange(VALUES) for key in rng.sample(range(KEYS), shape.keys)}
    facts = _facts(rng, meanings, shape.facts)
    kinds = kinds if defined else tuple(kind for kind in kinds if kind != "name")

    definitions = [([D + key * VALUES + meaning], [IGNORED]) for key, meaning in meanings.items()]
    said = [(fact.tokens, [IGNORED, V + fact.value if defined else UNKNOWN]) for fact in facts]
    pairs = [_chunk(rng, each, shape.length) for each in _dealt(rng, definitions, shape.dictionaries) if defined]
    pairs += [_chunk(rng, each, shape.length) for each in _dealt(rng, said, shape.chunks - shape.dictionaries)]

    question, answers, asked = [], [], []
    for fact in rng.sample(facts, shape.questions):
        asked.append(rng.choice(kinds))
        tokens, answer = _question(fact, asked[-1])
        question += tokens
        answers += [IGNORED, UNKNOWN if asked[-1] == "value" and not defined else answer]
    chunks, labels = [tokens for tokens, _ in pairs], [labels for _, labels in pairs]
    return Sample([BOS] if bos else [], chunks, question, answers, asked, labels)


def smaller(rng: random.Random, shape: Shape) -> Shape:
    """A shape with fewer keys, facts and chunks, so that training sees many."""
    facts = rng.randint(max(1, shape.facts // 2), shape.facts)
    return replace(
        shape,
        chunks=rng.randint(shape.dictionaries + 1, shape.chunks),
        keys=rng.randint(max(1, shape.keys // 2), shape.keys),
        facts=facts,
        questions=min(facts, shape.questions),
    )


def _facts(rng: random.Random, meanings: dict[int, int], count: int) -> list[Fact]:
    """Facts with distinct names, and distinct values within a group."""
    values = [rng.sample(range(VALUES), VALUES) for _ in range(GROUPS)]
    facts = []
    for name in rng.sample(range(NAMES), count):
        key, value = rng.choice(list(meanings)), values[name // VALUES][name % VALUES]
        facts.append(Fact(name, key, (value - meanings[key]) % VALUES, value))
    return facts


def _question(fact: Fact, kind: str) -> tuple[list[int], int]:
    if kind == "name":
        return [ASK_NAME, R + fact.name // VALUES * VALUES + fact.value], N + fact.name
    if kind == "value":
        return [ASK_VALUE, N + fact.name], V + fact.value
    return [ASK_CODE, N + fact.name], C + fact.code


Item = tuple[list[int], list[int]]
"""Tokens that stay together, and their labels."""


def _dealt(rng: random.Random, items: list[Item], chunks: int) -> list[list[Item]]:
    rng.shuffle(items)
    return [items[each::chunks] for each in range(chunks)]


def _chunk(rng: random.Random, items: list[Item], length: tuple[int, int]) -> Item:
    """Items in the filler of one topic, then a separator."""
    words = max(0, rng.randint(*length) - 1 - sum(len(tokens) for tokens, _ in items))
    topic, cuts = rng.choice(SUCCESSORS), sorted(rng.randint(0, words) for _ in items)
    chunk, labels, at = [], [], 0
    for (tokens, its_labels), cut in zip(items, cuts, strict=True):
        for more, more_labels in (_filler(rng, topic, cut - at), (tokens, its_labels)):
            chunk += more
            labels += more_labels
        at = cut
    rest, rest_labels = _filler(rng, topic, words - at)
    return [*chunk, *rest, SEP], [*labels, *rest_labels, IGNORED]


def _filler(rng: random.Random, topic: list[int], length: int) -> Item:
    """Six of seven words are those that the topic has follow the word before."""
    words: list[int] = []
    for _ in range(length):
        expected = bool(words) and rng.random() < 6 / 7
        words.append(topic[words[-1]] if expected else rng.randrange(WORDS))
    tokens = [X + word for word in words]
    return tokens, [*tokens[1:], IGNORED] if tokens else []
