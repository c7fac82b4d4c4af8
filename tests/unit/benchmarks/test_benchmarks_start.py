"""Every benchmark starts: all that it imports is there, and it says how it is called."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
OF_TRL = {"trl_whole_step.py"}
"""Run by an environment that has TRL."""
START_EACH = """
import ast, contextlib, importlib, json, os, pathlib, runpy, sys
import gradus.environments

for name in sys.argv[1:]:  # once for all of them, before the first fork
    for node in ast.parse(pathlib.Path("benchmarks", name).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            with contextlib.suppress(ImportError):
                importlib.import_module(node.module)
answers = {}
for name in sys.argv[1:]:
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.dup2(write, 1), os.dup2(write, 2), os.close(read)
        sys.argv, sys.path[0] = [name, "--help"], "benchmarks"
        code = 0
        try:
            runpy.run_path(f"benchmarks/{name}", run_name="__main__")
        except SystemExit as end:
            code = int(bool(end.code))
        except BaseException as error:
            code = 1
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(code)
    os.close(write)
    said = os.fdopen(read).read()
    answers[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def started() -> dict[str, tuple[int, str]]:
    """Each file's exit code and last words, from one process that imports the heavy libraries."""
    names = [name for name in FILES if name not in OF_TRL or importlib.util.find_spec("trl")]
    words = [sys.executable, "-W", "ignore", "-c", START_EACH, *names]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_a_benchmark_starts(name: str, started: dict[str, tuple[int, str]]) -> None:
    if name not in started:
        pytest.skip("trl is not installed here")
    code, said = started[name]
    assert code == 0, said
