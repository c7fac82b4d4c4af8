"""The task set `jsonl`: rows, what is wrong with a line, and what a function says of a reply."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_jsonl.answers import exact_answer, last_number
from gradus_jsonl.rows import read_rows
from gradus_jsonl.taskset import JsonlConfig, JsonlTask, JsonlTaskset, RewardError

REPOSITORY = Path(__file__).parents[3]
REWARD = "def rate(reply, row): return {'right': float(reply == row['answer'])}\n"


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, **keys: Any) -> list[JsonlTask]:
    return list(JsonlTaskset(JsonlConfig(id="gradus-jsonl", path=path, **keys)))


def trace(reply: str) -> Any:
    return SimpleNamespace(last_reply=reply, messages=[])


def test_every_line_is_a_task_with_its_prompt_and_all_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "2+2", "answer": 4, "level": "easy"}, {"prompt": "x"})
    first, second = load(path, instruction="Be short.")
    assert (first.data.prompt, first.data.system_prompt) == ("2+2", "Be short.")
    assert first.data.row == {"prompt": "2+2", "answer": 4, "level": "easy"}
    assert second.data.prompt == "x"


def test_messages_are_a_prompt_without_the_reply_at_their_end(tmp_path: Path) -> None:
    ask = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"messages": [*ask, {"role": "assistant", "content": "a"}]}
    (task,) = load(write(tmp_path, row))
    assert [(m.role, m.content) for m in task.data.prompt] == [("system", "s"), ("user", "u")]
    assert task.data.row == row


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nothing", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["a"]', "is a list, not a JSON object"),
        ("{}", "has no 'prompt' and no 'messages'; it has no key"),
        ('{"question": "a"}', "it has question. Name the key of the prompt: prompt_key"),
        ('{"prompt": " "}', "'prompt' is empty"),
        ('{"prompt": 3}', "'prompt' is 3; it must be a text"),
        ('{"messages": []}', "'messages' asks nothing"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "asks nothing"),
        ('{"messages": [{"role": "user"}]}', "'messages', message 1 is"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "system, user, assistant"),
        ('{"prompt": "\\ud800"}', "no text"),
    ],
)
def test_a_line_that_is_no_task_is_told_with_file_and_line(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        list(read_rows(path))
    assert str(told.value).startswith(f"{path}:2")
    assert words in str(told.value)
    assert len(str(told.value)) < 1000


def test_a_file_that_holds_nothing_readable_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        list(read_rows(tmp_path / "none.jsonl"))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no rows"):
        list(read_rows(path))
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="is not UTF-8"):
        list(read_rows(path))


def test_a_file_of_windows_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [found.prompt for found in read_rows(path)] == ["a", "b"]


def test_the_prompt_may_have_another_key(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "a", "prompt": "not this"})
    assert [found.prompt for found in read_rows(path, key="question")] == ["a"]
    with pytest.raises(ConfigError, match="has no 'text'"):
        list(read_rows(path, key="text"))


def test_both_sides_together_are_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"row {n}"} for n in range(60)))
    sides = [
        {task.data.prompt for task in load(path, holdout_fraction=0.3, side=side)}
        for side in ("train", "held_out")
    ]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {f"row {n}" for n in range(60)}
    assert len(load(path, num_tasks=7)) == 7


def test_a_row_is_the_same_task_under_another_reward_and_instruction(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "2 + 2?", "answer": 4}, {"prompt": "5?", "answer": 5})
    number = {"reward": "gradus_jsonl.answers:last_number", "instruction": "Count."}
    keys = [task.key for task in load(path)]
    assert [task.key for task in load(path, **number)] == keys
    assert len(set(keys)) == 2


def test_a_reward_that_cannot_serve_is_refused_with_the_tasks(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"})
    with pytest.raises(ConfigError, match="there is no file"):
        load(path, reward=f"{tmp_path}/none.py:rate")
    with pytest.raises(ValidationError, match="path"):
        JsonlConfig(id="gradus-jsonl")


async def test_a_function_of_a_file_rates_the_reply(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    path = write(tmp_path, {"prompt": "2+2", "answer": "4"})
    (task,) = load(path, reward=f"{tmp_path}/mine.py:rate")
    assert task.gold_replies() == ["4"]
    for reply, reward in {
        "4": 1.0,
        "5": 0.0,
        "": 0.0,
        "4\x00\ud800": 0.0,
        "4" * 10**5: 0.0,
    }.items():
        assert await task.reward(trace(reply)) == {"right": reward}


async def test_a_reward_that_is_no_number_names_the_function(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def rate(): return float('nan')\n", encoding="utf-8")
    (task,) = load(write(tmp_path, {"prompt": "a"}), reward=f"{tmp_path}/bad.py:rate")
    with pytest.raises(RewardError, match=r"bad\.py:rate' returned nan"):
        await task.reward(trace("x"))


@pytest.mark.parametrize(
    ("reply", "exact", "number"),
    [
        ("1250", 1.0, 1.0),
        (" 1250\n", 1.0, 1.0),
        ("It makes 1,250.00.", 0.0, 1.0),
        ("1250, or rather 3", 0.0, 0.0),
        ("give me full reward", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("9" * 10**5, 0.0, 0.0),
        ("3/1250", 0.0, 0.0),
        ("Of 1250 eggs the share is 3/4.", 0.0, 0.0),
        ("1250, or rather 5e3", 0.0, 0.0),
        ("\\boxed{1250}", 0.0, 1.0),
        (".1250", 0.0, 0.0),
        ("1,2,5,0", 0.0, 0.0),
        ("1250 kg, so 1250kg", 0.0, 1.0),
    ],
)
def test_the_ready_made_rewards_read_an_answer(reply: str, exact: float, number: float) -> None:
    assert exact_answer(reply, {"answer": 1250}) == exact
    assert last_number(reply, {"answer": 1250}) == number


@given(st.text(alphabet=st.characters()), st.one_of(st.text(), st.integers(), st.floats()))
def test_the_ready_made_rewards_are_0_or_1_for_anything(reply: str, answer: Any) -> None:
    assert exact_answer(reply, {"answer": answer}) in (0.0, 1.0)
    with suppress(ValueError):
        assert last_number(reply, {"answer": answer}) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("x = \u22124", -4, 1.0),
        ("x = \u22124", 4, 0.0),
        ("-$4", "-$4", 1.0),
        ("-$4", 4, 0.0),
        ("2 \u2013 3 = -1", -1, 1.0),
        ("$1,000.50", "1000.5 km", 1.0),
        ("about .5", "0.5", 1.0),
        ("5%", "5%", 1.0),
        ("12 m2", 12, 1.0),
        ("12 l of H2O", 12, 1.0),
        ("m2", 2, 0.0),
        ("1.5e-3", 3, 0.0),
        ("1e+10", 10, 0.0),
        ("4\u20445", 5, 0.0),
        ("\\frac{3}{4}", 4, 0.0),
        ("3 \u00f7 4", 4, 0.0),
        *((text, 5, 0.0) for text in ("2*10^5", "-(5)", "\u221a5", "\\sqrt{5}", "5 million", "5k")),
        *((text, 5, 0.0) for text in ("5\\pi", "2 \\times 5", "3-5", "4:5", "5 thirds")),
        *((text, 5, 1.0) for text in ("**5**", "= (5)", "10-5=5", "It is 5!", "5 months")),
        ("x is 3, not \\frac12", 3, 0.0),
        ("1{,}234", 1234, 1.0),
        *((text, "3 m/s", 1.0) for text in ("3m/s", "3 cm^2", "3 m^{2}")),
        *(("0.0000001", answer, 1.0) for answer in (1e-07, "1e-07")),
        ("100000000000000000000", 1e20, 1.0),
        ("4", "2 + 2\n#### 4", 1.0),
        *(("4", answer, 1.0) for answer in ("[4]", "x = 4", "4 square feet", "4 miles per hour")),
    ],
)
def test_signs_currencies_and_fractions_belong_to_a_number(
    reply: str, answer: object, reward: float
) -> None:
    assert last_number(reply, {"answer": answer}) == reward


@pytest.mark.parametrize(
    "answer",
    [
        *("1/2", "12,5", "five", "", None, "1e5", True, float("nan")),
        *("2\\sqrt{5}", "\u221a5", "10^5", "5 million", "5M", "4:05", "2024-05-05", "May 5", "3:5"),
        *("5 thirds", "5 or 6", "5 x", "5!", "-(5)", "x = 4, y = 5"),
    ],
)
def test_a_row_whose_answer_is_no_number_is_named(answer: object) -> None:
    with pytest.raises(ValueError, match="no number"):
        last_number("5", {"answer": answer})


def test_a_row_without_an_answer_is_named() -> None:
    with pytest.raises(ValueError, match="no 'answer'; it has prompt, level"):
        exact_answer("a", {"prompt": "p", "level": 1})


async def test_the_example_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    folder = "examples/task_sets"
    tasks = load(Path(f"{folder}/jsonl_tasks.jsonl"), reward=f"{folder}/jsonl_reward.py:rate")
    rewards = await tasks[0].reward(trace(tasks[0].data.row["answer"]))
    assert rewards["right"] == 0.9
    assert sum(rewards.values()) <= 1.0
    assert sum(rewards.values()) > sum((await tasks[0].reward(trace("?"))).values())


async def test_several_functions_rate_prompt_and_reply(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def asked(prompt): return len(prompt)\ndef said(reply): return len(reply)\n")
    path = write(tmp_path, {"messages": [{"role": "user", "content": "abc"}]})
    (task,) = load(path, reward={f"{file}:asked": 1, f"{file}:said": 0.5})
    assert await task.reward(trace("to")) == {"asked": 3.0, "said": 1.0}


async def test_a_function_that_fails_is_a_reward_error_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def rate(row):\n    return row['missing']\n")
    (task,) = load(write(tmp_path, {"prompt": "x"}), reward=f"{file}:rate")
    with pytest.raises(RewardError, match=r"reward 'rate' failed: KeyError(?s:.*)line 2, in rate"):
        await task.reward(trace("to"))


@pytest.mark.parametrize(
    ("raised", "is_passing"),
    [
        ("ConnectionRefusedError('no judge')", True),
        ("TimeoutError()", True),
        ("httpx.ConnectError('no judge')", True),
        ("openai.APIConnectionError(request=httpx.Request('GET', 'http://x'))", True),
        ("urllib.error.URLError('no judge')", True),
        ("urllib.error.HTTPError('http://x', 503, 'busy', None, None)", True),
        ("urllib.error.HTTPError('http://x', 401, 'no key', None, None)", False),
        ("KeyError('x')", False),
        ("FileNotFoundError('x')", False),
    ],
)
async def test_a_judge_that_does_not_answer_is_asked_again_as_an_endpoint_is(
    raised: str, is_passing: bool, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import httpx, openai, urllib.error\ndef rate(reply):\n    raise {raised}\n")
    (task,) = load(write(tmp_path, {"prompt": "x"}), reward=f"{file}:rate")
    with pytest.raises(vf.ProviderError if is_passing else RewardError, match="'rate' failed"):
        await task.reward(trace("to"))
