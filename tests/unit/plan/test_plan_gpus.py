"""Which GPUs the processes of a plan see, on machines that a test makes up."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from configs import RUN_TOML, build_run_config, build_sft_config
from secured_servers import OwnAuthority

from gradus.config import InferenceProcessConfig, ReplayConfig, RunConfig, StrictConfig, load_config
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.launch.resume import changed_settings
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.machine import check
from gradus.plan.processes import Machine, plan_config
from gradus.plan.show import describe_config
from gradus.processes.secured import AUTHORITY_VARIABLE
from gradus.run.paths import RunDirectory

GIB = 1 << 30
RUN_DIR = RunDirectory(Path("/runs/demo"))


def gpus(*devices: str) -> FoundGpus:
    return FoundGpus(tuple(Gpu(device, "NVIDIA A100", 80 * GIB) for device in devices))


def machine(*devices: str, **variables: str) -> Machine:
    found = gpus(*devices) if devices else FoundGpus(why_none="none")
    return Machine("/bin/python", 8, {"PATH": "/bin", **variables}, found)


def seen(config: Any, on: Machine) -> dict[str, str | None]:
    """Process → its CUDA_VISIBLE_DEVICES; None where it has none."""
    plan = plan_config(config, on, RUN_DIR, 1)
    specs = [spec for stage in plan.stages for spec in stage]
    return {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs}


def test_each_process_sees_its_own_gpus_and_the_others_none() -> None:
    assert seen(build_run_config(), machine("0", "1")) == {
        "inference": "0",
        "env_gradus-reverse-text": "",
        "trainer": "1",
        "orchestrator": "",
    }


def test_eight_gpus_go_to_the_parts_that_the_config_counts() -> None:
    changes = {"trainer": {"num_processes": 4}, "inference": {"tensor_parallel_size": 4}}
    found = seen(build_run_config(changes), machine(*"01234567"))
    assert (found["inference"], found["trainer"]) == ("0,1,2,3", "4,5,6,7")


def test_the_list_of_the_shell_is_counted_from_zero() -> None:
    changes = {"trainer": {"gpus": [0]}, "inference": {"gpus": [1]}}
    on = machine("2", "GPU-8932", CUDA_VISIBLE_DEVICES="2,GPU-8932")
    found = seen(build_run_config(changes), on)
    assert (found["inference"], found["trainer"]) == ("GPU-8932", "2")


def test_without_gpus_the_engine_and_the_trainer_see_what_the_shell_sees() -> None:
    found = seen(build_run_config(), machine(CUDA_VISIBLE_DEVICES="5"))
    assert (found["inference"], found["trainer"]) == ("5", "5")


def test_replicas_of_vllm_count_as_its_gpus() -> None:
    changes = {"inference": {"extra_args": {"data_parallel_size": 2}, "tensor_parallel_size": 2}}
    assert seen(build_run_config(changes), machine(*"01234567"))["trainer"] == "4"
    changes["inference"]["gpus"] = [0, 1]
    with pytest.raises(ConfigError, match=r"data_parallel_size = 4 computes on 4 GPUs"):
        seen(build_run_config(changes), machine(*"01234567"))


def test_each_replica_has_gpus_of_its_own() -> None:
    changes: dict[str, Any] = {"inference": {"replicas": 2, "tensor_parallel_size": 2}}
    found = seen(build_run_config(changes), machine(*"01234567"))
    assert (found["inference_0"], found["inference_1"], found["trainer"]) == ("0,1", "2,3", "4")
    changes["inference"]["gpus"] = [3, 2, 1, 0]
    found = seen(build_run_config(changes), machine(*"01234567"))
    assert (found["inference_0"], found["inference_1"], found["trainer"]) == ("3,2", "1,0", "4")


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"gpus": [0, 0]}, "names a GPU twice"),
        ({"gpus": [0]}, r"inference.replicas x inference.tensor_parallel_size = 2 computes on 2"),
        ({"gpus": [0, 1]}, "this shell has 2 GPUs .*, and inference wants 2"),
        ({"gpu_sharing": "turns"}, "a trainer waits for one engine to leave its GPU"),
    ],
)
def test_replicas_that_cannot_have_their_gpus_are_refused(chosen: Any, says: str) -> None:
    config = build_run_config({"inference": {"replicas": 2, **chosen}})
    with pytest.raises(ConfigError, match=says):
        seen(config, machine("0", "1"))


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"replicas": 2}, "replicas: 2: the servers of inference.addresses"),
        ({"gpus": [0]}, r"gpus: \[0\]: the servers of inference.addresses"),
        ({"gpu_sharing": "memory"}, "started by others, and the run starts none"),
    ],
)
def test_servers_of_others_and_own_ones_contradict_each_other(chosen: Any, says: str) -> None:
    config = {"inference": {"addresses": "servers.txt", **chosen}}
    with pytest.raises(ConfigError, match=says):
        plan_config(build_run_config(config), machine(), RUN_DIR, 1)


def test_a_broadcast_to_servers_of_others_is_refused_and_never_chosen() -> None:
    elsewhere: dict[str, Any] = {"inference": {"addresses": "servers.txt"}}
    broadcast = elsewhere | {"trainer": {"weight_transfer": "broadcast"}}
    with pytest.raises(
        ConfigError, match=r"broadcast with inference.addresses: a version is sent once"
    ):
        plan_config(build_run_config(broadcast), machine(), RUN_DIR, 1)
    plan = plan_config(build_run_config(elsewhere), machine("0", "1"), RUN_DIR, 1)
    names = [spec.name for stage in plan.stages for spec in stage]
    assert names == ["env_gradus-reverse-text", "trainer", "orchestrator"]
    assert plan.configs["run"].trainer.weight_transfer == "filesystem"  # type: ignore[attr-defined]
    server = plan.configs["server"]
    assert isinstance(server, InferenceProcessConfig)
    assert (server.inference.addresses, server.awaits_version) == (None, True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no file '{file}'; make it"),
        ("http://a:1\n\n10.0.0.7:80\n", "line 3: '10.0.0.7:80' is not the address of a server"),
        ("http://a..b:8000\n", "line 1: 'http://a..b:8000' is not the address"),
        ("http://a:99999\n", "line 1: 'http://a:99999' is not the address"),
        ("http://a:1 # one\nhttp://a:1\n", "line 2: http://a:1 stands on line 1 already"),
        ("# none yet\n", None),
        ("", None),
    ],
)
def test_the_file_of_servers_is_looked_at_before_the_start(
    tmp_path: Path, content: str | None, says: str | None
) -> None:
    file = tmp_path / "servers.txt"
    if content is not None:
        file.write_text(content)
    config = build_run_config({"inference": {"addresses": str(file)}})
    problems = check(config, gpus=FoundGpus())
    found = [it.message for it in problems if it.path == ("inference", "addresses")]
    if says is None:
        assert found == []
    else:
        (text,) = found
        assert says.format(file=file) in text


OWN, OLD = OwnAuthority(), OwnAuthority(days=(-9, -8))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (OWN.certificate, None),
        (OWN.certificate + OLD.certificate, None),
        (None, "cannot be read (No such file or directory)"),
        (b"not one\n", "holds no certificate"),
        (b"", "holds no certificate"),
        (OWN.server(), "holds a private key"),
        (OLD.certificate, "has expired"),
    ],
)
def test_who_signs_the_certificates_of_servers_is_looked_at_before_the_start(
    tmp_path: Path, content: bytes | None, says: str | None
) -> None:
    servers, file = tmp_path / "servers.txt", tmp_path / "authority.pem"
    servers.write_text("https://a:1\n")
    if content is not None:
        file.write_bytes(content)
    given = {"inference": {"addresses": str(servers), "authority": str(file)}}
    found = [it.message for it in check(build_run_config(given), gpus=FoundGpus())]
    about = [it for it in found if str(file) in it]
    assert [says in it for it in about if says] == [True] * (says is not None)
    assert len(about) == (says is not None)


def test_a_server_without_encryption_is_refused_where_an_authority_is_named(tmp_path: Path) -> None:
    servers, file = tmp_path / "servers.txt", tmp_path / "authority.pem"
    servers.write_text("https://a:1\nhttp://b:1\n")
    file.write_bytes(OWN.certificate)
    given = {"inference": {"addresses": str(servers), "authority": str(file)}}
    found = [it.message for it in check(build_run_config(given), gpus=FoundGpus())]
    assert [it for it in found if "line 2: http://b:1 would get the run's tokens" in it]


def test_an_authority_for_servers_that_nobody_asks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inference.authority: 'a\.pem'"):
        plan_config(build_run_config({"inference": {"authority": "a.pem"}}), machine(), RUN_DIR, 1)


def test_all_who_ask_servers_of_others_know_whom_to_trust() -> None:
    given = {"inference": {"addresses": "servers.txt", "authority": "a.pem"}}
    plan = plan_config(build_run_config(given), machine(), RUN_DIR, 1)
    for name in ("orchestrator", "env_gradus-reverse-text"):
        assert plan.spec(name).env[AUTHORITY_VARIABLE] == str(Path("a.pem").absolute())


def test_a_broadcast_to_replicas_is_refused_and_never_chosen() -> None:
    changes: dict[str, Any] = {"inference": {"replicas": 2}}
    plan = plan_config(build_run_config(changes), machine(*"012"), RUN_DIR, 1)
    assert plan.launched.trainer.weight_transfer == "filesystem"  # type: ignore[attr-defined]
    changes["trainer"] = {"weight_transfer": "broadcast"}
    with pytest.raises(
        ConfigError, match=r"broadcast with inference.replicas = 2: .*use filesystem"
    ):
        seen(build_run_config(changes), machine(*"012"))


def test_replicas_without_gpus_share_cores_and_count_up_from_a_port() -> None:
    config = build_run_config({"inference": {"replicas": 2, "port": 8000}})
    plan = plan_config(config, machine(), RUN_DIR, 1)
    serving = [spec for spec in plan.stages[0] if spec.name.startswith("inference")]
    assert [spec.name for spec in serving] == ["inference_0", "inference_1"]
    assert [spec.env["OMP_NUM_THREADS"] for spec in serving] == ["1", "1"]
    assert [spec.log.name for spec in serving] == ["inference_0.log", "inference_1.log"]
    ports = [plan.configs[spec.name].inference.port for spec in serving]  # type: ignore[attr-defined]
    assert ports == [8000, 8001]
    text = "\n".join(describe_config(config))
    assert "inference_1              vLLM, auto, 127.0.0.1, 8001" in text


def test_a_trainer_without_an_engine_takes_the_first_gpus(tmp_path: Path) -> None:
    assert seen(build_sft_config({"num_processes": 2}), machine(*"0123")) == {"trainer": "0,1"}
    replay = ReplayConfig(build_run_config(), tmp_path, 3)
    assert seen(replay, machine("0"))["trainer"] == "0"


def test_variables_that_place_a_process_by_hand_are_refused() -> None:
    own = {"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}
    for changes in ({"trainer": own}, {"inference": own}):
        with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES.*trainer.gpus and inference"):
            seen(build_run_config(changes), machine("0", "1"))


def test_an_environment_that_needs_a_gpu_is_given_one_by_name() -> None:
    env = [{"id": "gradus-reverse-text", "env_vars": {"CUDA_VISIBLE_DEVICES": "7"}}]
    config = build_run_config({"orchestrator": {"train": {"env": env}}})
    assert seen(config, machine(*"01234567"))["env_gradus-reverse-text"] == "7"
    env = [{"id": "gradus-reverse-text", "pass_env": ["CUDA_VISIBLE_DEVICES"]}]
    config = build_run_config({"orchestrator": {"train": {"env": env}}})
    on = machine("0", "1", CUDA_VISIBLE_DEVICES="0,1")
    assert seen(config, on)["env_gradus-reverse-text"] == "0,1"


def refused(text: str, found: FoundGpus, tmp_path: Path, **options: bool) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", str(file)], check=partial(check, gpus=found, **options))
    return str(caught.value)


def test_a_refused_list_names_its_file_and_line(tmp_path: Path) -> None:
    text = f"{RUN_TOML}[trainer]\ngpus = [0, 1]\n"
    told = refused(text, gpus("0", "1", "2"), tmp_path)
    assert f"{tmp_path}/run.toml:7: trainer.gpus: [0, 1] has 2 GPUs" in told


@pytest.mark.parametrize("written", ['"all"', "2", "[true]", '["0"]', "[0.5]"])
def test_what_is_no_list_of_numbers_is_refused_by_its_key(written: str, tmp_path: Path) -> None:
    told = refused(f"{RUN_TOML}[trainer]\ngpus = {written}\n", gpus("0", "1"), tmp_path)
    assert "trainer.gpus" in told
    assert "union" not in told
    assert "literal" not in told


def test_one_gpu_serves_a_trainer_that_is_started_alone(tmp_path: Path) -> None:
    assert "gpu_sharing" in refused(RUN_TOML, gpus("0"), tmp_path)
    config = build_run_config()
    alone = check(config, gpus=gpus("0"), is_served=False)
    assert alone == []


def test_the_overview_shows_the_gpus_who_has_them_and_who_idles() -> None:
    lines = describe_config(build_run_config(), gpus(*"0123"))
    assert "gpus: 0, 1, 2, 3: NVIDIA A100, 80.0 GiB" in lines
    assert any(line.startswith("  trainer ") and line.endswith(", GPU 1") for line in lines)
    assert any(line.startswith("  inference ") and line.endswith(", GPU 0") for line in lines)
    assert lines[-1].startswith("note: idle GPUs: 2, 3; raise")


def test_the_overview_says_why_there_is_no_gpu() -> None:
    lines = describe_config(build_run_config(), FoundGpus(why_none="nvidia-smi is not on the PATH"))
    assert "gpus: none: nvidia-smi is not on the PATH" in lines


def test_a_run_goes_on_with_other_gpus_and_says_so(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)

    def launched(numbers: list[int]) -> StrictConfig:
        config = build_run_config({"trainer": {"gpus": numbers}})
        return plan_config(config, machine(*"0123"), run_dir, 1).configs["run"]

    run_dir.config.mkdir()
    write_json(run_dir.config / "run.json", launched([1]).model_dump(mode="json"))
    changed = changed_settings(run_dir, launched([3]), is_fresh=False)
    assert changed == ["trainer.gpus was [1] and is [3]"]


def test_a_shared_gpu_is_seen_by_both_and_told() -> None:
    config = build_run_config({"inference": {"gpu_sharing": "turns"}})
    found = seen(config, machine("3"))
    assert (found["inference"], found["trainer"]) == ("3", "3")
    (note,) = [line for line in describe_config(config, gpus("3")) if line.startswith("note: ")]
    assert note == (
        "note: engine and trainer share GPU 0; the engine sleeps while the trainer learns"
    )


def test_only_a_trainer_that_shares_with_an_engine_takes_turns(tmp_path: Path) -> None:
    def sleep_seconds(config: Any) -> Any:
        trainer: Any = plan_config(config, machine("0"), RUN_DIR, 1).configs["run"]
        return trainer.engine_sleep_seconds

    config = build_run_config({"inference": {"gpu_sharing": "turns"}})
    assert sleep_seconds(config) == 4 * 3600
    assert sleep_seconds(ReplayConfig(config, tmp_path, 3)) is None
    shared = build_run_config({"inference": {"gpu_sharing": "memory"}})
    assert sleep_seconds(shared) is None
