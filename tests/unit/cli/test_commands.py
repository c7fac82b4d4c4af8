"""What each command reads, and what it calls."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from configs import RUN_TOML, SFT_TOML, build_run_config, build_sft_config

from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.cli.check.parts import Part
from gradus.cli.main import COMMANDS, ROLES, main
from gradus.cli.options import take_value
from gradus.config import (
    EvalConfig,
    ReplayConfig,
    StrictConfig,
    resolve,
)
from gradus.errors import ConfigError, ExitCode
from gradus.files import write_json
from gradus.plan.hardware import Hardware
from gradus.plan.processes import Machine, role_of

EVAL_TOML = """
[model]
name = "someone/model"
[sampling]
temperature = 0
[[env]]
id = "gradus-reverse-text"
num_tasks = 5
"""


class Recorder:
    """Stands in for an entry point and remembers how it was called."""

    def __init__(self, result: int | None = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *arguments: Any, **keywords: Any) -> int | None:
        self.calls.append((arguments, keywords))
        return self.result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_TOML)
    (tmp_path / "sft.toml").write_text(SFT_TOML)
    (tmp_path / "eval.toml").write_text(EVAL_TOML)
    return tmp_path


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Gives the root logger back after a command has configured it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def put(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Recorder) -> None:
    """Replace a module that another part owns."""
    fake = ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {"resume": False, "clean": False}),
        (["--clean"], {"resume": False, "clean": True}),
        (["--resume"], {"resume": True, "clean": False}),
    ],
)
def test_rl_hands_config_and_options_to_the_launcher(
    words: list[str], options: dict[str, bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Recorder(result=7)
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["rl", "@", "run.toml", *words, "--max-steps", "3", "--name", "demo"]) == 7
    ((arguments, keywords),) = launch.calls
    assert arguments[0].workload.max_steps == 3
    assert keywords == options


@pytest.mark.parametrize("verdict", [CheckVerdict.OK, CheckVerdict.FAILS])
def test_a_check_loads_each_part_in_the_dtype_that_the_run_would_have(
    verdict: CheckVerdict,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where bfloat16 failed its trial that is float32."""
    failed = Hardware(frozenset({"avx512_bf16"}), bfloat16_fault="the engine was killed")
    asked: list[Part] = []

    def probe_parts(parts: list[Part], machine: Machine) -> list[Finding]:
        asked.extend(parts)
        return [Finding("engine", verdict, "seen")]

    monkeypatch.setattr("gradus.cli.check.probes.with_trial", lambda *_: failed)
    monkeypatch.setattr("gradus.cli.check.command.probe_parts", probe_parts)
    monkeypatch.setattr("gradus.cli.check.command.become_subreaper", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["check", "rl", "@", "run.toml"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == (ExitCode.DONE if verdict is CheckVerdict.OK else ExitCode.UNFIT)
    names = [part.name for part in asked]
    assert names == ["model", "environment gradus-reverse-text", "plug-ins", "trainer", "engine"]
    assert asked[-1].request["engine"]["inference"]["dtype"] == "float32"
    assert re.search(rf"^{verdict} +engine +seen$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("words", [["rl", "--dry-run"], ["rl", "--sanity"], ["check", "--fast"]])
def test_former_ways_to_ask_name_the_check(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "@", "run.toml"]) == ExitCode.CONFIG
    assert "gradus check" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run.toml"], ["--max-steps", "3", "./run.toml"]])
def test_a_config_file_is_accepted_without_its_sign(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Recorder(result=0)
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["rl", *words]) == 0
    assert len(launch.calls) == 1


def test_a_config_file_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "none.toml"]) == ExitCode.CONFIG
    assert "none.toml: no such config file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "export", "bench-trainer"])
@pytest.mark.parametrize("words", [[], ["--model"], ["--model", "x"], ["@"], ["--"]])
def test_a_command_with_too_little_behind_it_says_what_is_missing(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == ExitCode.CONFIG
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.startswith(f"gradus {command}: ")


def test_rl_refuses_two_options_that_contradict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "@", "run.toml", "--clean", "--resume"]) == ExitCode.CONFIG
    assert "use one of them" in capsys.readouterr().err


def test_rl_starts_nothing_when_this_machine_lacks_something(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = Recorder()
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["rl", "@", "run.toml", "--model.name", "./none"]) == ExitCode.CONFIG
    assert launch.calls == []
    assert "gradus rl: --model.name: './none'" in capsys.readouterr().err


@pytest.fixture
def trained(folder: Path) -> Path:
    """The folder of a run that is done."""
    run = folder / "runs" / "words"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "model.safetensors").write_text("")
    write_json(run / ".gradus-run", {"run_id": "words", "kind": "rl", "format": 3})
    write_json(run / "summary.json", {"outcome": "done"})
    return run


@pytest.mark.parametrize("words", [["--model=runs/words"], ["--model.name=runs/words"]])
def test_eval_takes_a_run_for_its_model_behind_an_equals_sign(
    trained: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words, "--env.0.id", "words"]) == ExitCode.CONFIG
    printed = capsys.readouterr()
    assert f"{trained / 'model'}" in printed.out
    assert "--model" not in printed.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["compare", "runs/words", "runs/words", "--over", "tokens"], "give --out FILE.png too"),
        (["view", "--export", "out", "--key-var", "X"], "give the URL too"),
        (["env", "check", "words", "--api-key-var", "X"], "give the URL too"),
    ],
)
def test_an_option_without_what_it_is_about_is_refused(
    trained: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "loss/total/mean": 1.0}\n')
    assert main(words) == ExitCode.CONFIG
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("key", ["--model", "--model.name"])
def test_eval_takes_a_run_for_the_model_that_it_trained(
    trained: Path, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = Recorder(result=0)
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["eval", key, "runs/words", "--env.0.id", "words"]) == ExitCode.CONFIG
    printed = capsys.readouterr()
    assert f"{trained / 'model'}" in printed.out
    assert "model.name" not in printed.err


def test_eval_names_the_way_to_a_model_of_a_run_with_checkpoints_alone(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(trained / "model")
    assert main(["eval", "--model", "runs/words", "--env.0.id", "words"]) == ExitCode.CONFIG
    assert "has trained nothing" in capsys.readouterr().err


def test_sft_hands_config_and_options_to_the_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Recorder(result=0)
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["sft", "@", "sft.toml", "--clean"]) == 0
    ((arguments, keywords),) = launch.calls
    assert (arguments[0].kind, arguments[0].name[:15]) == ("sft", "conversations--")
    assert keywords == {"resume": False, "clean": True}


def test_sft_resumes_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Recorder(result=0)
    put(monkeypatch, "gradus.launch.launch", launch=launch)
    assert main(["sft", "@", "sft.toml", "--resume", "--name", "demo"]) == 0
    assert launch.calls[0][1] == {"resume": True, "clean": False}


@pytest.mark.parametrize(("command", "file"), [("rl", "run.toml"), ("sft", "sft.toml")])
def test_resume_needs_a_name(
    command: str, file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "@", file, "--resume"]) == ExitCode.CONFIG
    assert "--resume needs the name of the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["@", "run.toml"], "env_gradus-reverse-text"),
        (["rl", "@", "run.toml"], "env_gradus-reverse-text"),
        (["@", "sft.toml"], "conversations from someone/conversations"),
        (["sft", "@", "sft.toml"], "conversations from someone/conversations"),
        (["@", "eval.toml"], "5 tasks of gradus-reverse-text x 1 (greedy)"),
        (["eval", "@", "eval.toml", "--sampling.temperature", "0.5"], "(temperature 0.5)"),
        (["eval", "@", "eval.toml", "--base-url", "http://x/v1"], "someone/model, http://x/v1"),
    ],
)
def test_check_prints_the_plan_and_creates_nothing(
    words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main(["check", *words, "--level", "config"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("this config is consistent; nothing was loaded\n")
    assert expected in shown
    assert sorted(folder.rglob("*")) == before


def test_check_lists_what_does_not_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm_up = "--trainer.optimizer.warmup-steps"
    assert main(["check", "@", "run.toml", "--model.name", "./x", warm_up, "999999"]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [warm_up, "--model.name"]


WITHOUT_CONFIG = {
    "convert",
    "export",
    "init",
    "lab",
    "completion",
    "env",
    "compare",
    "view",
    "node",
}


@pytest.mark.parametrize("command", [c for c in (*COMMANDS, *ROLES) if c not in WITHOUT_CONFIG])
def test_help_of_a_command_shows_keys_and_sections(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: gradus {command}")
    assert "default: " in shown
    named = {
        "serve": "--tool-parser",
        "chat": "--tool-parser",
        "env-server": "--verifiers",
        "tracker": "--monitor.N.options",
    }
    assert named.get(command, "--model.name" if command in COMMANDS else "model]") in shown


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "check", "bench-trainer"])
def test_help_of_what_a_user_types_fits_on_a_screen_or_two(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 60


@pytest.mark.parametrize(
    ("asked", "shown", "not_shown"),
    [
        ("trainer.optimizer", "--trainer.optimizer.lr  float", "--trainer.loss"),
        ("trainer", "below it: trainer.", "--trainer.optimizer.lr  "),
        ("--trainer.optimizer.max-grad-norm", "--trainer.optimizer.max-grad-norm", "optimizer.lr"),
        ("orchestrator.train.env.0", "--orchestrator.train.env.N.group-size", "--seed"),
        ("top", "--max-steps  int", "--model.name"),
        ("all", "--launch.stop-timeout-seconds", "no section"),
    ],
)
def test_help_shows_the_section_or_the_key_that_is_named(
    asked: str, shown: str, not_shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "--help", asked]) == 0
    text = capsys.readouterr().out
    assert shown in text
    assert not_shown not in text


def test_an_option_with_a_value_is_taken_out_of_the_words() -> None:
    words = ["--a", "1", "--run-dir", "new", "--b"]
    assert take_value(words, "--run-dir") == ("new", ["--a", "1", "--b"])
    assert take_value(["--run-dir=x"], "--run-dir") == ("x", [])
    assert take_value(["--a"], "--run-dir") == (None, ["--a"])


@pytest.mark.parametrize("words", [["--in"], ["--in", "--clean"], ["--in="], ["--in=a", "--in=b"]])
def test_an_option_without_its_value_or_with_two_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--in"):
        take_value(words, "--in")


def test_help_of_an_unknown_section_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help", "trainer.optimiser"]) == ExitCode.CONFIG
    assert "there is trainer.optimizer" in capsys.readouterr().err


def test_help_names_the_options_that_are_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rl", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {option} " in shown for option in ("--clean", "--resume"))


def role_configs() -> dict[str, StrictConfig]:
    """Subcommand → a config as the launcher writes it."""
    config = build_run_config({"monitor": [{"type": "tensorboard"}]})
    run = resolve(config, run_dir=Path("runs/x"), term=4)
    env = [{"id": "gradus-reverse-text"}]
    evaluation = EvalConfig.model_validate({"model": {"name": "someone/tiny"}, "env": env})
    supervised = build_sft_config({"eval": {"env": env}})
    sft = resolve(supervised, run_dir=Path("runs/x"), term=4)
    replayed = ReplayConfig(build_run_config(), recorded=Path("runs/demo"), num_steps=2)
    return {
        "inference": run.inference[0],
        "env-server": run.environments[0],
        "trainer": run.launched,
        "tracker": run.tracker,
        "sft-trainer": sft.launched,
        "sft-evaluator": sft.launched,
        "bench-rank": run.launched,
        "orchestrator": run.launched,
        "evaluator": resolve(evaluation, run_dir=Path("runs/x"), term=4).launched,
        "replayer": resolve(replayed, run_dir=Path("runs/x"), term=4).launched,
    }


ENTRIES = {
    "inference": ("gradus.inference.server", "run", "inference"),
    "env-server": ("gradus.environments.process", "serve", "env_gradus-reverse-text"),
    "trainer": ("gradus.trainer.entry.rl", "run", "trainer"),
    "sft-trainer": ("gradus.trainer.entry.sft", "run", "trainer"),
    "bench-rank": ("gradus.trainer.entry.bench", "run", "trainer"),
    "orchestrator": ("gradus.orchestrator.build", "run", "orchestrator"),
    "evaluator": ("gradus.orchestrator.evaluation.process", "run", "evaluator"),
    "sft-evaluator": ("gradus.orchestrator.evaluation.process", "run", "evaluator"),
    "replayer": ("gradus_lab.replay.replayer", "run", "replayer"),
    "tracker": ("gradus.tracking.follow.process", "run", "tracker"),
}


def test_a_role_loads_the_config_that_the_launcher_plans_it_for() -> None:
    for role, config in role_configs().items():
        process = role.removeprefix("sft-").replace("bench-rank", "trainer")
        assert role_of(process, config) in {role, process}
        assert ROLES[role].config == type(config).__name__


@pytest.mark.parametrize("command", list(ROLES))
@pytest.mark.usefixtures("own_logging")
def test_a_role_loads_what_the_launcher_wrote_and_starts(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, function, process = ENTRIES[command]
    entry = Recorder()
    put(monkeypatch, module, **{function: entry})
    config = role_configs()[command]
    (folder / "role.json").write_text(config.model_dump_json())
    assert main([command, "@", "role.json"]) == 0
    assert entry.calls == [((config,), {})]
    logging.getLogger("gradus.anything").warning("hello")
    assert f"WARNING {process} gradus.anything: hello" in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
def test_a_rank_logs_under_its_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(monkeypatch, "gradus.trainer.entry.rl", run=Recorder())
    monkeypatch.setitem(os.environ, "RANK", "1")
    (folder / "role.json").write_text(role_configs()["trainer"].model_dump_json())
    assert main(["trainer", "@", "role.json"]) == 0
    logging.getLogger("gradus.anything").warning("hello")
    assert "WARNING trainer/1 gradus.anything" in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("command", ["trainer", "orchestrator", "sft-trainer", "sft-evaluator"])
def test_the_step_to_go_on_from_is_an_argument_and_stands_in_no_file(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, _ = ENTRIES[command]
    entry = Recorder()
    put(monkeypatch, module, **{function: entry})
    resumed = role_configs()[command].model_copy(update={"resume_step": 4})
    (folder / "role.json").write_text(resumed.model_dump_json())
    assert "resume_step" not in (folder / "role.json").read_text()
    assert main([command, "@", "role.json", "--resume-step", "4"]) == 0
    assert main([command, "@", "role.json"]) == 0
    assert [config.resume_step for (config,), _ in entry.calls] == [4, None]


def test_a_role_without_config_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer"]) == ExitCode.CONFIG
    assert "gradus trainer: " in capsys.readouterr().err


def test_a_name_that_no_file_system_takes_is_a_mistake_of_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / ("n" * 300)), str(tmp_path / "out")]) == ExitCode.CONFIG
    assert "takes 255 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "file", "kind"),
    [("eval", "run.toml", "rl"), ("rl", "sft.toml", "sft"), ("sft", "eval.toml", "eval")],
)
def test_a_config_of_another_command_is_told_first(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, file: str, kind: str
) -> None:
    assert folder.is_dir()
    assert main([command, "@", file]) == ExitCode.CONFIG
    first = capsys.readouterr().err.splitlines()[0]
    assert f"a config of `gradus {kind}`, so `gradus {command}` refuses it" in first


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "bench-trainer"])
def test_a_command_without_words_says_how_to_name_a_config(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command]) == ExitCode.CONFIG
    expected = f"gradus {command}: a config is missing; write gradus {command} @ FILE.toml"
    assert capsys.readouterr().err.strip() == expected


def test_an_environment_is_not_looked_for_with_a_python_that_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["env", "check", "reverse-text", "--python", "/no/python"]) == ExitCode.CONFIG
    told = " ".join(capsys.readouterr().out.split())
    assert "python = '/no/python' is no program. Name the `bin/python`" in told
