"""Short questions with one-word answers from small tables, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

_CAPITALS = {
    "France": "paris",
    "Italy": "rome",
    "Spain": "madrid",
    "Japan": "tokyo",
    "Germany": "berlin",
    "Egypt": "cairo",
    "Greece": "athens",
    "Russia": "moscow",
    "China": "beijing",
    "Portugal": "lisbon",
    "Austria": "vienna",
    "Cuba": "havana",
    "Poland": "warsaw",
    "Ireland": "dublin",
    "Norway": "oslo",
    "Peru": "lima",
}
_OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "left": "right",
    "day": "night",
    "old": "young",
    "fast": "slow",
    "happy": "sad",
    "open": "closed",
    "dry": "wet",
    "early": "late",
    "hard": "soft",
    "light": "dark",
    "rich": "poor",
    "full": "empty",
    "long": "short",
}
_COLOURS = {
    "the sky on a clear day": "blue",
    "fresh grass": "green",
    "a ripe banana": "yellow",
    "fresh snow": "white",
    "coal": "black",
    "blood": "red",
    "a carrot": "orange",
    "an elephant": "grey",
    "chocolate": "brown",
    "a flamingo": "pink",
    "a ripe tomato": "red",
    "milk": "white",
    "a lemon": "yellow",
    "a crow": "black",
}
_SOUNDS = {
    "barks": "dog",
    "meows": "cat",
    "roars": "lion",
    "moos": "cow",
    "quacks": "duck",
    "neighs": "horse",
    "hoots": "owl",
    "oinks": "pig",
    "croaks": "frog",
    "buzzes": "bee",
    "hisses": "snake",
    "howls": "wolf",
}
_NEXT = {
    "Monday": "tuesday",
    "Tuesday": "wednesday",
    "Wednesday": "thursday",
    "Thursday": "friday",
    "Friday": "saturday",
    "January": "february",
    "March": "april",
    "April": "may",
    "June": "july",
    "August": "september",
    "October": "november",
    "November": "december",
}


@dataclass(frozen=True)
class Question:
    """A question and its answer in lower case."""

    text: str
    answer: str


def build_questions(*, seed: int = 0) -> list[Question]:
    """Every question once, shuffled.

    >>> len(build_questions()) == len({q.text for q in build_questions()})
    True
    """
    tables = {
        "What is the capital of {}?": _CAPITALS,
        "What is the opposite of {}?": _OPPOSITES,
        "What colour is {}?": _COLOURS,
        "Which animal {}?": _SOUNDS,
        "What comes after {}?": _NEXT,
    }
    questions = [
        Question(template.format(key), answer)
        for template, table in tables.items()
        for key, answer in table.items()
    ]
    random.Random(f"required-format {seed}").shuffle(questions)
    return questions
