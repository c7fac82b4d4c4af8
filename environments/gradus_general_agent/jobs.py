"""Jobs: files that are made from a seed, a question about them, and its answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TOWNS = ("arden", "brook", "cliff", "dover", "eaton", "firth", "grove", "haven", "irons", "jarrow")
_WORDS = (
    *("lamp", "river", "stone", "paper", "cloud", "garden", "bridge", "window", "market", "silver"),
    *("harbour", "letter", "orange", "pencil", "ticket", "violin", "winter", "copper", "forest"),
)


@dataclass(frozen=True)
class Job:
    """A job: the files that the agent finds, and what it must write."""

    name: str
    question: str
    answer: str
    files: dict[str, str]
    """Text by path, below the folder of the job."""


def sales(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """A sum over CSV files."""
    files, sums = {}, Counter[str]()
    for month in range(1, rng.randint(4, 8)):
        rows = ["town,units,price"]
        for _ in range(rng.randint(5, 15)):
            town, units, price = rng.choice(_TOWNS), rng.randint(1, 30), rng.randint(2, 90)
            rows.append(f"{town},{units},{price}")
            sums[town] += units * price
        files[f"sales/2024-{month:02d}.csv"] = "\n".join(rows) + "\n"
    town = rng.choice(sorted(sums))
    return f"How much (units times price) was sold in {town} in all months?", str(sums[town]), files


def words(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """The most frequent word of many texts."""
    chosen = rng.sample(_WORDS, 8)
    counts = Counter({word: rng.randint(3, 9) for word in chosen[1:]})
    counts[chosen[0]] = 10 + rng.randint(1, 5)
    drawn = list(counts.elements())
    rng.shuffle(drawn)
    size = len(drawn) // 4 + 1
    files = {
        f"notes/{number}.txt": " ".join(drawn[number * size : (number + 1) * size]) + "\n"
        for number in range(4)
    }
    return "Which word occurs most often in all files together?", chosen[0], files


def settings(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """A value deep in one of many JSON files."""
    names = rng.sample(_TOWNS, 6)
    ports = rng.sample(range(2000, 9000), 6)
    files = {
        f"hosts/{place}/config.json": json.dumps(
            {"host": {"name": name, "ports": [port, port + 1]}, "active": bool(place % 2)}, indent=1
        )
        for place, (name, port) in enumerate(zip(names, ports, strict=True))
    }
    wanted = rng.randrange(6)
    return (
        f"What is the second port of the host named {names[wanted]}?",
        str(ports[wanted] + 1),
        files,
    )


def log(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """Lines of a log that match two things."""
    lines, count = [], 0
    town = rng.choice(_TOWNS)
    for minute in range(rng.randint(60, 200)):
        level, place = rng.choice(("INFO", "WARN", "ERROR")), rng.choice((*_TOWNS, town, town))
        lines.append(f"10:{minute % 60:02d} {level} {place} took {rng.randint(1, 900)} ms")
        count += level == "ERROR" and place == town
    files = {"server.log": "\n".join(lines) + "\n"}
    return f"How many lines report an ERROR of {town}?", str(count), files


KINDS: dict[str, Callable[[random.Random], tuple[str, str, dict[str, str]]]] = {
    "sales": sales,
    "words": words,
    "settings": settings,
    "log": log,
}


def jobs(*, seed: int = 0) -> Iterator[Job]:
    """Jobs without end, kind by kind in turn; each depends on its name and the seed alone."""
    number = 0
    while True:
        for kind, make in KINDS.items():
            name = f"{kind}-{number:04d}"
            question, answer, files = make(random.Random(f"general-agent {seed} {name}"))
            yield Job(name, question, answer, files)
        number += 1
