"""A config becomes processes, files and environments; nothing is started here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradus.config import (
    EvalSourcesConfig,
    InferenceConfig,
    ModelConfig,
    RunConfig,
    SftConfig,
    SftDataConfig,
    SftEvalConfig,
    TrainerConfig,
    resolve,
)
from gradus.config.schema.environment import (
    EvalEnvironmentConfig,
    RoleConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.orchestrator import OrchestratorConfig, TrainSourcesConfig
from gradus.errors import ConfigError
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.processes import (
    LaunchPlan,
    Machine,
    config_file,
    cores_of,
    describe_processes,
    plan_config,
)
from gradus.plan.variables import CoreShares
from gradus.processes.started import ProcessSpec
from gradus.run.paths import RunDirectory

RUN_DIR = RunDirectory(Path("/runs/demo"))
CALLER = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "HF_TOKEN": "canary-hub",
    "WANDB_API_KEY": "canary-tracker",
    "JUDGE_KEY": "canary-judge",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_API_KEY": "canary-vllm",
    "OMP_NUM_THREADS": "64",
}
MACHINE = Machine(python="/bin/python", num_cores=8, environment=CALLER)


def build_config(
    *sources: TrainEnvironmentConfig,
    trainer: TrainerConfig | None = None,
    inference: InferenceConfig | None = None,
) -> RunConfig:
    env = list(sources) or [TrainEnvironmentConfig(id="reverse-text")]
    return RunConfig(
        model=ModelConfig(name="tiny"),
        max_steps=3,
        orchestrator=OrchestratorConfig(train=TrainSourcesConfig(env=env)),
        trainer=trainer or TrainerConfig(),
        inference=inference or InferenceConfig(),
    )


def plan_of(config: RunConfig) -> LaunchPlan:
    return plan_config(config, MACHINE, RUN_DIR, 4)


def spec_of(plan: LaunchPlan, name: str) -> ProcessSpec:
    (spec,) = [spec for stage in plan.stages for spec in stage if spec.name == name]
    return spec


def test_servers_start_before_the_processes_that_use_them() -> None:
    plan = plan_of(build_config())
    names = [[spec.name for spec in stage] for stage in plan.stages]
    assert names == [["inference", "env_reverse-text"], ["trainer", "orchestrator"]]
    assert [spec.finishes for stage in plan.stages for spec in stage] == [False, False, True, True]


def test_every_process_has_its_config_log_and_ready_file() -> None:
    plan = plan_of(build_config())
    specs = [spec for stage in plan.stages for spec in stage]
    own = {"trainer": "run", "orchestrator": "run"}
    assert {own.get(spec.name, spec.name) for spec in specs} == set(plan.configs)
    for spec in specs:
        assert spec.argv[-1] == str(config_file(RUN_DIR, own.get(spec.name, spec.name)))
        assert spec.ready_file == RUN_DIR.ready_file(spec.name)
    logs = {spec.name: str(spec.log.relative_to(RUN_DIR.root)) for spec in specs}
    assert logs["inference"] == "logs/inference.log"
    assert logs["env_reverse-text"] == "logs/envs/train/reverse-text.log"


def test_commands_name_the_role_and_its_config() -> None:
    plan = plan_of(build_config())
    assert spec_of(plan, "env_reverse-text").argv == (
        *("/bin/python", "-P", "-m", "gradus.cli.main", "env-server", "@"),
        "/runs/demo/config/env_reverse-text.json",
    )


def test_an_environment_may_have_an_interpreter_of_its_own() -> None:
    other = TrainEnvironmentConfig(id="words", python="/words/bin/python")
    plan = plan_of(build_config(TrainEnvironmentConfig(id="reverse-text"), other))
    assert spec_of(plan, "env_words").argv[:5] == (
        *("/words/bin/python", "-P", "-m", "gradus.cli.main", "env-server"),
    )
    others = [spec for stage in plan.stages for spec in stage if spec.name != "env_words"]
    assert {spec.argv[0] for spec in others} == {"/bin/python"}


def test_the_step_to_go_on_from_is_told_to_who_works_and_stands_in_no_file() -> None:
    plan = plan_config(build_config(), MACHINE, RUN_DIR, 4, 2)
    told = {spec.name for stage in plan.stages for spec in stage if "--resume-step" in spec.argv}
    assert told == {"trainer", "orchestrator"}
    assert spec_of(plan, "trainer").argv[-2:] == ("--resume-step", "2")
    assert "resume_step" not in str([config.without_secrets() for config in plan.configs.values()])


def test_a_variable_passed_by_name_reaches_the_environment_and_no_file() -> None:
    source = TrainEnvironmentConfig(id="words", pass_env=["MY_KEY"])
    config = build_config(source)
    machine = replace(MACHINE, environment={**MACHINE.environment, "MY_KEY": "hush-4711"})
    plan = plan_config(config, machine, RUN_DIR, 4)
    assert spec_of(plan, "env_words").env["MY_KEY"] == "hush-4711"
    assert all("MY_KEY" not in spec_of(plan, name).env for name in ("trainer", "orchestrator"))
    assert all("hush-4711" not in dumped.model_dump_json() for dumped in plan.configs.values())
    assert "hush-4711" not in "\n".join(describe_processes(plan))


def test_a_variable_passed_by_name_must_be_there() -> None:
    source = TrainEnvironmentConfig(id="words", pass_env=["MY_KEY"])
    with pytest.raises(ConfigError, match="source 'words': pass_env names MY_KEY, which this"):
        plan_of(build_config(source))


def test_every_environment_of_a_run_is_started_anew_when_it_fails() -> None:
    config = build_config()
    evaluation = EvalSourcesConfig(env=[EvalEnvironmentConfig(id="reverse-text")])
    orchestrator = config.orchestrator.model_copy(update={"eval": evaluation})
    plan = plan_of(config.model_copy(update={"orchestrator": orchestrator}))
    restarts = {spec.name: spec.restarts for stage in plan.stages for spec in stage}
    assert restarts == {
        "inference": 0,
        "env_reverse-text": 3,
        "eval_reverse-text": 3,
        "trainer": 0,
        "orchestrator": 0,
    }


def test_several_ranks_start_under_torchrun_on_loopback() -> None:
    spec = spec_of(plan_of(build_config(trainer=TrainerConfig(num_processes=2))), "trainer")
    assert spec.argv[1:9] == (
        *("-P", "-m", "gradus.trainer.entry.ranks", "--rdzv-backend=bound"),
        *("--rdzv-endpoint=127.0.0.1", "--local-addr=127.0.0.1", "--log-dir=/dev/null"),
        "--nproc-per-node=2",
    )
    assert spec.argv[9:] == (
        *("-m", "gradus.cli.main", "trainer", "@"),
        "/runs/demo/config/run.json",
    )
    assert spec.env["OMP_NUM_THREADS"] == "1"
    assert (spec.env["GLOO_SOCKET_IFNAME"], spec.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_threads_are_planned_and_can_be_overridden() -> None:
    plan = plan_of(build_config())
    threads = {
        spec.name: spec.env.get("OMP_NUM_THREADS") for stage in plan.stages for spec in stage
    }
    assert threads == {
        "inference": "3",
        "env_reverse-text": "1",
        "trainer": "3",
        "orchestrator": "1",
    }
    chosen = {"OMP_NUM_THREADS": "5"}
    own = build_config(
        trainer=TrainerConfig(env_vars=chosen), inference=InferenceConfig(env_vars=chosen)
    )
    for name in ("trainer", "inference"):
        assert spec_of(plan_of(own), name).env["OMP_NUM_THREADS"] == "5"


def test_a_trainer_on_gpus_and_one_without_an_engine_share_no_cores() -> None:
    gpus = FoundGpus(tuple(Gpu(str(n), "NVIDIA L4", None) for n in range(2)))
    served = resolve(build_config(), run_dir=Path("/runs/demo"), term=1)
    alone = replace(served, inference=())
    assert cores_of(served, replace(MACHINE, gpus=gpus)) == CoreShares(8)
    assert cores_of(alone, MACHINE) == CoreShares(8)


def test_each_role_gets_only_the_secrets_that_it_needs() -> None:
    source = TrainEnvironmentConfig(
        id="reverse-text",
        agents={
            "agent": RoleConfig(),
            "judge": RoleConfig(
                model="big", base_url="https://models.test/v1", api_key_var="JUDGE_KEY"
            ),
        },
    )
    plan = plan_of(build_config(source))
    canaries = {
        spec.name: {value for value in spec.env.values() if value.startswith("canary")}
        for stage in plan.stages
        for spec in stage
    }
    assert canaries == {
        "inference": {"canary-hub"},
        "env_reverse-text": {"canary-judge"},
        "trainer": {"canary-hub"},
        "orchestrator": {"canary-hub"},
    }


def test_settings_of_libraries_reach_the_roles_that_compute() -> None:
    plan = plan_of(build_config())
    with_setting = [
        spec.name for stage in plan.stages for spec in stage if "VLLM_LOGGING_LEVEL" in spec.env
    ]
    assert with_setting == ["inference", "trainer"]
    assert all(spec.env["LC_ALL"] == "C.UTF-8" for stage in plan.stages for spec in stage)


def test_variables_of_the_config_reach_their_process_but_no_file() -> None:
    config = build_config(inference=InferenceConfig(env_vars={"VLLM_X": "canary-own"}))
    plan = plan_of(config)
    assert spec_of(plan, "inference").env["VLLM_X"] == "canary-own"
    assert "VLLM_X" not in spec_of(plan, "trainer").env


def test_a_score_may_hold_the_orchestrator_and_nobody_else() -> None:
    plan = plan_of(build_config())
    assert spec_of(plan, "orchestrator").blocked_seconds == 900.0
    assert spec_of(plan, "trainer").blocked_seconds == 0.0


@pytest.mark.parametrize(
    ("own", "variable"), [({}, "VLLM_RPC_BASE_PATH"), ({"VLLM_RPC_BASE_PATH": "/mine"}, None)]
)
def test_the_engine_has_a_private_folder_for_its_sockets(
    own: dict[str, str], variable: str | None
) -> None:
    config = build_config(inference=InferenceConfig(env_vars=own))
    plan = plan_of(config)
    assert spec_of(plan, "inference").temporary_variable == variable
    assert spec_of(plan, "trainer").temporary_variable is None
    assert "canary" not in str([config.without_secrets() for config in plan.configs.values()])


def test_the_description_shows_commands_and_no_values_of_variables() -> None:
    text = "\n".join(describe_processes(plan_of(build_config())))
    assert "stage 1, started together:\n  inference" in text
    assert "/bin/python -P -m gradus.cli.main orchestrator @ /runs/demo/config/run.json" in text
    assert "HF_TOKEN" in text
    assert "canary" not in text


@pytest.mark.parametrize(("ranks", "uses_torchrun"), [(1, False), (2, True)])
def test_a_supervised_run_is_one_trainer(ranks: int, uses_torchrun: bool) -> None:
    config = SftConfig(
        model=ModelConfig(name="tiny"),
        data=SftDataConfig(path="words.jsonl"),
        num_processes=ranks,
        env_vars={"MY_FLAG": "1"},
    )
    plan = plan_config(config, MACHINE, RUN_DIR, 1)
    ((spec,),) = plan.stages
    assert spec.name == "trainer"
    assert "sft-trainer" in spec.argv
    assert ("gradus.trainer.entry.ranks" in spec.argv) is uses_torchrun
    assert spec.env["MY_FLAG"] == "1"
    assert spec.finishes


def test_a_supervised_run_with_an_evaluation_starts_what_plays_before_what_trains() -> None:
    config = SftConfig(
        model=ModelConfig(name="tiny"),
        data=SftDataConfig(path="words.jsonl"),
        eval=SftEvalConfig(env=[EvalEnvironmentConfig(id="reverse-text", env_vars={"A": "1"})]),
        inference=InferenceConfig(env_vars={"B": "2"}),
    )
    plan = plan_config(config, MACHINE, RUN_DIR, 1)
    assert [[spec.name for spec in stage] for stage in plan.stages] == [
        ["inference", "eval_reverse-text"],
        ["trainer", "evaluator"],
    ]
    (inference, environment), (trainer, evaluator) = plan.stages
    assert "sft-evaluator" in evaluator.argv
    assert (inference.env["B"], environment.env["A"]) == ("2", "1")
    assert [spec.finishes for stage in plan.stages for spec in stage] == [False, False, True, True]
    assert list(plan.configs) == ["inference", "eval_reverse-text", "run"]
    assert trainer.log.name == "trainer.log"


def test_this_machine_is_described() -> None:
    machine = Machine.current()
    assert machine.num_cores >= 1
    assert Path(machine.python).exists()
