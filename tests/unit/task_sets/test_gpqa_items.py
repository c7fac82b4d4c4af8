"""Items with exactly one right option, proven by solving each question a second time."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_gpqa.items import KINDS, Item, generate_items, hub_items
from gradus_gpqa.numbers import _UNITS
from gradus_gpqa.question import numeric_wrong
from gradus_gpqa.reasoning import DAYS

FACTORS = {(small, big): factor for big, small, factor in _UNITS}


def ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def solves_shopping(question: str, option: str) -> bool:
    boxes, each, *rest = ints(question)
    goods = [1] * (boxes * each)
    if rest:
        goods = goods[rest[0] :]
    if len(rest) == 2:
        while len(goods) >= rest[1]:
            goods = goods[rest[1] :]
    return len(goods) == int(option)


def solves_conversion(question: str, option: str) -> bool:
    if backwards := re.match(r"(\d+) (\w+) are (\d+) (\w+) and how many", question):
        total, small, count, big = backwards.groups()
        return int(count) * FACTORS[small, big] + ints(option)[0] == int(total)
    asked = re.match(r"How many (\w+) are (\d+) (\w+)(?: and (\d+))?", question)
    assert asked
    small, count, big, rest = asked.groups()
    return ints(option)[0] == sum([FACTORS[small, big]] * int(count)) + int(rest or 0)


def solves_sequence(question: str, option: str) -> bool:
    numbers = [*ints(question), int(option)]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    if "plus the same" in question:
        return len(set(steps)) == 1
    if "times the same" in question:
        return len({Fraction(b, a) for a, b in itertools.pairwise(numbers)}) == 1
    return len({b - a for a, b in itertools.pairwise(steps)}) == 1


def solves_percentage(question: str, option: str) -> bool:
    if question.startswith("What is"):
        percent, whole = ints(question)
        return Fraction(int(option), whole) == Fraction(percent, 100)
    if question.startswith("After"):
        percent, now = ints(question)
        return int(option) * (100 - percent) == now * 100
    whole, percent = ints(question)
    return Fraction(int(option), whole) == 1 - Fraction(percent, 100)


def solves_travel(question: str, option: str) -> bool:
    first, second, *third = ints(question)
    if third:
        return first - second * int(option) - third[0] * int(option) == 0
    if "How many kilometres" in question:
        return Fraction(int(option), second) == first
    return int(option) * second == first


def solves_counting(question: str, option: str) -> bool:
    if "menu" in question:
        a, b = ints(question)
        found = list(itertools.product(range(a), range(b)))
    elif "orders" in question:
        found = list(itertools.permutations(range(*ints(question))))
    else:
        k, n = ints(question)
        found = list(itertools.combinations(range(n), k))
    return len(found) == int(option)


def solves_probability(question: str, option: str) -> bool:
    red, blue = ints(question)
    balls = ["red"] * red + ["blue"] * blue
    if "One ball" in question:
        draws: Any = [(ball,) for ball in balls]
    elif "put back, and" in question:
        draws = list(itertools.product(balls, repeat=2))
    else:
        draws = list(itertools.permutations(balls, 2))
    return Fraction(sum(set(d) == {"red"} for d in draws), len(draws)) == Fraction(option)


def solves_remainder(question: str, option: str) -> bool:
    *parts, divisor = ints(question)
    number = parts[0]
    if "product" in question:
        number = parts[0] * parts[1]
    if "power" in question:
        number = parts[0] ** parts[1]
    return 0 <= int(option) < divisor and (number - int(option)) % divisor == 0


def solves_calendar(question: str, option: str) -> bool:
    named = next(day for day in DAYS if day in question)
    numbers = ints(question)
    order = DAYS[::-1] if "was it" in question else DAYS
    ahead = numbers[0] if len(numbers) == 1 else sum(numbers) + 1
    days = itertools.islice(itertools.cycle(order), order.index(named), None)
    return next(itertools.islice(days, ahead, None)) == option


def solves_ordering(question: str, option: str) -> bool:
    clues = re.findall(r"(\w+) is \w+ than (\w+)\.", question)
    people = {person for clue in clues for person in clue}
    orders = [
        order
        for order in itertools.permutations(sorted(people))
        if all(order.index(a) < order.index(b) for a, b in clues)
    ]
    assert len(orders) == 1
    place = re.search(r"number (\d+) when", question)
    return orders[0][int(place[1]) - 1 if place else 0] == option


def solves_syllogism(question: str, option: str) -> bool:
    facts = re.findall(r"(All|No) (\w+) are (\w+)\.", question)
    names = sorted({name for _, *pair in facts for name in pair})
    worlds = [
        dict(zip(names, w, strict=True)) for w in itertools.product((0, 1), repeat=len(names))
    ]

    def fits(world: dict[str, int], word: str, a: str, b: str) -> bool:
        return not world[a] or (world[b] == 1 if word == "All" else world[b] == 0)

    possible = [world for world in worlds if all(fits(world, *fact) for fact in facts)]
    word, a, _, b = option.rstrip(".").split()
    # Nothing says that anything exists, so that no statement with `some` must be true.
    return word != "Some" and all(fits(world, word, a, b) for world in possible)


def solves_liars(question: str, option: str) -> bool:
    claims = re.findall(r'(\w+) says: "([^"]+)"', question)
    people = [speaker for speaker, _ in claims]
    truthful = set() if option == "nobody" else set(option.split(" and "))

    def holds(claim: str) -> bool:
        named = [word for word in re.findall(r"\w+", claim) if word in people]
        if len(named) == 2:
            return (len(truthful & set(named)) != 1) == ("same kind" in claim)
        return (named[0] in truthful) == ("truth" in claim)

    return all(holds(claim) == (speaker in truthful) for speaker, claim in claims)


SOLVERS: dict[str, Callable[[str, str], bool]] = {
    kind: globals()[f"solves_{kind}"] for kind in KINDS
}


def assert_one_right_option(item: Item) -> None:
    right = [
        letter
        for letter, option in zip(item.letters, item.options, strict=True)
        if SOLVERS[item.kind](item.question, option)
    ]
    assert right == [item.answer], item
    assert len(set(item.options)) == len(item.options) == 4


def test_the_two_hundred_items_have_one_right_option_each() -> None:
    items = generate_items(200)
    assert len(items) == 200
    assert len({item.question for item in items}) == len({item.key for item in items}) == 200
    for item in items:
        assert_one_right_option(item)
    assert {item.kind for item in items} == set(KINDS)
    assert min(Counter(item.level for item in items).values()) >= 60
    assert min(Counter(item.answer for item in items).values()) >= 35


@given(st.integers(), st.sampled_from(sorted(KINDS)), st.integers(1, 3))
@settings(max_examples=30)
def test_any_seed_gives_one_right_option(seed: int, kind: str, level: int) -> None:
    (item,) = generate_items(1, seed=seed, kinds=[kind], levels=[level])
    assert_one_right_option(item)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_form_of_a_conclusion_does_not_tell_which_is_right(level: int) -> None:
    """Once the only option that begins with "No" was always right, or always wrong."""
    items = generate_items(100, kinds=["syllogism"], levels=[level])
    forms = {tuple(sorted(option.split()[0] for option in item.options)) for item in items}
    right = Counter(item.options[item.letters.index(item.answer)].split()[0] for item in items)
    assert forms == {("All",) * 4 if level == 1 else ("All", "All", "No", "No")}
    assert right["All"] == 100 if level == 1 else 30 <= right["No"] <= 70


def test_no_place_among_the_options_tells_which_is_right() -> None:
    """Once the right number of a sequence was always the second smallest, and a right day the one
    amid the others: kind and options alone were right on two thirds of the items."""
    places: dict[tuple[str, int | None], Counter[int]] = {}
    for item in generate_items(1500, seed=2):
        right = item.letters.index(item.answer)
        if item.options[0] in DAYS:
            order = sorted(range(4), key=lambda i: amid_days(i, item.options))
        elif item.kind in ("ordering", "syllogism", "liars"):
            continue
        else:
            order = sorted(range(4), key=lambda i: Fraction(item.options[i].split()[0]))
        places.setdefault((item.kind, item.level), Counter())[order.index(right)] += 1
    best = {kind: found.most_common(1)[0][1] / found.total() for kind, found in places.items()}
    numerous = {kind: share for kind, share in best.items() if places[kind].total() >= 30}
    assert len(numerous) >= 20
    assert {kind: share for kind, share in numerous.items() if share > 0.5} == {}
    hits = sum(found.most_common(1)[0][1] for found in places.values())
    assert hits < 0.4 * sum(found.total() for found in places.values())


def amid_days(place: int, options: Sequence[str]) -> tuple[int, int]:
    """How far a day is from the furthest of the others, and from all of them."""
    days = [DAYS.index(option) for option in options]
    apart = [min((days[place] - day) % 7, (day - days[place]) % 7) for day in days]
    return max(apart), sum(apart)


def test_more_items_begin_with_fewer_and_another_seed_asks_something_else() -> None:
    assert generate_items(300, seed=3)[:50] == generate_items(50, seed=3)
    assert generate_items(50, seed=3) != generate_items(50, seed=4)


def test_a_kind_that_runs_out_gives_fewer_items_and_no_endless_search() -> None:
    items = generate_items(500, kinds=["counting"], levels=[2])
    assert 4 <= len(items) <= 32
    assert len({item.question for item in items}) == len(items)


@given(st.integers(0, 10**6), st.lists(st.integers(-50, 10**6), max_size=6))
def test_wrong_numbers_are_three_and_never_the_right_one(right: int, slips: list[int]) -> None:
    wrong = numeric_wrong(random.Random(right), right, slips, lowest=0, step=1)
    assert len(set(wrong)) == 3
    assert right not in wrong
    assert min(wrong) >= 0


ROW = {
    "Record ID": "rec1",
    "High-level domain": "Physics",
    "Question": "Which? ",
    "Correct Answer": "right\n",
    "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2",
    "Incorrect Answer 3": "w3",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows that the data set has."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr("gradus_gpqa.items.hub_rows", lambda *_, **__: iter(rows))
    return rows


def read_hub() -> list[Item]:
    return list(hub_items("x", subset=None, split="train", seed=0))


def test_a_row_of_the_public_data_set_becomes_an_item(hub: list[dict[str, Any]]) -> None:
    hub.append(dict(ROW))
    (item,) = read_hub()
    assert (item.key, item.kind, item.level, item.question) == ("rec1", "Physics", None, "Which?")
    assert item.options[item.letters.index(item.answer)] == "right"
    assert sorted(item.options) == ["right", "w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"Correct Answer": None}, "'Correct Answer' is None"),
        ({"Question": "  "}, "not a text"),
    ],
)
def test_a_row_that_is_no_item_is_named(
    hub: list[dict[str, Any]], change: dict[str, Any], problem: str
) -> None:
    hub.extend([dict(ROW), {**ROW, **change}])
    with pytest.raises(ValueError, match=f"row 1 of data set 'x'.*{problem}"):
        read_hub()


def test_a_row_with_an_option_twice_is_left_out_and_told(
    hub: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    hub.extend([{**ROW, "Incorrect Answer 2": "right "}, dict(ROW)])
    with caplog.at_level("WARNING"):
        assert len(read_hub()) == 1
    assert "row 0 of data set 'x' is left out" in caplog.text


def test_the_gated_data_set_says_how_to_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotFoundError(FileNotFoundError):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    exceptions = SimpleNamespace(DatasetNotFoundError=NotFoundError, DatasetsError=RuntimeError)
    module: Any = SimpleNamespace(load_dataset=refuse, exceptions=exceptions, logging=MagicMock())
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ConfigError, match=r"gated.*HF_TOKEN.*pass_env"):
        read_hub()
