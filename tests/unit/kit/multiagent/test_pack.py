"""A pack that cannot be played fails when it is loaded, with everything that is wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_debate import DebateEnvConfig
from gradus_debate.settings import rules_of
from gradus_kit.multiagent.fields import build_field
from gradus_kit.multiagent.pack import load_pack

GUIDE = Path(__file__).parents[4] / "docs" / "debate.md"

GOOD = """
version: 2
system: You are {{ viewer_id }}.
question: "{{ task_prompt }}"
user: {debater_a: {propose: "{{ phase }}, {{ round_index }}"}}
"""
FIELDS = "fields: {debater_a: {propose: {%s}}}"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pack("mine", text)
    return str(caught.value)


def test_a_pack_is_read() -> None:
    pack = load_pack("mine", GOOD)
    assert pack.user["debater_a"]["propose"].render(phase="p", round_index=1) == "p, 1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrong: 1", "wrong: unknown key; a pack takes _grader"),
        ("think: {debater_a: {tags: x}}", "think.debater_a.tags: unknown key"),
        ("think: {debater_a: {visibility: all}}", "'all' is none of disabled, private"),
        ("think: {debater_a: '<x>'}", "is not a name of a tag"),
        ("opponent_wrap: '{{ who }}'", "opponent_wrap: unknown variable 'who'"),
        ("system: {debater_a: 'x {{'}", "is not a template"),
        ("system: {debater_a: ' '}", "must be a text that is not empty"),
        ("user: {debater_a: {critique: '{{ member_id }}'}}", "'member_id' changes from turn"),
        ("reward: best", "reward: 'best' is none of winner, picked, exact"),
        ("schedule: [{members: [a, a], phase: x}]", "members = ['a', 'a'] must be different"),
        ("schedule: [{members: [a], phase: x, when: 1}]", "unknown key 'when'"),
        (FIELDS % "answer: {scoring: enum}", "scoring enum needs `values`"),
        (
            FIELDS % "answer: {scoring: {mode: enum, values: [Yes., 'yes']}}",
            "values 'Yes.' and 'yes' are the same when compared",
        ),
        (FIELDS % "answer: {type: int, scoring: {mode: numeric, min: .inf}}", "finite number"),
        (FIELDS % "answer: {type: int, scoring: {mode: numeric, min: 3, max: 3}}", "less than"),
        (FIELDS % "answer: {scoring: numeric}", "needs type int or float"),
        (FIELDS % "answer: {type: text}", "type = 'text' is none of"),
        (FIELDS % "answer: {kind: str}", "unknown key 'kind'"),
        (FIELDS % "'<b>': {type: str}", "is not a name of a tag"),
        ("_grader: {user: x, positive: 'Yes', negative: 'yes.'}", "must be two different words"),
        ("_grader: {user: x, positive: yes, negative: no}", "each must be a word in quotes"),
        (FIELDS % "answer: {scoring: {mode: enum, values: [yes, no]}}", "put them in quotes"),
        ("_grader: {positive: A, negative: B}", "_grader.user: must be a text"),
        ("_judge_prompts: {think: x}", "_judge_prompts.think: unknown key"),
    ],
)
def test_each_fault_is_named(text: str, words: str) -> None:
    lines = [line for line in GOOD.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    assert words in refusal("\n".join([*lines, text]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ phase }}",
        "{% if is_last_round %}last{% endif %}",
        "{% set x = round_index + 1 %}{{ x }}",
        "{{ [1, 2][round_index] }}",
        "{{ {'a': num_rounds}.a }}",
        "{% for i in range(slot_id) %}x{% endfor %}",
    ],
)
@pytest.mark.parametrize("part", ["system", "question"])
def test_what_changes_from_turn_to_turn_cannot_stand_at_the_top(part: str, template: str) -> None:
    text = f'version: 2\n{part}: {{debater_a: "{template}"}}'
    assert f"{part}.debater_a" in refusal(text)
    assert "changes from turn to turn" in refusal(text)


def test_a_verdict_must_not_be_an_answer() -> None:
    values = FIELDS % "answer: {scoring: {mode: enum, values: [same, other]}}"
    grader = "_grader: {user: x, positive: SAME, negative: DIFFERENT}"
    assert "'same' is a value of the field 'answer'" in refusal(f"{GOOD}{values}\n{grader}")


def test_all_faults_stand_in_one_error() -> None:
    text = refusal("version: 1\nnews: 1\nsystem: '{{ phase }}'\nreward: all")
    for words in ("version: 1 must be 2", "news: unknown key", "'phase' changes", "reward: 'all'"):
        assert words in text


@pytest.mark.parametrize(
    "text", ["- 1", "a: [", "", "system: x\nsystem: y", "!!python/object:os.system {}", "\x00"]
)
def test_what_is_no_map_is_refused(text: str) -> None:
    assert "pack 'mine'" in refusal(text)


def test_the_judge_s_texts_may_stand_in_one_place() -> None:
    prompts = "_judge_prompts: {system: S, question: Q, user: {final: decide}}"
    pack = load_pack("mine", GOOD + prompts)
    assert pack.system["judge"].render() == "S"
    assert pack.system["*"].render(viewer_id="x") == "You are x."
    assert pack.user["judge"]["final"].render() == "decide"
    twice = f"version: 2\nsystem: {{judge: x}}\n{prompts}"
    assert "stands in _judge_prompts.system as well" in refusal(twice)


@given(text=st.text(max_size=60) | st.binary(max_size=30).map(lambda b: b.decode("latin-1")))
def test_any_text_is_a_pack_or_a_refusal(text: str) -> None:
    with pytest.raises(ConfigError):
        load_pack("mine", text)


@pytest.mark.parametrize(
    ("written", "text", "value"),
    [
        ({"type": "str"}, "<answer> B </answer>", "B"),
        ({"type": "str"}, "<ANSWER>B</answer> <answer>B</Answer>", "B"),
        ({"type": "str"}, "<answer>B</answer><answer>C</answer>", None),
        ({"type": "str"}, "<answer>B</answer>, so <answer>b.</answer>", "b."),
        ({"type": "str"}, "<answer>B</answer><answer></answer>", None),
        ({"type": "str"}, "no tag, </answer> <answer>", None),
        ({"type": "int", "scoring": "numeric"}, "<answer>1,200</answer>", 1200),
        ({"type": "int", "scoring": "numeric"}, "<answer>1.5</answer>", None),
        ({"type": "float", "scoring": "numeric"}, "<answer>nan</answer>", None),
        (
            {"type": "float", "scoring": {"mode": "numeric", "max": 1}},
            "<answer>2</answer>",
            None,
        ),
        ({"type": "bool"}, "<answer>Yes.</answer>", True),
        ({"type": "list"}, "<answer>a, b</answer>", ("a", "b")),
        ({"scoring": {"mode": "enum", "values": ["Left"]}}, "<answer>'left'</answer>", "Left"),
        ({"scoring": {"mode": "enum", "values": ["Left"]}}, "<answer>right</answer>", None),
    ],
)
def test_a_field_is_read_or_missing(written: dict[str, object], text: str, value: object) -> None:
    assert build_field("answer", written).read(text) == value


@given(text=st.text(max_size=200), kind=st.sampled_from(["str", "int", "float", "list", "bool"]))
def test_any_text_can_be_searched_for_a_field(text: str, kind: str) -> None:
    build_field("answer", {"type": kind}).read(f"<answer>{text}</answer>{text}")


def test_a_huge_reply_is_searched_in_bounded_time() -> None:
    started = time.process_time()
    spec = build_field("answer", {"type": "int", "scoring": "numeric"})
    assert spec.read("<answer>" * 12_000) is None
    assert spec.read("<answer>7</answer>" * 6_000) == 7
    assert spec.read(f"<answer>{'9' * 90_000}</answer>") is None
    assert time.process_time() - started < 1.0


def test_the_pack_of_the_guide_can_be_played(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    written = {"taskset": {"id": "gradus-debate"}, "pack": str(path)}
    rules = rules_of(DebateEnvConfig.model_validate(written))
    assert rules.members == ("debater_a", "debater_b", "judge")
