"""`gradus init`: folders that run as they are, and one sentence for everything that cannot."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import verifiers.v1 as vf

from gradus.cli.main import main
from gradus.config import EvalConfig, RunConfig, SftConfig, load_config
from gradus.errors import ExitCode, StorageError
from gradus.plan.learning_rate import choose
from gradus.plan.machine import check
from gradus.project.folder import staged
from gradus.testing.tiny_model import build_tiny_model

ROWS = [{"question": f"{n} + 1 = ?", "answer": n + 1, "level": n % 3} for n in range(40)]
KINDS = {"eval": EvalConfig, "sft": SftConfig, "rl": RunConfig}


def write_rows(path: Path, rows: list[object] = list(ROWS)) -> Path:  # noqa: B006 - never changed
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.torch
def test_the_printed_commands_fit_a_path_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "first"
    assert main(["init", str(folder)]) == ExitCode.DONE
    assert f"cd '{folder}'\n" in capsys.readouterr().out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ([], ["eval", "rl"]),
        (["--from", "rows.jsonl"], ["eval", "rl", "sft"]),
        (["--from", "rows.jsonl", "--reward", "my rewards.py:near"], ["eval", "rl", "sft"]),
        (["--from", "asked.jsonl", "--reward", "my rewards.py:near"], ["eval", "rl"]),
        (["--tools"], ["eval", "rl"]),
        (["--multi-turn"], ["eval", "rl", "sft"]),
        (["--agent"], ["eval", "rl", "sft"]),
        (["--from", "rows.jsonl", "--agent"], ["eval", "rl", "sft"]),
        (["--from", "rows.jsonl", "--tools", "--model", "a model"], ["eval", "rl"]),
    ],
)
def test_what_each_kind_writes_passes_its_check_and_its_test(
    flags: list[str],
    stages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"))
    write_rows(Path("asked.jsonl"), [{"prompt": f"a word with {n} letters"} for n in range(20)])
    Path("my rewards.py").write_text("def near(reply, row):\n    return 1 / (1 + len(reply))\n")
    build_tiny_model(Path("a model"), hidden_size=64, num_layers=1)
    assert main(["init", "it", *flags]) == ExitCode.DONE
    printed = capsys.readouterr().out
    monkeypatch.chdir("it")
    monkeypatch.syspath_prepend(".")
    assert sorted(path.stem for path in Path().glob("*.toml")) == stages
    for stage in stages:
        load_config(KINDS[stage], ["@", f"{stage}.toml"], check=check)
        assert f"gradus {stage} @ {stage}.toml" in printed
    assert ("gradus agent " in printed) is ("--agent" in flags)
    for stage, places in {"eval": 1, "rl": 2}.items():
        bounds = Path(f"{stage}.toml").read_text().count("max_in_flight_episodes")
        assert bounds == places * ("--agent" in flags)
    if "near" not in " ".join(flags):
        done = pytest_in(Path())
        assert done.returncode == 0, done.stdout


@pytest.mark.torch
def test_no_row_trains_and_measures_and_every_row_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"), [row for row in ROWS for _ in range(2)])
    assert main(["init", "it", "--from", "rows.jsonl"]) == ExitCode.DONE
    sides = [
        [json.loads(line) for line in Path("it", name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    ]
    train, held_out = ({row["prompt"] for row in side} for side in sides)
    assert (len(train), len(held_out), len(train & held_out), len(sides[0])) == (36, 4, 0, 72)
    said = "72 rows to train on, 4 held out, 4 left out for repeating one held out"
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed
    few = "few held out, as many of the 80 rows ask the same: an evaluation of 4 tasks is sure to "
    assert f"{few}about ± 0.5" in printed
    assert sides[0][0]["answer"] == 1, "as the file has it: a reward may compare numbers"
    assert sides[0][0]["messages"][-1] == {"role": "assistant", "content": "1"}


@pytest.mark.torch
def test_the_longest_rows_of_a_long_file_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"{number} + 1?", "answer": "b" * 100 * (number == 7)} for number in range(700)
    ]
    write_rows(Path("rows.jsonl"), [{**row, "answer": row["answer"] or "1"} for row in rows])
    assert main(["init", "it", "--from", "rows.jsonl"]) == ExitCode.DONE
    config = load_config(EvalConfig, ["@", "it/eval.toml"])
    assert config.sampling.max_completion_tokens == 158
    printed = " ".join(capsys.readouterr().out.split())
    assert "counted in the 500 with the most characters of 700 rows" in printed
    assert "few held out" not in printed


@pytest.mark.torch
def test_lengths_are_those_of_the_longest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = {"prompt": "a" * 300, "answer": "b" * 100}
    write_rows(Path("rows.jsonl"), [*ROWS, long])
    assert main(["init", "it", "--from", "rows.jsonl"]) == ExitCode.DONE
    config = load_config(EvalConfig, ["@", "it/eval.toml"])
    assert config.sampling.max_completion_tokens == 158
    assert 300 + 158 < config.model.max_length_tokens < 600
    assert "of the longest prompt" in capsys.readouterr().out


@pytest.mark.torch
def test_a_model_that_may_think_gets_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"))
    assert main(["init", "it", "--from", "rows.jsonl", "--model", "Qwen/None"]) == ExitCode.DONE
    config = load_config(RunConfig, ["@", "it/rl.toml"])
    limit = config.orchestrator.train.sampling.max_completion_tokens or 0
    assert 512 < limit < config.model.max_length_tokens


@pytest.mark.torch
def test_a_reward_that_pays_tricks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("rows.jsonl"))
    Path("r.py").write_text("def score(reply):\n    return float(len(reply))\n")
    assert main(["init", "it", "--from", "rows.jsonl", "--reward", "r.py:score"]) == ExitCode.DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "Training will find that the prompt copied pays as well" in printed


@pytest.mark.torch
def test_a_reward_that_tells_nothing_apart_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = _reward("def score(reply):\n    return 0.5\n")()
    assert main(["init", "it", *words]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("every reply that was tried earns 0.5, right") for line in lines)
    assert not any("pays as well" in line for line in lines)


@pytest.mark.torch
def test_an_error_names_the_users_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lib").mkdir()
    Path("lib/raises.py").write_text("def score(reply):\n    return 1 / 0\n")
    words = _reward_named("lib/raises.py:score")()
    assert main(["init", "it", *words]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert 'File "lib/raises.py", line 2' in error
    assert "rewards.py" not in error
    Path("lib/raises.py").write_text("def rate(reply):\n    return 1\n")
    assert main(["init", "it", *words]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert "lib/raises.py" in error
    assert "rewards.py" not in error


@pytest.mark.torch
def test_the_reasons_give_the_real_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[object] = [{"prompt": f"{n} + 1?", "answer": "b" * 10} for n in range(200)]
    write_rows(Path("rows.jsonl"), rows)
    assert main(["init", "it", "--from", "rows.jsonl"]) == ExitCode.DONE
    printed = " ".join(capsys.readouterr().out.split())
    formula = "1.5 x the 10 tokens of the longest answer + 8"
    assert f"max_completion_tokens = 23: {formula}" in printed
    for stage in ("RL", "SFT"):
        assert f'what "auto" takes for {stage} at its size' in printed
        assert f"takes for {stage} at" in Path("it", f"{stage.lower()}.toml").read_text()
    words = ["init", "large", "--from", "rows.jsonl", "--model", "Qwen/None-30B"]
    assert main(words) == ExitCode.DONE
    rates = [choose(kind, "Qwen/None-30B", has_adapters=False).lr for kind in ("rl", "sft")]
    assert rates != [choose(kind, "x", has_adapters=False).lr for kind in ("rl", "sft")]
    for stage, rate in zip(("rl", "sft"), rates, strict=True):
        assert f"lr = {rate}\n" in Path("large", f"{stage}.toml").read_text()
    words = ["init", "other", "--from", "rows.jsonl", "--model", "Qwen/None"]
    assert main(words) == ExitCode.DONE
    text = Path("other/sft.toml").read_text()
    assert "batch_conversations = 32\n# 6 x the 180 rows" in text
    assert "\nmax_steps = 34\n" in text
    printed = " ".join(capsys.readouterr().out.split())
    assert "answer + 8, at least 16, and 512 in case it thinks first" in printed


def _file(name: str, content: str | bytes) -> Callable[[], list[str]]:
    def make() -> list[str]:
        data = content if isinstance(content, bytes) else content.encode()
        Path(name).write_bytes(data)
        return ["--from", name]

    return make


def _line(number: int, wrong: str) -> Callable[[], list[str]]:
    lines = [json.dumps(row) for row in ROWS]
    lines[number - 1] = wrong
    return _file("rows.jsonl", "\n".join(lines))


def _all(row: dict[str, object]) -> Callable[[], list[str]]:
    return _file("rows.jsonl", "\n".join(json.dumps({**row, "n": n}) for n in range(9)))


def _reward(code: str, function: str = "score") -> Callable[[], list[str]]:
    def make() -> list[str]:
        write_rows(Path("rows.jsonl"))
        Path("r.py").write_text(code)
        return ["--from", "rows.jsonl", "--reward", f"r.py:{function}"]

    return make


def _reward_named(name: str) -> Callable[[], list[str]]:
    return lambda: ["--from", str(write_rows(Path("rows.jsonl"))), "--reward", name]


def _model(prepare: Callable[[Path], None]) -> Callable[[], list[str]]:
    def make() -> list[str]:
        Path("m").mkdir()
        prepare(Path("m"))
        return ["--agent", "--model", "m"]

    return make


def _say(*words: str) -> Callable[[], list[str]]:
    return lambda: list(words)


def _folder() -> list[str]:
    Path("rows").mkdir()
    return ["--from", "rows"]


def _config_alone(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _no_tokenizer(folder: Path) -> None:
    _config_alone(folder)
    (folder / "model.safetensors").write_bytes(b"")


def _odd_tokenizer(folder: Path) -> None:
    _no_tokenizer(folder)
    (folder / "tokenizer.json").write_text("[]")


MESSAGES = '{"messages": [%s]}'
WRONG = {
    "empty file": (_file("rows.jsonl", ""), "holds no rows"),
    "blank lines": (_file("rows.jsonl", "\n \n"), "holds no rows"),
    "one row": (_file("rows.jsonl", json.dumps(ROWS[0])), "only 1 rows"),
    "not there": (_say("--from", "none.jsonl"), "there is no such file"),
    "a folder": (_folder, "doesn't contain any data files"),
    "csv": (_file("rows.csv", "prompt,answer\na,b,c\n"), "rows.csv:2 has 3 cells"),
    "csv by content": (_file("rows.jsonl", "prompt,answer\na,b\n"), ":1 is not JSON"),
    "parquet": (_file("rows.parquet", b"PAR1"), "is no table"),
    "binary": (_file("rows.jsonl", b"\x00\xff\xfe"), "is not UTF-8"),
    "utf-16": (_file("rows.jsonl", json.dumps(ROWS[0]).encode("utf-16")), "is not UTF-8"),
    "a cut array": (_file("rows.json", json.dumps(ROWS)[:-1]), ":1 is cut"),
    "broken line 17": (_line(17, '{"question": "a", "answer": '), ":17 is not JSON"),
    "number in line 17": (_line(17, "4"), ":17 is a int"),
    "null in line 3": (_line(3, "null"), ":3 is a NoneType"),
    "NaN": (_line(5, '{"prompt": "a", "answer": NaN}'), ":5 cannot be sent"),
    "infinite": (_line(5, '{"prompt": "a", "answer": 1e999}'), ":5 cannot be sent"),
    "half a character": (_line(6, '{"prompt": "\\ud800"}'), ":6 cannot be sent"),
    "deep": (_line(6, "[" * 100_000), ":6 is not JSON"),
    "other keys": (_all({"text": "a", "label": "b"}), "has no prompt (it has 'text', 'label'"),
    "no keys": (_line(2, "{}"), ":2 has no prompt (it has no keys)"),
    "empty prompt": (_line(2, '{"prompt": "", "answer": "a"}'), ":2 has an empty 'prompt'"),
    "prompt of spaces": (_line(2, '{"prompt": "  "}'), ":2: 'prompt' is '  '"),
    "prompt a number": (_line(2, '{"prompt": 3}'), ":2: 'prompt' is 3"),
    "prompt null": (_line(2, '{"prompt": null}'), ":2 has an empty 'prompt'"),
    "answer a dict": (_line(2, '{"prompt": "a", "answer": {}}'), ":2: 'answer' is {}"),
    "no such choice": (
        _line(2, '{"prompt": "a", "choices": ["b", "c"], "answer": "d"}'),
        ":2: 'd' is none of its 2 choices",
    ),
    "a program": (_all({"prompt": "a", "test": "assert f() == 1"}), "take the task set `code`"),
    "answer empty": (_line(2, '{"prompt": "a", "answer": " "}'), ":2: 'answer' is ' '"),
    "answer missing once": (_line(2, '{"prompt": "a"}'), "39 of 40 rows have an answer"),
    "messages text": (_line(2, '{"messages": "hi"}'), ":2: 'messages' is 'hi'"),
    "messages empty": (_line(2, MESSAGES % ""), ":2 has an empty 'messages'"),
    "message text": (_line(2, MESSAGES % '"hi"'), ":2: 'messages' holds 'hi'"),
    "no role": (_line(2, MESSAGES % '{"content": "a"}'), ":2: 'messages' holds"),
    "odd role": (_line(2, MESSAGES % '{"role": "x", "content": "a"}'), ":2: 'messages' holds"),
    "no content": (_line(2, MESSAGES % '{"role": "user"}'), ":2: 'messages' holds"),
    "only assistant": (
        _line(2, MESSAGES % '{"role": "assistant", "content": "a"}'),
        ":2: 'messages' asks nothing",
    ),
    "same prompt": (_all({"prompt": "a", "answer": "b"}), "ask the same"),
    "nothing to rate": (
        _file("rows.jsonl", "\n".join(json.dumps({"prompt": str(n)}) for n in range(9))),
        "has no answers to compare",
    ),
    "agent of messages": (
        lambda: [*_all({"messages": [{"role": "user", "content": "a"}], "answer": 1})(), "--agent"],
        "holds messages",
    ),
    "prompt too long": (
        _line(17, json.dumps({"prompt": "a " * 20_000, "answer": "b"})),
        "row 17 has a prompt of ",
    ),
    "reward raises": (
        _reward("def score(reply):\n    return 1 / 0\n"),
        "failed: ZeroDivisionError",
    ),
    "reward exits": (_reward("def score(reply):\n    raise SystemExit(3)\n"), "exits; it must"),
    "reward kills": (
        _reward("import os\ndef score(reply):\n    os._exit(7)\n"),
        "ended its process (7)",
    ),
    "reward of text": (_reward("def score(reply):\n    return 'good'\n"), "returned 'good'"),
    "reward of nothing": (_reward("def score(reply):\n    pass\n"), "returned None"),
    "reward not finite": (_reward("def score(reply):\n    return float('nan')\n"), "returned nan"),
    "reward of a list": (_reward("def score(reply):\n    return [1]\n"), "returned [1]"),
    "reward of {}": (_reward("def score(reply):\n    return {}\n"), "returned {}"),
    "reward asks": (_reward("def score(reply, teacher):\n    return 1\n"), "asks for 'teacher'"),
    "reward's typing": (_reward("def score(reply:\n"), "SyntaxError"),
    "reward's import": (_reward("import not_there\n"), "No module named 'not_there'"),
    "no function": (_reward("x = 1\n"), "has no function 'score'"),
    "no such function": (_reward("def rate(reply):\n    return 1\n"), "has no function 'score'"),
    "not a function": (_reward("score = 3\n"), "has no function 'score'"),
    "reward not there": (_reward_named("none.py:score"), "there is no such file"),
    "reward of no module": (_reward_named("none_such:score"), "none_such"),
    "reward without name": (_reward_named("r.py"), "write FILE.py:FUNCTION"),
    "reward odd name": (_reward_named("r.py:a b"), "write FILE.py:FUNCTION"),
    "reward without rows": (_say("--reward", "r.py:score"), "name them with --from"),
    "demo with a model": (_say("--model", "m"), "--model needs tasks"),
    "two kinds": (_say("--tools", "--agent"), "do not go together"),
    "option of no kind": (_say("--tool"), "there is no option --tool"),
    "from nothing": (_say("--from"), "--from needs a file of rows"),
    "from twice": (_say("--from", "a", "--from", "b"), "given twice"),
    "model not there": (_say("--agent", "--model", "./none"), "no such directory"),
    "model no name": (_say("--agent", "--model", "a b"), "neither a directory here nor a name"),
    "model empty": (_model(lambda _: None), "has no config.json"),
    "model without weights": (_model(_config_alone), "has no *.safetensors"),
    "model without tokenizer": (_model(_no_tokenizer), "has no tokenizer"),
    "model with an odd one": (_model(_odd_tokenizer), "cannot be loaded"),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gets_one_sentence_and_leaves_nothing(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make, said = WRONG[name]
    words = make()
    before = sorted(Path().rglob("*"))
    assert main(["init", "it", *words]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.torch
def test_an_async_reward_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = _reward("async def score(reply, row):\n    return {'a': 1, 'b': len(reply) > 3}\n")()
    assert main(["init", "it", *words]) == ExitCode.DONE


@pytest.mark.torch
def test_the_demo_is_a_task_set_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-first"]) == ExitCode.DONE
    monkeypatch.chdir("my-first")
    monkeypatch.syspath_prepend(".")
    config = load_config(RunConfig, ["@", "rl.toml"], check=check)
    source = config.orchestrator.train.env[0]
    tasks = vf.load_taskset(vf.taskset_config_type(source.id)(id=source.id))
    assert (config.name, source.id, len(list(tasks))) == ("my-first", "my-first-tasks", 256)


@pytest.mark.torch
@pytest.mark.parametrize("words", [["init", "."], ["env", "init", "."]])
def test_an_empty_folder_that_the_shell_stands_in_is_filled(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert main(words) == ExitCode.DONE
    assert "cd " not in capsys.readouterr().out
    assert [path.name for path in Path().glob(".*")] == []
    assert load_config(RunConfig, ["@", "rl.toml"]).name.startswith("mine")


@pytest.mark.torch
def test_a_reward_of_the_trace_is_taken_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = _reward("def score(reply, trace):\n    return len(trace.messages)\n")()
    assert main(["init", "it", *words]) == ExitCode.DONE
    assert "not tried, as it takes `trace`" in capsys.readouterr().out
    done = pytest_in(Path("it"))
    assert done.returncode == 0, done.stdout


@pytest.mark.torch
@pytest.mark.parametrize("line", ["from helpers import h", "from .helpers import h"])
def test_a_reward_with_a_neighbour_is_told_what_to_do(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"{line}\ndef score(reply, row):\n    return h(reply, row)\n"
    words = _reward(code)()
    (tmp_path / "helpers.py").write_text("def h(reply, row):\n    return reply == row['answer']\n")
    assert main(["init", "it", *words]) == ExitCode.CONFIG
    assert "Only the file itself is copied" in capsys.readouterr().err


@pytest.mark.torch
def test_a_reward_of_an_installed_module_is_named_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    code = "def score(reply, row):\n    return reply == str(row['answer'])\n"
    Path("lib/my_rewards.py").write_text(code)
    assert main(["init", "it", *_reward_named("my_rewards:score")()]) == ExitCode.DONE
    done = pytest_in(Path("it"))
    assert done.returncode == 0, done.stdout


@pytest.mark.torch
def test_a_folder_of_any_name_makes_a_config_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_model(Path("m \U0001f600\x7f"), hidden_size=64, num_layers=1)
    assert main(["init", "it", "--agent", "--model", "m \U0001f600\x7f"]) == ExitCode.DONE
    config = load_config(RunConfig, ["@", "it/rl.toml"])
    assert Path(config.model.name) == tmp_path / "m \U0001f600\x7f"


@pytest.mark.parametrize("target", ["a folder that holds something", "a file"])
def test_what_stands_there_is_not_touched(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    if target == "a file":
        folder.write_text("precious")
    else:
        folder.mkdir()
        (folder / "mine.txt").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    assert main(["init", str(folder)]) == ExitCode.CONFIG
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.torch
@pytest.mark.parametrize("place", ["/proc/demo", "/dev/null/demo", "a_file/demo"])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    assert main(["init", place]) == ExitCode.CONFIG
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["1st", "a b", "ä"])
def test_a_name_that_gives_no_module_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / name)]) == ExitCode.CONFIG
    assert "cannot name a task set" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("words", [[], ["one", "two"]])
def test_exactly_one_folder_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == ExitCode.CONFIG
    assert "usage: gradus init FOLDER" in capsys.readouterr().err


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match="No space left"), staged(tmp_path / "new"):
        raise full
    assert list(tmp_path.iterdir()) == []
