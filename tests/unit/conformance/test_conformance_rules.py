"""What the rules of `gradus env check` make of replies and rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gradus.cli.env import run, sources_of, subject_of
from gradus.cli.main import main
from gradus.conformance import probes
from gradus.conformance.check import describe_reading
from gradus.conformance.findings import Outcome, broken
from gradus.conformance.transcript import ByteTokenizer, path_problem
from gradus.errors import ConfigError, ExitCode
from gradus.testing.engine_script import FinishedReply, GenerateCall
from gradus.testing.episodes import build_message, build_trace

SEEN = {
    "seconds": 0.5,
    "num_tasks": 2,
    "agents": {"agent": True, "judge": False},
    "offers_tools": False,
    "missing_modules": [],
    "tasks": [{"task_data": {"prompt": "a"}}, {"task_data": {"prompt": "b"}}],
    "again": [{"prompt": "a"}, {"prompt": "b"}],
    "gold": [{}, {}],
}


@pytest.mark.parametrize(
    "text", ["", "plain", "naïve ☂", "<|im_end|>", "<tool_call>{}</tool_call>"]
)
def test_every_text_survives_the_tokenizer_of_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_that_are_no_text_are_tokens_too() -> None:
    tokenizer = ByteTokenizer()
    assert "\ufffd" in tokenizer.decode(tokenizer.encode(b"\xff\xfe"))


def test_a_saved_tokenizer_loads_as_the_worker_loads_it(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("reward", "gold", "outcome"),
    [
        (0.0, 1.0, Outcome.OK),
        (0.4, 1.0, Outcome.OK),
        (0.6, 1.0, Outcome.NOTE),
        (1.0, 1.0, Outcome.BROKEN),
        (2.0, 1.0, Outcome.BROKEN),
        (0.3, None, Outcome.OK),
        (1.0, None, Outcome.NOTE),
    ],
)
def test_a_hostile_reply_may_bring_little(
    reward: float, gold: float | None, outcome: Outcome
) -> None:
    assert probes.judge_hostile("empty reply", reward, gold, 0.0).outcome is outcome


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_broken(value: float) -> None:
    line = probes.check_range("empty reply", {"agent": value})
    assert line is not None
    assert line.outcome is Outcome.BROKEN


def test_a_perfect_reply_of_the_task_itself_must_win() -> None:
    assert probes.judge_gold("its gold_replies", 0.0, 0.0).outcome is Outcome.BROKEN
    assert probes.judge_gold("its field 'answer' as {}", 0.0, 0.0).outcome is Outcome.NOTE
    assert probes.judge_gold("its gold_replies", 1.0, 0.0).outcome is Outcome.OK


def test_arguments_are_made_up_by_type() -> None:
    schema = {
        "properties": {"n": {"type": "integer"}, "unit": {"enum": ["cm", "m"]}, "free": {}},
        "required": ["n", "unit", "free"],
    }
    assert probes.made_up_arguments(schema) == {"n": 1, "unit": "cm", "free": "example"}


def test_a_gold_reply_may_be_a_tool_call() -> None:
    probe = probes.gold_from_hook({"replies": [{"tool": "add", "arguments": {"a": 1}}, "2"]})
    assert probe is not None
    assert '{"name": "add", "arguments": {"a": 1}}' in str(probe.say(0, ""))
    assert [probe.say(turn, "") for turn in (1, 5)] == ["2", "2"]


def test_each_role_may_have_its_own_gold() -> None:
    probe = probes.gold_from_hook({"roles": {"judge": ["a wins"], "first": ["x", "y"]}})
    assert probe is not None
    assert [probe.say(1, "", role) for role in ("judge", "first", "nobody")] == ["a wins", "y", ""]


def test_answers_are_guessed_from_the_fields_of_a_task() -> None:
    said = [probe.say(0, "") for probe in probes.guessed_gold({"answer": 7, "prompt": "x"})]
    assert said[0] == "7"
    assert "\\boxed{7}" in said
    assert probes.guessed_gold({"prompt": "x"}) == []


def test_a_call_that_is_no_path_of_its_trace_is_named() -> None:
    messages = [build_message(None, [3, 4]), build_message(0, [5, 6], sampled=2)]
    trace = build_trace(messages)
    reply = FinishedReply([5, 6], [-0.5, -0.5], "stop")
    call = GenerateCall([3, 4], {}, None, trace.id, version=0, reply=reply)
    assert path_problem([trace], [call]) is None
    changed = GenerateCall([3, 9], {}, None, trace.id, version=0, reply=reply)
    assert "are not a path of the trace" in str(path_problem([trace], [changed]))
    lost = GenerateCall([3, 4], {}, None, "another", version=0, reply=reply)
    assert "belongs to no trace" in str(path_problem([trace], [lost]))


def test_roles_and_tasks_are_described() -> None:
    lines = {line.check: line for line in describe_reading(SEEN)}
    assert lines["roles"].seen == "agent (trains), judge (never trains)"
    assert lines["tasks"].seen == "2; the first begins 'a'"
    assert "same tasks" not in lines


def test_tasks_that_change_within_a_process_are_broken() -> None:
    again = [{"prompt": "a"}, {"prompt": "other"}]
    lines = {line.check: line for line in describe_reading({**SEEN, "again": again})}
    assert lines["same tasks"].outcome is Outcome.BROKEN
    assert "task 1 has another 'prompt': 'b', then 'other'" in lines["same tasks"].seen


def test_a_line_says_what_to_do_and_keeps_to_the_width() -> None:
    lines = broken("echoed prompt", "reward 1 " * 20, "Mend it").lines(80)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("broken      echoed prompt")
    assert lines[-1].endswith("Mend it")


def test_an_environment_that_is_not_there_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["env", "check", "nobody-has-this", "--json"]) == ExitCode.CONFIG
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["check"], line["outcome"]) == ("found", "broken")


def test_keys_of_a_source_may_come_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "source.toml"
    file.write_text(
        '[taskset]\nseed = 3\n[agents.agent]\nbase_url = "http://host/v1"\nmodel = "m"\n'
    )
    words = ["reverse-text", "@", str(file), "--taskset.num_tasks", "5"]
    (source,) = sources_of(words)
    settings = subject_of(source).process.verifiers["taskset"]
    assert (settings["seed"], settings["num_tasks"]) == (3, 5)
    assert source.agents["agent"].base_url is None, "the scripted model plays every role"


def test_every_source_of_a_run_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(
        'max_steps = 1\nmodel.name = "m"\n[[orchestrator.train.env]]\nid = "reverse-text"\n'
        '[[orchestrator.train.env]]\nid = "kuhn-poker"\nname = "cards"\n'
    )
    assert [source.id for source in sources_of(["@", str(file)])] == ["reverse-text", "kuhn-poker"]


@pytest.mark.parametrize(
    "words", [["check"], ["what"], ["check", "x", "--base-url", "http://h/v1"]]
)
def test_what_cannot_be_checked_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        run(words)


def test_perfect_replies_that_earn_nothing_on_other_tasks_are_broken() -> None:
    assert probes.judge_gold_elsewhere({1: 1.0, 2: 0.5}, 0.0).outcome is Outcome.OK
    line = probes.judge_gold_elsewhere({1: 1.0, 2: 0.0}, 0.0)
    assert (line.outcome, "0 (task 2) to 1 on 2 more tasks" in line.seen) == (Outcome.BROKEN, True)
    assert probes.judge_gold_elsewhere({1: 0.0}, math.nan).outcome is Outcome.OK


def test_a_task_that_pays_the_same_replies_differently_is_noted() -> None:
    line = probes.noisy_reward({"agent": 0.5}, {"agent": 0.25})
    assert (line.outcome, "agent 0.5 and 0.25" in line.seen) == (Outcome.NOTE, True)
