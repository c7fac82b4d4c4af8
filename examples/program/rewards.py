"""What the program `reverse.py` earns: how much of the task it printed backwards."""

import difflib


def similarity(output: str, row: dict[str, str]) -> float:
    """Share of matching characters in [0, 1], 1 for the reversed text."""
    answer = row["prompt"][::-1]
    return difflib.SequenceMatcher(None, output.strip(), answer, autojunk=False).ratio()
