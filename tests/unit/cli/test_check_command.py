"""What `gradus check` loads, what it says about each part, and that nothing is left running."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import RUN_TOML, build_run_config, build_sft_config
from running import TEST_PATH

from gradus.cli.check.child import PARTS, check_size, import_if_installed, largest_image
from gradus.cli.check.command import run
from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.cli.check.parts import Part, parts_of, probe_parts
from gradus.config import EvalConfig
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.plan.gpus import find_gpus
from gradus.plan.hardware import Hardware
from gradus.plan.processes import Machine
from gradus.processes.table import living_processes

PLUG_IN = """
import os

class Dying:
    def __init__(self):
        os._exit(3)

class Raising:
    def __init__(self, limit=1):
        raise ValueError(f"limit {limit} is not for me")

from gradus.orchestrator.algorithms.group_relative import GroupRelative

class Compared(GroupRelative): ...

class Fine:
    async def score_episode(self, episode, context): ...
    def score_group(self, episodes, context): ...
    def state(self): return {}
    def load_state(self, state): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(PLUG_IN)
    monkeypatch.chdir(tmp_path)
    for path in (*TEST_PATH.split(os.pathsep), tmp_path):
        monkeypatch.syspath_prepend(path)
    yield tmp_path
    sys.modules.pop("mine", None)


def machine() -> Machine:
    current = Machine.current()
    path = os.pathsep.join([TEST_PATH, os.environ.get("PYTHONPATH", "")])
    return replace(current, environment={**current.environment, "PYTHONPATH": path})


def look(changes: dict[str, Any], *names: str, deadline_seconds: float = 60.0) -> list[Finding]:
    """The findings about the named parts of a run."""
    parts = parts_of(build_run_config(changes), machine())
    wanted = [part for part in parts if part.name in names]
    return probe_parts(wanted, machine(), deadline_seconds=deadline_seconds)


def refusal(changes: dict[str, Any], name: str) -> str:
    """Why the child of a part refuses it, asked without its process, which starts for seconds."""
    (part,) = [part for part in parts_of(build_run_config(changes), machine()) if part.name == name]
    with pytest.raises(ConfigError) as caught:
        PARTS[part.probe](part.request)
    return str(caught.value)


def algo(name: str, **options: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"algo": {"type": name, **options}}}}


def env(**source: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"env": [{"id": "gradus-test-echo", **source}]}}}


def test_the_largest_image_of_the_first_prompts_is_told(tmp_path: Path) -> None:
    config: dict[str, Any] = {"vision_config": {}, "image_token_id": 9}
    bound = {"size": {"longest_edge": 64**2}, "patch_size": 8, "merge_size": 2}
    write_json(tmp_path / "config.json", config)
    prompts = [[1, 9, 9, 2, 9, 3], [4], [9, 9, 9]]
    assert [*largest_image(str(tmp_path), prompts)] == ["their largest image 3 of them"]
    kind = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    write_json(tmp_path / "preprocessor_config.json", {**bound, **kind})
    (told,) = largest_image(str(tmp_path), prompts)
    assert told == "their largest image 3 of them (the processor makes at most 16 of one)"
    assert [*largest_image(str(tmp_path), [[1, 2]])] == []
    write_json(tmp_path / "config.json", {"vision_config": {}, "model_type": "gemma4"})
    write_json(tmp_path / "preprocessor_config.json", {"image_processor_type": "Gemma4Fast"})
    (told,) = largest_image(str(tmp_path), [[1, 258_880, 258_880, 2]])
    assert told == "their largest image 2 of them (the processor makes at most 280 of one)"
    write_json(tmp_path / "config.json", {"image_token_id": 9})
    assert [*largest_image(str(tmp_path), prompts)] == []


@pytest.mark.usefixtures("folder")
def test_every_part_of_a_run_stands_in_reading_order() -> None:
    parts = parts_of(build_run_config(env(name="words")), machine())
    names = ["model", "environment words", "plug-ins", "trainer", "engine"]
    assert [part.name for part in parts] == names


def test_a_model_that_is_not_here_is_not_looked_at(folder: Path) -> None:
    (finding,) = look({}, "model")
    assert finding == Finding("model", CheckVerdict.UNKNOWN, "someone/tiny is fetched from the hub")
    assert not (folder / "runs").exists()


def test_what_others_serve_is_not_looked_at() -> None:
    source = {"id": "words", "address": "tcp://10.0.0.1:5000/run"}
    config = EvalConfig.model_validate(
        {"model": {"name": "m"}, "base_url": "http://host/v1", "env": [source]}
    )
    findings = probe_parts(parts_of(config, machine()), machine())
    assert [(finding.part, finding.verdict) for finding in findings] == [
        ("model", CheckVerdict.UNKNOWN),
        ("environment words", CheckVerdict.UNKNOWN),
    ]


def test_data_from_the_hub_is_not_looked_at() -> None:
    parts = parts_of(build_sft_config(), machine())
    (data,) = [part for part in parts if part.name == "data"]
    assert data.skipped == "someone/conversations is fetched from the hub"


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_plug_ins_are_built_with_their_options() -> None:
    (fine,) = look(algo("mine:Fine"), "plug-ins")
    assert (fine.verdict, fine.seen) == (CheckVerdict.OK, "mine:Fine")
    wrong = refusal(algo("mine:Fine", options={"limit": 2}), "plug-ins")
    assert "'mine:Fine' does not accept options {'limit': 2}" in wrong


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_plug_in_that_raises_is_refused_with_its_words() -> None:
    (finding,) = look(algo("mine:Raising", options={"limit": 2}), "plug-ins")
    assert finding.verdict == CheckVerdict.FAILS
    assert "limit 2 is not for me" in finding.seen


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_part_that_ends_its_process_is_refused() -> None:
    (finding,) = look(algo("mine:Dying"), "plug-ins")
    assert finding.verdict == CheckVerdict.FAILS
    assert finding.seen.startswith("its code ended the process (exit code 3)")


def test_what_hangs_is_refused_at_the_deadline_and_ended_with_all_it_started(folder: Path) -> None:
    hanging = folder / "python"
    hanging.write_text("#!/bin/sh\nsleep 300 &\necho $! > pid\nwait\n")
    hanging.chmod(0o755)
    part = Part("engine", "engine", {}, os.environ)
    (finding,) = probe_parts([part], replace(machine(), python=str(hanging)), deadline_seconds=1.0)
    assert finding.verdict == CheckVerdict.FAILS
    assert finding.seen.startswith("not loaded within 1 s")
    started = int((folder / "pid").read_text())
    assert started not in {process.pid for process in living_processes()}


@pytest.mark.slow
def test_an_environment_is_loaded_and_its_tasks_are_counted() -> None:
    (finding,) = look(env(name="words", taskset={"num_tasks": 3}), "environment words")
    assert (finding.verdict, finding.seen) == (CheckVerdict.OK, "3 tasks, played by agent")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"taskset": {"num_task": 3}}, "taskset.num_task is not a key of this taskset"),
        (
            {"id": "gradus-kuhn-poker", "algo": {"type": "mine:Compared"}},
            "mine:Compared compares all traces of a group",
        ),
        (
            {"taskset": {"num_tasks": None}, "curriculum": {"type": "difficulty"}},
            "endless",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_environment_that_cannot_train_is_refused(source: dict[str, Any], words: str) -> None:
    assert words in refusal(env(name="words", **source), "environment words")


def test_a_part_without_a_child_needs_no_process() -> None:
    (finding,) = probe_parts([Part("data", skipped="why")], machine())
    assert finding.verdict == CheckVerdict.UNKNOWN


def test_a_part_is_tried_with_an_interpreter_of_its_own() -> None:
    part = Part("environment words", "environment", {}, os.environ, python="/bin/false")
    (finding,) = probe_parts([part], machine())
    assert (finding.verdict, finding.seen) == (
        CheckVerdict.FAILS,
        "its code ended the process (exit code 1)",
    )


def test_the_model_is_split_over_the_devices_that_there_are() -> None:
    check_size(2, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4, but this machine has 2 GPUs"):
        check_size(4, 2)


def test_a_companion_of_torch_with_a_wrong_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "operator torchvision::nms does not exist"
    (tmp_path / "torchvideo.py").write_text(f"raise RuntimeError({words!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="torchvideo does not fit this torch: operator"):
        import_if_installed("torchvideo")
    import_if_installed("torch_that_is_not_there")


def test_the_overview_names_the_dtype_that_this_machine_computes_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    assert run(["rl", "--level", "config", "@", str(tmp_path / "run.toml")]) == 0
    dtype = Hardware.current(find_gpus(os.environ)).dtype()
    shown = capsys.readouterr().out
    assert f"vLLM, {dtype}," in shown
    assert f"1 process, {dtype}," in shown


def test_the_overview_names_the_trackers_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitors = '[[monitor]]\ntype = "tensorboard"\n[[monitor]]\ntype = "prometheus"\n'
    (tmp_path / "run.toml").write_text(f"{RUN_TOML}\n{monitors}")
    assert run(["rl", "--level", "config", "@", str(tmp_path / "run.toml")]) == 0
    assert re.search(r"^  tracker +tensorboard, prometheus$", capsys.readouterr().out, re.M)


def test_servers_of_others_are_not_looked_at() -> None:
    config = build_run_config({"inference": {"addresses": "others.txt"}})
    (engine,) = [part for part in parts_of(config, Machine.current()) if part.name == "engine"]
    assert engine.skipped == "others serve it, at the addresses in others.txt"
