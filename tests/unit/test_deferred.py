"""Imports of verifiers that wait, each seen in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("anthropic", "sympy", "rich", "click")


def said(code: str) -> list[str]:
    """The lines that `code` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
def test_what_plays_and_records_waits_and_is_the_real_thing_when_it_is_asked_for() -> None:
    """If verifiers changed the files, take its new digests after a look at what they import."""
    lines = said(
        "import sys\n"
        "import gradus.environments.process, gradus.orchestrator.build, gradus.conformance\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "from verifiers.v1.utils.score import verify_boxed_math_answer as grade\n"
        "print(grade(r'so \\boxed{1/2}', '0.5'), grade(r'\\boxed{3}', '4'))\n"
        "print('sympy' in sys.modules)\n"
        "from math_verify import LatexExtractionConfig, parse\n"
        "print(parse.__module__, LatexExtractionConfig.__module__)\n"
        "from verifiers.v1.dialects import DIALECTS, AnthropicDialect\n"
        "stand_in = DIALECTS[-1]\n"
        "print(stand_in.routes, stand_in.aux_routes, 'anthropic' in sys.modules)\n"
        "print(stand_in.error_body('x'), 'anthropic' in sys.modules)\n"
        "class Mine(AnthropicDialect): pass\n"
        "from verifiers.v1.dialects.anthropic import AnthropicDialect as Real\n"
        "print(issubclass(Mine, Real), isinstance(Mine(), AnthropicDialect))\n"
        "print(isinstance(stand_in, AnthropicDialect), isinstance(3, AnthropicDialect))\n"
        "shown = ('routes', 'aux_routes', 'upstream_path')\n"
        "print(all(getattr(Real(), name) == getattr(stand_in, name) for name in shown))\n"
    )
    assert lines == [
        "[]",
        "1.0 0.0",
        "True",
        "math_verify.parser math_verify.parser",
        "('/v1/messages',) ('/v1/messages/count_tokens',) False",
        "{'type': 'error', 'error': {'type': 'invalid_request_error', 'message': 'x'}} True",
        "True True",
        "True False",
        "True",
    ]


@pytest.mark.slow
def test_what_is_imported_already_and_other_versions_are_left_alone() -> None:
    lines = said(
        "import sys, math_verify, gradus.environments.verifiers.deferred as deferred\n"
        "sys.meta_path[:] = [it for it in sys.meta_path if it is not deferred._FINDER]\n"
        "deferred.IMPORTERS[deferred.DIALECT] = ('verifiers/v1/dialects/anthropic.py', 'another')\n"
        "deferred.defer_imports()\n"
        "print(math_verify.parse.__module__)\n"
        "import verifiers.v1\n"
        "print('anthropic' in sys.modules, type(verifiers.v1.dialects.DIALECTS[-1]).__module__)\n"
    )
    assert lines == ["math_verify.parser", "True verifiers.v1.dialects.anthropic"]
