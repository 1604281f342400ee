"""The task of `models/study_a` and `models/study_b`, so that figures of the study that they are from can be had again.

Dictionary chunks hold `D(alias, entity)`, fact chunks `F(alias, value)`. Questions have two tokens: `ASK E(entity)`, to
be answered with the value, is what study_a was trained for; `ASK V(value)`, to be answered with the entity, study_b;
`ASK A(alias)`, to be answered with the value, needs one chunk only, and both can do it. Accuracy says little here: both
models look twice when they are asked, at tokens that stale KV leaves as they were. task.py is the one to measure with.
"""

from __future__ import annotations

import random

from .task import IGNORED, Sample

THINGS, WORDS = 16, 48
"""Aliases, entities and values: as many of each."""
PAD, BOS, SEP, ASK = range(4)
A = 4
E = A + THINGS
V = E + THINGS
D = V + THINGS
F = D + THINGS**2
X = F + THINGS**2
VOCABULARY = X + WORDS
KINDS = ("entity", "value", "alias")


def _successors() -> list[int]:
    words = list(range(WORDS))
    random.Random(7).shuffle(words)
    return words


SUCCESSORS = _successors()


def sample(
    rng: random.Random,
    *,
    kind: str,
    pairs: int = 8,
    dictionaries: int = 2,
    facts: int = 4,
    length: int = 24,
    bos: bool = True,
) -> Sample:
    """A prompt of `dictionaries` and `facts` chunks with `length` tokens each; all pairs are asked for.

    With the defaults and `random.Random(123)`, the prompts are those of the study, one after the other.
    """
    aliases, entities, values = (rng.sample(range(THINGS), pairs) for _ in range(3))
    order = list(range(pairs))
    rng.shuffle(order)
    chunks = []
    for each in range(dictionaries):
        items = [D + aliases[pair] * THINGS + entities[pair] for pair in order[each::dictionaries]]
        chunks.append(_chunk(rng, items, length))
    rng.shuffle(order)
    for each in range(facts):
        items = [F + aliases[pair] * THINGS + values[pair] for pair in order[each::facts]]
        chunks.append(_chunk(rng, items, length))
    asked = order.copy()
    rng.shuffle(asked)
    question, answers = [], []
    for pair in asked:
        rng.random()  # the study drew here which kind to ask
        if kind == "value":
            token, answer = V + values[pair], E + entities[pair]
        else:
            token, answer = A + aliases[pair] if kind == "alias" else E + entities[pair], V + values[pair]
        question += [ASK, token]
        answers += [IGNORED, answer]
    labels = [_labels(chunk, dict(zip(aliases, entities, strict=True))) for chunk in chunks]
    return Sample([BOS] if bos else [], chunks, question, answers, [kind] * pairs, labels)


def _chunk(rng: random.Random, items: list[int], length: int) -> list[int]:
    words = length - 1 - len(items)
    cuts = sorted(rng.randrange(words + 1) for _ in items)
    chunk, at = [], 0
    for item, cut in zip(items, cuts, strict=True):
        chunk += [*_filler(rng, cut - at), item]
        at = cut
    return [*chunk, *_filler(rng, words - at), SEP]


def _filler(rng: random.Random, length: int) -> list[int]:
    words, word = [], rng.randrange(WORDS)
    for _ in range(length):
        words.append(X + word)
        word = SUCCESSORS[word] if rng.random() < 0.85 else rng.randrange(WORDS)
    return words


def _labels(chunk: list[int], entities: dict[int, int]) -> list[int]:
    """The entity at a fact token, the next word in filler."""
    labels = []
    for token, after in zip(chunk, [*chunk[1:], PAD], strict=True):
        if F <= token < X:
            labels.append(E + entities[(token - F) // THINGS])
        else:
            labels.append(after if token >= X and after >= X else IGNORED)
    return labels
