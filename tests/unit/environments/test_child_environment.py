"""Which variables reach an environment's code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradus.environments.variables import child_environment, environment_secrets
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE

CALLER = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C.UTF-8",
    "WANDB_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GRADUS_DEATH_PIPE": "5",
    "GRADUS_LAUNCH": "7.8",
    "GRADUS_AUTHORITY": "/run/authority.pem",
    INFERENCE_TOKEN_VARIABLE: "of another run",
    "HF_TOKEN": "of the hub",
    "JUDGE_KEY": "named by the config",
}


@pytest.mark.shows("SEC10", "SEC11")
def test_only_known_and_named_variables_pass() -> None:
    chosen = child_environment(CALLER, named=["JUDGE_KEY", "ABSENT"])
    assert chosen["PATH"] == "/bin"
    assert chosen["LC_ALL"] == "C.UTF-8"
    assert chosen["JUDGE_KEY"] == "named by the config"
    assert not {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GRADUS_DEATH_PIPE"} & chosen.keys()


@pytest.mark.shows("SEC10")
def test_tokens_are_no_part_of_what_programs_inherit() -> None:
    assert not {INFERENCE_TOKEN_VARIABLE, "HF_TOKEN"} & child_environment(CALLER, named=[]).keys()


def test_the_mark_of_the_launch_passes_so_that_what_is_left_can_be_found() -> None:
    assert child_environment(CALLER, named=[])["GRADUS_LAUNCH"] == "7.8"


def test_whom_to_believe_on_other_nodes_passes() -> None:
    assert child_environment(CALLER, named=[])["GRADUS_AUTHORITY"] == "/run/authority.pem"


@pytest.mark.shows("SEC2")
def test_a_worker_gets_the_tokens_and_the_keys_that_the_config_names() -> None:
    secrets = environment_secrets(CALLER, keys=["JUDGE_KEY", "ABSENT"], inference_token="mine")
    assert secrets == {
        INFERENCE_TOKEN_VARIABLE: "mine",
        "JUDGE_KEY": "named by the config",
    }
    named = environment_secrets(CALLER, keys=["HF_TOKEN"], inference_token=None)
    assert named == {"HF_TOKEN": "of the hub"}


@pytest.mark.shows("SEC2")
def test_the_token_of_another_run_never_passes() -> None:
    assert INFERENCE_TOKEN_VARIABLE not in environment_secrets(
        CALLER, keys=[INFERENCE_TOKEN_VARIABLE], inference_token=None
    )


@pytest.mark.shows("SEC37")
def test_telemetry_is_off_whatever_the_caller_says() -> None:
    assert child_environment({"DO_NOT_TRACK": "0"}, named=["DO_NOT_TRACK"])["DO_NOT_TRACK"] == "1"


HIDING = """
import os, subprocess, sys
from gradus.environments.variables import hide_variables

hide_variables({"HF_TOKEN": "secret", "UNUSED": "x"})
assert os.environ["HF_TOKEN"] == os.getenv("HF_TOKEN") == "secret"
assert "HF_TOKEN" in os.environ
assert "HF_TOKEN" not in {**os.environ} and "HF_TOKEN" not in os.environ.copy()
assert "HF_TOKEN" not in list(os.environ)
for env in (None, dict(os.environ), os.environ.copy()):
    program = [sys.executable, "-c", "import os; print(os.environ.get('HF_TOKEN'))"]
    assert subprocess.run(program, env=env, capture_output=True, check=True).stdout == b"None\\n"
assert os.environ.pop("UNUSED", None) == "x" and "UNUSED" not in os.environ
os.environ["HF_TOKEN"] = "mine"
assert os.environ["HF_TOKEN"] == "mine"
"""


@pytest.mark.shows("SEC10")
def test_a_hidden_variable_is_read_by_name_and_inherited_by_nobody() -> None:
    variables = {**os.environ, "HF_TOKEN": "secret"}
    subprocess.run([sys.executable, "-c", HIDING], env=variables, check=True, timeout=60)
