"""Generated items: the same for a seed, with answers that follow from the context, and as hard as they say."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from kvloom_eval import tasks, text
from kvloom_eval.tasks import Item, Room

ROOM = Room(6000, len)
ABOUT = re.compile(
    r"The home of (\w+) is (\w+)\. The profession of \1 is (\w+)\. "
    r"The pet of \1 is a (\w+)\. The best friend of \1 is (\w+)\."
)


def said(item: Item) -> str:
    return "\n".join([*item.documents, *(text for turn in item.turns for text in turn)])


@pytest.mark.parametrize("task", tasks.TASKS)
def test_items_are_of_their_seed(task: str) -> None:
    first = tasks.item(task, 3, ROOM, seed=1)
    assert tasks.item(task, 3, ROOM, seed=1) == first
    assert tasks.item(task, 4, ROOM, seed=1) != first != tasks.item(task, 3, ROOM, seed=2)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_items_fill_their_room_and_no_more(task: str) -> None:
    sizes = [len(said(tasks.item(task, number, ROOM))) for number in range(10)]
    assert max(sizes) <= ROOM.tokens and min(sizes) > 0.5 * ROOM.tokens
    with pytest.raises(ValueError, match=f"the facts of {task} take"):
        tasks.item(task, 0, Room(20, len))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_chance_is_one_of_the_choices(task: str) -> None:
    """Choices are all different, and the right one is at every place alike."""
    level = 1 / (4 if task == "summary" else tasks.CHOICES)
    places: Counter[int] = Counter()
    for number in range(60):
        made = tasks.item(task, number, ROOM)
        assert tasks.chance_level(made) == level
        for each in made.questions:
            assert len(set(each.choices)) == len(each.choices)
            places[each.right] += 1
    assert len(places) == round(1 / level)
    assert max(places.values()) < 2.2 * level * places.total()


def right(item: Item) -> list[tuple[str, str]]:
    return [(each.ask, each.choices[each.right].strip()) for each in item.questions]


@pytest.mark.parametrize("number", range(5))
def test_answers_follow_from_the_context(number: int) -> None:
    for task in ("needle", "multi-needle"):
        made = tasks.item(task, number, ROOM)
        numbers = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", said(made)))
        assert len(numbers) == (1 if task == "needle" else 8)
        for ask, answer in right(made):
            assert numbers[ask.split()[-1].rstrip("?")] == answer
    made = tasks.item("key-value", number, ROOM)
    table = {}
    for part in re.findall(r"\{.*?\}", said(made)):
        table |= json.loads(part)
    assert len(table) == 12
    for ask, answer in right(made):
        assert table[ask.split('"')[1]] == answer
    people = {name: facts for name, *facts in ABOUT.findall(said(tasks.item("multi-document", number, ROOM)))}
    assert len(people) == 8
    for ask, answer in right(tasks.item("multi-document", number, ROOM)):
        (name,) = [each for each in people if re.search(rf"\b{each}\b", ask)]
        city, job, animal, _ = people[name]
        assert (
            answer
            == {"city": city, "profession": job, "pet": animal}[
                next(word for word in ("city", "profession", "pet") if word in ask)
            ]
        )
    people = {name: facts for name, *facts in ABOUT.findall(said(tasks.item("two-documents", number, ROOM)))}
    for ask, answer in right(tasks.item("two-documents", number, ROOM)):
        (name,) = [each for each in people if re.search(rf"\b{each}\b", ask)]
        assert answer == people[people[name][3]][0]
    made = tasks.item("recall", number, ROOM)
    cities = dict(re.findall(r"The home of my (\w+) is (\w+)\.", said(made)))
    for ask, answer in right(made):
        assert cities[ask.split()[-1].rstrip("?")] == answer


def test_a_needle_is_hidden_among_orders_of_its_digits() -> None:
    made = tasks.item("needle", 0, ROOM)
    (asked,) = made.questions
    assert len({"".join(sorted(each)) for each in asked.choices}) == 1
    assert sum(each.strip() in said(made) for each in asked.choices) == 1


def test_other_choices_stand_in_the_context() -> None:
    """The model has to find the right one, and not one that it has seen."""
    for task in ("multi-needle", "key-value", "multi-document", "two-documents", "recall"):
        made = tasks.item(task, 0, ROOM)
        assert all(choice.strip() in said(made) for each in made.questions for choice in each.choices), task


def test_summaries_belong_to_their_functions() -> None:
    made = tasks.item("summary", 0, ROOM)
    sources = {each.source: each.summary for each in text.functions()}
    for ask, answer in right(made):
        name = ask.split()[-1].rstrip("?")
        (source,) = [one for one in made.documents if f"def {name}(" in one]
        assert sources[source.replace(name, text.NAME)] == answer
        assert answer not in source


def test_functions_have_no_names() -> None:
    found = text.functions()
    assert len(found) > 200
    assert all(f"def {text.NAME}(" in each.source and each.summary not in each.source for each in found)
