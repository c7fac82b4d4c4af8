"""What of the caller's environment reaches a process."""

from __future__ import annotations

import pytest

from gradus.plan.variables import (
    CoreShares,
    inference_variables,
    orchestrator_variables,
    share_cores,
    source_variables,
    tracker_variables,
    trainer_variables,
)


@pytest.mark.parametrize(
    "name", ["AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "CUDA_API_TOKEN", "MY_VAR"]
)
def test_what_is_not_on_the_list_stays_outside(name: str) -> None:
    assert name not in inference_variables({name: "x"}, {})


def test_what_programs_need_passes() -> None:
    caller = {"PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "https_proxy": "http://proxy"}
    assert caller.items() <= source_variables(caller, {}, verifiers={}).items()


def test_the_password_of_a_proxy_stays_outside_of_environments_unless_it_is_named() -> None:
    caller = {"HTTPS_PROXY": "http://me:secret@proxy:8080", "http_proxy": "me:p@ss@proxy"}
    assert (
        source_variables(caller, {}, verifiers={}).items()
        >= {
            "HTTPS_PROXY": "http://proxy:8080",
            "http_proxy": "proxy",
        }.items()
    )
    passed = source_variables(caller, {}, verifiers={}, passed=["HTTPS_PROXY"])
    assert passed["HTTPS_PROXY"] == caller["HTTPS_PROXY"]
    assert inference_variables(caller, {})["HTTPS_PROXY"] == caller["HTTPS_PROXY"]


@pytest.mark.parametrize("named", ["HF_TOKEN", "HF_TOKEN_PATH", "MY_KEY"])
def test_an_environment_gets_the_secrets_that_the_config_passes_and_no_other(named: str) -> None:
    caller = {"HF_TOKEN": "t", "HF_TOKEN_PATH": "/t", "MY_KEY": "k"}
    assert not source_variables(caller, {}, verifiers={}).keys() & caller.keys()
    passed = source_variables(caller, {}, verifiers={}, passed=[named])
    assert passed.keys() & caller.keys() == {named}
    assert inference_variables(caller, {})["HF_TOKEN"] == "t"


def test_the_config_wins_over_defaults_and_defaults_over_the_caller() -> None:
    caller = {"TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "9"}
    env = orchestrator_variables(caller, {"PYTHONUNBUFFERED": "0"}, config={})
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["PYTHONUNBUFFERED"] == "0"


def test_the_key_of_a_reference_model_reaches_the_orchestrator_that_asks_it() -> None:
    algo = {"type": "opd", "reference": {"api_key_var": "TEACHER_KEY"}}
    caller = {"TEACHER_KEY": "k", "OTHER_KEY": "o"}
    env = orchestrator_variables(caller, {}, config={"algorithms": [algo]})
    assert env["TEACHER_KEY"] == "k"
    assert "OTHER_KEY" not in env


def test_a_named_variable_passes_only_to_the_source_that_names_it() -> None:
    caller = {"JUDGE_KEY": "x"}
    assert "JUDGE_KEY" in source_variables(
        caller, {}, verifiers={"judge": {"client": {"api_key_var": "JUDGE_KEY"}}}
    )
    assert "JUDGE_KEY" not in source_variables(caller, {}, verifiers={})


@pytest.mark.parametrize("cores", range(4, 130))
def test_trainer_and_engine_together_leave_cores_for_the_rest_of_the_run(cores: int) -> None:
    shares = share_cores(cores, trains=True, num_engines=1)
    assert shares.engine is not None
    assert shares.engine >= 1
    assert 0 <= shares.trainer - shares.engine <= 1
    assert 1 <= cores - shares.trainer - shares.engine <= 1 + cores // 8


@pytest.mark.parametrize(
    ("cores", "trains", "engines"), [(2, True, 1), (3, True, 1), (64, True, 0), (64, False, 1)]
)
def test_a_side_that_is_alone_or_has_no_half_counts_on_every_core(
    cores: int, trains: bool, engines: int
) -> None:
    assert share_cores(cores, trains=trains, num_engines=engines) == CoreShares(cores)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("cores", [2, 3, 8, 16])
def test_replicas_share_what_one_engine_would_have(cores: int, trains: bool) -> None:
    shares = share_cores(cores, trains=trains, num_engines=2)
    alone = share_cores(cores, trains=trains, num_engines=1)
    assert shares.engine is not None
    assert 1 <= shares.engine <= max(1, (alone.engine or cores) // 2)
    assert shares.trainer == alone.trainer


def test_the_trainer_s_memory_grows_in_place_unless_the_user_says_otherwise() -> None:
    def variables(caller: dict[str, str], own: dict[str, str]) -> dict[str, str]:
        return trainer_variables(caller, own, num_cores=2, num_processes=1)

    assert variables({}, {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    for found in (variables(older, {}), variables({}, older)):
        assert "PYTORCH_ALLOC_CONF" not in found
        assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert variables({}, {"PYTORCH_ALLOC_CONF": ""})["PYTORCH_ALLOC_CONF"] == ""


def test_the_engine_s_memory_pool_stays_as_vllm_sets_it() -> None:
    """Sleeping does without segments that grow."""
    assert "PYTORCH_ALLOC_CONF" not in inference_variables({}, {})


def test_a_tracker_gets_the_keys_of_its_service_and_what_the_config_passes_and_no_others() -> None:
    caller = {"WANDB_API_KEY": "w", "MLFLOW_TRACKING_URI": "u", "OPENAI_API_KEY": "o", "MINE": "m"}
    found = tracker_variables(caller, passed=["MINE"])
    assert caller.keys() & found.keys() == {"WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MINE"}
