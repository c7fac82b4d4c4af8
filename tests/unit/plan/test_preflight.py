"""What a machine must have, and what is found without importing anything heavy."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import build_eval_config, build_run_config, build_sft_config
from pydantic import ValidationError
from safetensors.numpy import save_file

from gradus.config.resolve import verifiers_config
from gradus.config.schema.environment import TrainEnvironmentConfig
from gradus.config.schema.inference import ServeConfig
from gradus.config.schema.monitor import TensorBoardConfig
from gradus.installed import (
    BUILTIN_ENVIRONMENTS,
    BUILTIN_HARNESSES,
    BUILTIN_TASKSETS,
    builtin_plugins,
    has_module,
    has_plugin,
    installed_id,
    plugin_module,
)
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.show import describe_config


def problems(changes: dict[str, Any] | None = None) -> list[str]:
    return [str(problem) for problem in check(build_run_config(changes))]


def with_env(**source: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"env": [{"id": "gradus-reverse-text", **source}]}}}


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("sides", "is_refused"), [((128, 96), True), ((96, 128), False)])
def test_experts_that_vllm_reads_the_other_way_round_are_refused_before_the_start(
    working_directory: Path, sides: tuple[int, int], *, is_refused: bool
) -> None:
    text = {"hidden_size": 128, "moe_intermediate_size": 96, "norm_topk_prob": True}
    config = {"model_type": "qwen3_vl_moe", "text_config": text}
    (working_directory / "config.json").write_text(json.dumps(config))
    stored = {"model.layers.0.mlp.experts.down_proj": np.zeros((8, *sides), np.float32)}
    save_file(stored, working_directory / "model.safetensors")
    model = {"name": str(working_directory)}
    told = problems({"model": model})
    assert any("its experts lie as transformers saves them" in it for it in told) is is_refused
    served = check(ServeConfig(model=str(working_directory)))
    assert any("experts lie" in str(it) for it in served) is is_refused
    assert not any("experts lie" in str(it) for it in check(build_sft_config({"model": model})))


def test_a_good_config_has_no_problems(working_directory: Path) -> None:
    assert problems() == []
    assert list(working_directory.iterdir()) == []


@pytest.mark.parametrize(
    ("dtypes", "is_refused"),
    [
        ({"inference": {"dtype": "bfloat16"}}, True),
        ({"trainer": {"compute_dtype": "bfloat16"}}, True),
        ({"trainer": {"compute_dtype": "bfloat16"}, "inference": {"dtype": "float32"}}, False),
        ({"trainer": {"compute_dtype": "float32"}}, False),
    ],
)
def test_some_layers_with_state_are_not_sampled_in_bfloat16_whoever_says_it(
    working_directory: Path, dtypes: dict[str, Any], is_refused: bool
) -> None:
    (working_directory / "config.json").write_text('{"model_type": "lfm2"}')
    (working_directory / "model.safetensors").touch()
    found = problems({"model": {"name": str(working_directory)}, **dtypes})
    assert any("write 'float32'" in problem for problem in found) is is_refused


def model_in(folder: Path, config: str) -> dict[str, Any]:
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").touch()
    return {"name": str(folder)}


@pytest.mark.parametrize(("flag", "is_refused"), [("", False), ("avx512_bf16", True)])
def test_auto_is_refused_for_such_layers_only_where_it_means_bfloat16(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch, flag: str, is_refused: bool
) -> None:
    monkeypatch.setattr(Hardware, "current", lambda gpus: Hardware.read(f"flags : {flag}", gpus))
    found = problems({"model": model_in(working_directory, '{"model_type": "lfm2"}')})
    assert any("write 'float32'" in problem for problem in found) is is_refused


def test_what_vllm_cannot_serve_on_cpus_is_not_evaluated_there(working_directory: Path) -> None:
    model = model_in(working_directory, '{"model_type": "bamba"}')
    env = [{"id": "gradus-reverse-text"}]
    evaluation = build_eval_config({"model": model})
    data = {"path": "someone/rows"}
    sft = build_sft_config({"model": model, "data": data})
    measured = build_sft_config({"model": model, "data": data, "eval": {"env": env}})
    for config, is_refused in ((evaluation, True), (sft, False), (measured, True)):
        found = check(config, gpus=FoundGpus())
        assert any("on CPUs vLLM has no such model" in str(it) for it in found) is is_refused
    found = check(evaluation, gpus=FoundGpus((Gpu("0", "NVIDIA L4", None),)))
    assert not any("on CPUs vLLM" in str(it) for it in found)


@pytest.mark.parametrize("name", ["tiny", "tiny/", "./tiny", "models/tiny", "models/deep/tiny"])
def test_a_model_folder_is_found_by_any_path(working_directory: Path, name: str) -> None:
    folder = working_directory / name
    folder.mkdir(parents=True)
    assert "it has no config.json" in problems({"model": {"name": name}})[0]
    (folder / "config.json").write_text("{}")
    assert "has no *.safetensors file" in problems({"model": {"name": name}})[0]
    (folder / "model.safetensors").touch()
    assert problems({"model": {"name": name}}) == []


@pytest.mark.shows("SEC18")
def test_code_comes_from_the_listed_modules_alone() -> None:
    """SEC 18"""
    own = {"trainer": {"loss": {"type": "json.tool:main"}}}
    task = with_env(taskset={"id": "gradus-rows", "reward": "textwrap:dedent"})

    def told(plugins: list[str] | None) -> list[str]:
        found = problems({**own, **task, "launch": {"plugins": plugins}})
        return [text for text in found if "launch.plugins" in text]

    assert told(None) == told(["json", "textwrap"]) == []
    refused = told(["jso", "textwrap"])
    assert len(refused) == 1
    assert "the module 'json.tool' is not on the list" in refused[0]
    assert len(told([])) == 2
    names = ["my-tasks", "json:main", ""]
    assert len([text for text in told(["json", "textwrap", *names]) if "not the name" in text]) == 3


def test_task_sets_of_verifiers_are_on_no_list() -> None:
    """Also beside a game package of the same name, which is installed here."""
    assert "textarena" in builtin_plugins(BUILTIN_TASKSETS)
    assert has_module("textarena")
    found = problems({**with_env(id="textarena"), "launch": {"plugins": []}})
    assert [text for text in found if "launch.plugins" in text] == []


@pytest.mark.shows("SEC19")
def test_code_of_others_comes_from_a_folder_alone(tmp_path: Path) -> None:
    """SEC 19: what the hub holds changes; what somebody has read does not."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text("{}")
    trusted = {"trust_remote_code": True}
    (told,) = problems({"model": {"name": "someone/model", **trusted}})
    assert "hf download someone/model --revision COMMIT" in told
    (told,) = problems({"model": {"name": str(folder), "tokenizer": "a/b", **trusted}})
    assert "whatever code 'a/b' holds" in told
    assert problems({"model": {"name": str(folder), **trusted}}) == []
    settings = {"auto_map": {"AutoModel": "someone/code--modeling.Model"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (told,) = problems({"model": {"name": str(folder), **trusted}})
    assert "config.json of" in told
    assert "takes its code from 'someone/code'" in told


def positions(folder: Path, inference: dict[str, Any] | None = None, **config: Any) -> list[str]:
    """The problems of 4,096 tokens with a model whose config.json says so."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    model = {"name": "./model", "max_length_tokens": 4096}
    return problems({"model": model, "inference": inference or {}})


def test_a_context_beyond_the_models_positions_is_refused(working_directory: Path) -> None:
    folder = working_directory / "model"
    folder.mkdir()
    (problem,) = positions(folder, max_position_embeddings=2048)
    assert problem == (
        "model.max_length_tokens: 4096 is more than the 2048 positions of './model'; lower it"
    )
    assert positions(folder, text_config={"max_position_embeddings": 2048}) == [problem]
    assert positions(folder, max_position_embeddings=4096) == []


@pytest.mark.parametrize(
    ("inference", "rope"),
    [
        ({}, {"rope_type": "yarn", "factor": 4.0}),
        ({}, {"type": "linear", "factor": 4.0}),
        ({}, {"full_attention": {"rope_type": "default"}}),
        ({}, ["no table"]),
        ({"extra_args": {"hf_overrides": {"max_position_embeddings": 4096}}}, {}),
        ({"env_vars": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}, {}),
    ],
)
def test_positions_that_may_reach_further_are_left_to_the_engine(
    working_directory: Path, inference: dict[str, Any], rope: Any
) -> None:
    folder = working_directory / "model"
    folder.mkdir()
    found = positions(folder, inference, max_position_embeddings=2048, rope_parameters=rope)
    assert found == []


def test_a_file_is_no_model_folder(working_directory: Path) -> None:
    (working_directory / "model.gguf").touch()
    assert "no such directory" in problems({"model": {"name": "model.gguf"}})[0]


def test_a_folder_beside_existing_ones_is_no_name_on_the_hub(working_directory: Path) -> None:
    (working_directory / "runs").mkdir()
    assert "no such directory" in problems({"model": {"name": "runs/model"}})[0]
    assert problems({"model": {"name": "someone/model"}}) == []


def test_a_tokenizer_must_be_there_too(working_directory: Path) -> None:
    found = problems({"model": {"name": "someone/tiny", "tokenizer": "./none"}})
    assert found[0].startswith("model.tokenizer: './none': no such directory")


def test_offline_a_model_must_be_in_the_cache(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(working_directory))
    assert "HF_HUB_OFFLINE is set" in problems({"model": {"name": "org/model"}})[0]
    cache = working_directory / "models--org--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    assert problems({"model": {"name": "org/model"}}) == []


def test_a_taken_port_is_named(working_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = problems({"inference": {"port": port}})
    assert len(found) == 1
    assert found[0].startswith(f"inference.port: cannot listen on 127.0.0.1:{port}")
    assert problems({"inference": {"port": port}}) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(working_directory: Path) -> None:
    working_directory.chmod(0o500)
    assert "cannot be written" in problems({"output_dir": str(working_directory / "runs")})[0]


def test_an_environment_of_the_users_is_found_in_the_working_directory(
    working_directory: Path,
) -> None:
    said = problems(with_env(id="my-task"))[0]
    assert f"looked for modules 'my_task' and 'gradus_my_task', also in {working_directory}" in said
    (working_directory / "my_task.py").write_text("raise RuntimeError('never imported')")
    assert problems(with_env(id="my-task")) == []
    assert "my_task" not in sys.modules


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("def score(reply, row, *, scale=1, **others): ...", None),
        ("async def score(prompt, messages=None, trace=None): ...", None),
        ("from elsewhere import score", None),
        ("def score(reply, answer): ...", "asks for 'answer'"),
        ("def score(reply, *, weight): ...", "asks for 'weight'"),
        ("def score(reply, /): ...", "asks for 'reply'"),
        ("def score(reply:", "line 1 is not Python"),
        (None, "no such file"),
    ],
)
def test_a_reward_in_a_file_is_read_before_anything_starts(
    definition: str | None, words: str | None, working_directory: Path
) -> None:
    if definition is not None:
        (working_directory / "mine.py").write_text(definition)
    (working_directory / "rows.jsonl").write_text('{"prompt": "x"}\n')
    taskset = {"path": "rows.jsonl", "reward": {"mine.py:score": 1.0}}
    source = {"id": "jsonl", "taskset": taskset}
    found = problems({"orchestrator": {"train": {"env": [source]}}})
    assert [words in it for it in found] == ([] if words is None else [True])
    assert all(it.startswith("orchestrator.train.env.0.taskset.reward: ") for it in found)


def test_an_environment_elsewhere_needs_nothing_here() -> None:
    others = {"agent": {"model": "m", "base_url": "http://x/v1"}}
    elsewhere = {"id": "not-here", "address": "tcp://10.0.0.1:5000/run", "agents": others}
    changes = with_env()
    changes["orchestrator"]["eval"] = {"env": [elsewhere], "interval_steps": 5}
    assert problems(changes) == []


OWN = "not_here.mine:Own"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"trainer": {"loss": {"type": OWN}}}, "trainer.loss.type"),
        (with_env(algo={"type": OWN}), "orchestrator.train.env.0.algo.type"),
        (with_env(curriculum={"type": OWN}), "orchestrator.train.env.0.curriculum.type"),
        (
            with_env(algo={"type": "echo", "filter": OWN}),
            "orchestrator.train.env.0.algo.filter",
        ),
        (
            {"orchestrator": {**with_env()["orchestrator"], "filters": [{"type": OWN}]}},
            "orchestrator.filters.0.type",
        ),
    ],
)
def test_a_plug_in_whose_module_is_not_there_is_told_with_its_place(
    working_directory: Path, changes: dict[str, Any], place: str
) -> None:
    assert problems(changes) == [
        f"{place}: {OWN!r}: module 'not_here.mine' is not installed; install it or fix it"
    ]
    (working_directory / "not_here").mkdir()
    (working_directory / "not_here" / "mine.py").touch()
    assert problems(changes) == []


def test_all_problems_of_the_machine_are_told_at_once() -> None:
    changes = with_env(id="not-here", agent={"harness": {"id": "nor-this"}})
    assert len(problems({**changes, "model": {"name": "./none"}})) == 3


def test_plugins_that_ship_with_verifiers_are_known() -> None:
    assert "null" in builtin_plugins(BUILTIN_HARNESSES)
    assert "utils" not in builtin_plugins(BUILTIN_HARNESSES)
    assert "textarena" in builtin_plugins(BUILTIN_TASKSETS)
    assert has_plugin("best-of-n", (BUILTIN_ENVIRONMENTS,))


def test_an_id_of_the_hub_is_found_by_its_name() -> None:
    assert plugin_module("someone/Gradus-Reverse-Text@1.2") == "gradus_reverse_text"
    assert has_plugin("someone/gradus-reverse-text@1.2", (BUILTIN_TASKSETS,))


@pytest.mark.parametrize(
    "written",
    [
        *("primeintellect/reverse-text", "reverse-text-v1", "primeintellect/reverse_text-v1"),
        *("reverse-text@1", "primeintellect/reverse-text@0.1.4"),
    ],
)
def test_an_id_as_other_systems_write_it_finds_our_task_set(written: str) -> None:
    assert installed_id(written) == "gradus-reverse-text"
    assert has_plugin(written, [BUILTIN_TASKSETS])
    assert installed_id("primeintellect/not-there-v1") == "primeintellect/not-there-v1"


def test_a_harness_as_other_systems_write_it_is_found(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name that verifiers gave `bash` before, with a version, inside a package."""
    kinds = (BUILTIN_HARNESSES,)
    assert installed_id("default", kinds) == installed_id("default@1.0", kinds) == "bash"
    assert installed_id("default") == "default", "only a harness was ever called so"
    package = working_directory / "my_agents" / "play"
    package.mkdir(parents=True)
    (package / "shell.py").touch()
    monkeypatch.syspath_prepend(str(working_directory))
    for written in ("default", "bash@1.0", "my_agents.play.shell", "verifiers.v1.harnesses.bash"):
        assert problems(with_env(agent={"harness": {"id": written}})) == []
    assert "without spaces" in problems(with_env(agent={"harness": {"id": "my agents.play"}}))[0]
    missing = with_env(agent={"harness": {"id": "my_agents.play.none"}})
    assert "my_agents.play.none" in problems(missing)[0]


def test_our_task_sets_have_short_ids() -> None:
    assert installed_id("reverse-text") == installed_id("Reverse_Text") == "gradus-reverse-text"
    for as_written in ("gradus-reverse-text", "someone/reverse-text", "no-such"):
        assert installed_id(as_written) == as_written


def test_a_module_goes_before_ours_only_when_it_uses_verifiers(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(working_directory))
    for name in ("gradus_null", "gradus_code", "gradus_mine", "mine"):
        (working_directory / f"{name}.py").touch()
    assert installed_id("code") == "gradus-code", "Python's own module `code` is not a task set"
    assert installed_id("mine") == "gradus-mine"
    (working_directory / "mine.py").write_text("import verifiers.v1 as vf")
    assert installed_id("mine") == "mine"
    assert installed_id("null", (BUILTIN_HARNESSES,)) == "null", "verifiers' own goes before"


def test_the_processes_get_the_resolved_ids_and_the_name_stays_short() -> None:
    source = TrainEnvironmentConfig.model_validate(
        {"id": "kuhn-poker", "agent": {"harness": {"id": "null"}}}
    )
    config = verifiers_config(source)
    assert config["taskset"] == {"id": "gradus-kuhn-poker"}
    assert (config["*"]["seat"]["harness"], source.unique_name) == ({"id": "null"}, "kuhn-poker")
    source = TrainEnvironmentConfig(id="best-of-n", taskset={"id": "reverse-text"})
    config = verifiers_config(source)
    assert (config["id"], config["taskset"]) == ("best-of-n", {"id": "gradus-reverse-text"})


def test_the_plan_shows_the_resolved_id() -> None:
    lines = describe_config(build_run_config(with_env(id="reverse-text")))
    assert any("env_reverse-text " in line and " gradus-reverse-text," in line for line in lines)


def test_the_plan_shows_what_a_source_runs_first() -> None:
    lines = describe_config(
        build_run_config(with_env(id="reverse-text", prepare=["make", "the data"]))
    )
    assert any(line.endswith("first runs \"make 'the data'\"") for line in lines)


def test_what_another_python_plays_need_not_be_installed_here() -> None:
    assert problems(with_env(id="nobody-has-it", python=sys.executable)) == []
    (said,) = problems(with_env(id="reverse-text", python="no/such/python"))
    assert "orchestrator.train.env.0.python: 'no/such/python': no program (seen from" in said
    lines = describe_config(build_run_config(with_env(id="words", python="/words/bin/python")))
    assert any(line.endswith(", by /words/bin/python") for line in lines)


@pytest.mark.parametrize("written", ["revers-text", "gradus-revers-text"])
def test_an_id_that_nobody_has_is_told_with_the_nearest(written: str) -> None:
    said = problems(with_env(id=written))[0]
    assert "did you mean 'reverse-text'?" in said
    assert "kuhn-poker" in said
    assert "textarena" in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gradus.config.schema.run", True),
        ("gradus.config.nothing", False),
        ("json", True),
        ("sys", True),
        ("nothing.at.all", False),
        ("os.path.deeper", False),
        ("", False),
    ],
)
def test_modules_are_found_without_import(name: str, expected: bool) -> None:
    assert has_module(name) is expected


def test_supervised_data_must_be_there(working_directory: Path) -> None:
    def found(path: str) -> list[str]:
        return [str(problem) for problem in check(build_sft_config({"data": {"path": path}}))]

    assert "no such file" in found("data.jsonl")[0]
    (working_directory / "data.jsonl").touch()
    assert "is empty" in found("data.jsonl")[0]
    (working_directory / "data.jsonl").write_text("{}")
    assert found("data.jsonl") == []
    assert found("someone/conversations") == []


def test_the_config_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, gradus.plan.machine, gradus.config.reference\n"
        "heavy = {'torch', 'transformers', 'verifiers', 'vllm', 'renderers', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_the_episodes_folder_of_a_run_is_data_and_the_run_is_not(working_directory: Path) -> None:
    episodes = working_directory / "episodes"
    (episodes / "step_0").mkdir(parents=True)
    (episodes / "step_0" / "train.jsonl").write_text("{}\n")
    data = {"data": {"path": str(episodes)}}
    assert check(build_sft_config(data)) == []
    wrong = data | {"validation": {"path": str(working_directory)}}
    [problem] = check(build_sft_config(wrong))
    assert problem.path == ("validation", "path")
    assert "episodes folder" in problem.message


def test_a_harness_that_only_the_author_may_have_set_is_not_claimed() -> None:
    (line,) = [
        it for it in describe_config(build_run_config(with_env(id="program"))) if "env_" in it
    ]
    assert "harness of its author, else chat" in line
    written = with_env(id="program", agent={"harness": {"id": "chat"}})
    (line,) = [it for it in describe_config(build_run_config(written)) if "env_" in it]
    assert line.endswith("harness chat")


def test_a_folder_for_temporary_files_in_which_no_socket_fits_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = problems()
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 180}")
    (told,) = set(problems()) - set(before)
    assert "TMPDIR" in told


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_outside_of_the_layers_is_refused_by_the_config(name: str) -> None:
    with pytest.raises(ValidationError, match="target_modules"):
        build_run_config({"trainer": {"lora": {"target_modules": ["q_proj", name]}}})


def test_a_tracker_without_its_library_is_refused_with_the_extra_that_brings_it(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoardConfig, "library", "no_such_library")
    (problem,) = problems({"monitor": [{"type": "tensorboard"}]})
    assert problem == (
        "monitor.0.type: 'tensorboard' needs a library that is not installed: "
        "pip install 'gradus-rl[tensorboard]'"
    )


def test_a_variable_that_a_tracker_is_to_get_must_be_there(working_directory: Path) -> None:
    table = {"type": "json:JSONDecoder", "pass_env": ["NOT_IN_THIS_SHELL"]}
    (problem,) = problems({"monitor": [table]})
    assert problem.startswith("monitor.0.pass_env: this shell has no NOT_IN_THIS_SHELL")


def test_an_output_below_a_file_system_of_the_kernel_is_refused(working_directory: Path) -> None:
    assert "cannot be written" in problems({"output_dir": "/proc/runs"})[0]
    assert "'~' is the shell's" in problems({"output_dir": "~/runs"})[0]
    before = sorted(working_directory.iterdir())
    assert problems({"output_dir": "runs/below"}) == []
    assert sorted(working_directory.iterdir()) == before


@pytest.mark.parametrize(
    ("inference", "words"),
    [
        ({"kv_cache_gib": 1e6}, "inference.kv_cache_gib: 1e+06 GiB is more than the"),
        ({"tensor_parallel_size": 512}, "inference.tensor_parallel_size: 512: no GPU was found"),
    ],
)
def test_an_engine_that_this_machine_has_no_room_for_is_refused(
    working_directory: Path, inference: dict[str, float], words: str
) -> None:
    (found,) = problems({"inference": inference})
    assert found.startswith(words)


def test_a_system_without_the_library_that_vllm_loads_is_told_which(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.plan.machine._NUMA_LIBRARY", "libnone.so.1")
    (problem,) = problems({})
    assert problem.startswith("inference: vLLM cannot be loaded, since this system has no libnone")


def test_an_engine_for_another_accelerator_is_not_counted_in_numa_nodes(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its devices itself; only the build for processors has a NUMA node for each part."""

    def version(name: str) -> str:
        if name == "vllm":
            return "0.31.0+rocm"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert problems({"inference": {"tensor_parallel_size": 512}}) == []


def test_processors_that_the_user_gives_to_the_parts_are_left_to_the_engine(
    working_directory: Path,
) -> None:
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    assert problems({"inference": {"tensor_parallel_size": 512, "env_vars": variables}}) == []


@pytest.mark.parametrize(
    "seat",
    [{}, {"agents": {"judge": {}}}, {"python": sys.executable}],
    ids=["source", "role", "python"],
)
def test_a_container_engine_that_is_not_there_is_told_with_one_that_is(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch, seat: dict[str, Any]
) -> None:
    engine = working_directory / "bin" / "podman"
    engine.parent.mkdir()
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", str(engine.parent))
    for runtime, is_there in (("podman", True), ("docker", False)):
        source: dict[str, Any] = {"id": "gradus-reverse-text", **copy.deepcopy(seat)}
        holder = source["agents"]["judge"] if "agents" in seat else source.setdefault("agent", {})
        holder["runtime"] = {"type": runtime}
        found = problems({"orchestrator": {"train": {"env": [source]}}})
        assert bool(found) != is_there
        if found:
            assert "runtime.type: 'docker': there is no program of this name" in found[0]
            assert "write 'podman', which is here" in found[0]


@pytest.mark.parametrize(
    ("runtime", "keys"),
    [
        ("modal", ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"]),
        ("e2b", ["E2B_API_KEY"]),
        ("prime", ["PRIME_API_KEY"]),
    ],
)
def test_a_service_for_sandboxes_needs_its_package_and_a_key(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, keys: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(working_directory))
    for key in keys:
        monkeypatch.setenv(key, "secret")
    source = {"id": "gradus-reverse-text", "agent": {"runtime": {"type": runtime}}}

    def found(**more: Any) -> list[str]:
        return problems({"orchestrator": {"train": {"env": [{**source, **more}]}}})

    package = {"prime": "prime_sandboxes"}.get(runtime, runtime)
    monkeypatch.setattr("gradus.plan.variables.has_module", lambda name: name != package)
    assert package in found()[0]
    monkeypatch.setattr("gradus.plan.variables.has_module", lambda name: True)
    assert keys[0] in found()[0]
    assert found(pass_env=keys) == []
