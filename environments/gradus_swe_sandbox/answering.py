"""In the container: makes the calls of standard input, and writes one line of JSON for each.

`python3 answering.py FOLDER` reads a list of module, function and arguments. It knows no answers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def answer(module: str, function: str, arguments: list[Any]) -> Any:
    """Return what the call gives; an error by its kind."""
    try:
        arguments = [tuple(a) if isinstance(a, list) else a for a in arguments]
        value = getattr(importlib.import_module(module), function)(*arguments)
        if isinstance(value, dict):
            value = list(value.items())
        json.dumps(value)
    except Exception as error:
        return {"error": type(error).__name__}
    return value


def main() -> None:
    """Answer every call."""
    calls = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, sys.argv[1])
    for module, function, arguments in calls:
        answers.write(json.dumps(answer(module, function, arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
