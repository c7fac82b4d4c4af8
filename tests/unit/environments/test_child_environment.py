"""Which variables reach an environment's code."""

from __future__ import annotations

from gradus.environments.child_environment import (
    INFERENCE_TOKEN_VAR,
    child_environment,
)

CALLER = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C.UTF-8",
    "WANDB_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GRADUS_DEATH_PIPE": "5",
    "GRADUS_LAUNCH": "7.8",
    INFERENCE_TOKEN_VAR: "of another run",
    "JUDGE_KEY": "named by the config",
}


def test_only_known_and_named_variables_pass() -> None:
    chosen = child_environment(CALLER, named=["JUDGE_KEY", "ABSENT"], inference_token="mine")
    assert chosen["PATH"] == "/bin"
    assert chosen["LC_ALL"] == "C.UTF-8"
    assert chosen["JUDGE_KEY"] == "named by the config"
    assert chosen[INFERENCE_TOKEN_VAR] == "mine"
    assert not {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GRADUS_DEATH_PIPE"} & chosen.keys()


def test_the_mark_of_the_launch_passes_so_that_what_is_left_can_be_found() -> None:
    assert child_environment(CALLER, named=[], inference_token=None)["GRADUS_LAUNCH"] == "7.8"


def test_the_token_of_another_run_never_passes() -> None:
    assert INFERENCE_TOKEN_VAR not in child_environment(CALLER, named=[], inference_token=None)


def test_telemetry_is_off_whatever_the_caller_says() -> None:
    chosen = child_environment({"DO_NOT_TRACK": "0"}, named=["DO_NOT_TRACK"], inference_token=None)
    assert chosen["DO_NOT_TRACK"] == "1"
