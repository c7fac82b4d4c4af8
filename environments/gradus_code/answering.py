"""In the first box: calls the model's function, or its program, and writes down the answers.

`python answering.py function NAME` calls NAME of `solution.py` once for each line of `calls.txt`, a
tuple of arguments. `python answering.py program SECONDS` runs `solution.py` once for each line, a
text for its standard input. One line of output answers one line of input. Nothing here knows which
answers are right.
"""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

RAISED = "!"
"""Begins the line of a call that came to no answer."""


def lines() -> Iterator[Any]:
    """What to call with; a value per line."""
    with open("calls.txt", encoding="utf-8", errors="surrogatepass") as file:
        for line in file:
            yield ast.literal_eval(line)


def answer(call: Callable[[Any], Any], given: Any) -> str:
    """One line."""
    try:
        text = repr(call(given))
    except (Exception, SystemExit) as error:
        return f"{RAISED}{type(error).__name__}: {error}"[:200].replace("\n", " ")
    return text.replace("\n", " ")


def run_program(text: str, seconds: float) -> str:
    """Standard output of the program."""
    done = subprocess.run(
        [sys.executable, "-I", "solution.py"],
        input=text.encode("utf-8", "surrogatepass"),
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        raise RuntimeError(f"exit code {done.returncode}: {last}")
    return done.stdout.decode("utf-8", "replace")


def main() -> None:
    """Answer every line, on a descriptor that the model's own prints do not reach."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    kind, option = sys.argv[1:]
    if kind == "program":
        calls = list(lines())
        for text in calls:
            answers.write(answer(lambda given: run_program(given, float(option)), text) + "\n")
            answers.flush()
        return
    function = runpy.run_path("solution.py", run_name="solution")[option]
    for arguments in lines():
        answers.write(answer(lambda given: function(*given), arguments) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
