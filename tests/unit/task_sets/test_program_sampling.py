"""What a program asks of the sampler is done, refused, or counted; and what then does not train."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from policy_talks import TOKEN, policy_seat
from renderers import Qwen3RendererConfig
from transformers import PreTrainedTokenizerFast
from verifiers.v1 import graph
from verifiers.v1.clients import train

import gradus_program.door
from gradus.environments.verifiers import replies
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus_program.asked import granted, wishes
from gradus_program.harness import _counter
from gradus_program.speech import Refused
from gradus_program.taskset import ProgramConfig, ProgramTaskset

pytestmark = pytest.mark.torch

ASK = 'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY"'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    file = tmp_path / "reply_length.py"
    file.write_text("def rate(reply):\n    return float(len(reply))\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 900}, {"max_tokens": 100}),
        ({"stop": "."}, {"stop": ["."]}),
        ({"stop": [".", "!"]}, {"stop": [".", "!"]}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        ({"response_format": SCHEMA}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"temperature": 1.0, "top_p": 1, "tool_choice": "auto", "stop": []}, {}),
        ({"reasoning_effort": "high", "thinking": {"type": "enabled"}}, {}),
        ({"logprobs": True, "n": 1, "service_tier": "auto"}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 0}, {}),
    ],
)
def test_what_the_engine_can_do_becomes_its_parameters(
    asked: dict[str, Any], own: dict[str, Any]
) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 100}
    assert granted(wishes(asked, sampling), sampling) == own


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"frequency_penalty": 0.5}, "`frequency_penalty` is not supported"),
        ({"logit_bias": {"5": 1}}, "`logit_bias` is not supported"),
        ({"seed": 3}, "`seed` is not supported"),
        ({"guided_json": {"type": "object"}}, "`guided_json` is not supported"),
        ({"tool_choice": "required"}, "`tool_choice` is not supported"),
        ({"top_logprobs": 5}, 'sampling = "run"'),
        ({"temperature": 3}, "between 0 and 2"),
        ({"temperature": "hot"}, "`temperature` = hot is not"),
        ({"max_tokens": True}, "`max_tokens` = True is not a whole number"),
        ({"max_tokens": 0}, "between 1 and"),
        ({"top_k": 2.5}, "`top_k` = 2.5 is not"),
        ({"temperature": float("nan")}, "`temperature` = nan is not"),
        ({"top_p": -1}, "between 0 and 1"),
        ({"stop": [""]}, "none of them empty"),
        ({"stop": 5}, "`stop` must be"),
        ({"response_format": {"type": "xml"}}, "json_schema with a schema"),
        ({"response_format": "json"}, "json_schema with a schema"),
    ],
)
def test_what_it_cannot_do_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        granted(wishes(asked, {"temperature": 1.0}), {"temperature": 1.0})


async def play(
    asked: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    harness: str = "gradus-program",
) -> tuple[vf.Trace, list[dict[str, Any]]]:
    """An episode of one call that asks this, and what the engine was told."""
    for owner, name in ((train.TrainClient, "get_response"), (graph.PendingTurn, "commit")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    replies.sample_as_asked()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **asked})
    config = {"command": ["sh", "-c", f'{ASK} -d "$0"', body], "tasks": [{"prompt": "x"}]}
    config |= {"reward": "reply_length:rate", "sampling": "program"}
    task = next(iter(ProgramTaskset(ProgramConfig.model_validate(config))))
    async with ScriptedEngine(reply=lambda _: reply, data_token=TOKEN) as engine:
        seat = policy_seat(engine, folder, {"id": harness}, sampling={"max_tokens": 100})
        agent = vf.make_agent(seat)
        async with agent:
            trace = await agent.run(task)
    return trace, [call.sampling_params for call in engine.calls]


async def test_the_temperature_of_a_call_reaches_the_engine_and_the_trainer(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    asked = {"temperature": 0.5, "logprobs": True, "reasoning_effort": "low"}
    trace, told = await play(asked, model, monkeypatch, reply)
    assert trace.errors == []
    assert [params["temperature"] for params in told] == [0.5]
    (node,) = [str(number) for number, it in enumerate(trace.nodes) if it.sampled]
    assert trace.info["temperatures"] == {node: 0.5}
    assert trace.info["quarantined_turns"] == []
    said = json.loads(trace.info["program"]["stdout"])["choices"][0]
    assert [it["logprob"] for it in said["logprobs"]["content"]] == trace.nodes[-1].logprobs
    assert trace.info["program"]["dropped"] == {"reasoning_effort": 1}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0}, "temperature 0"),
        ({"top_p": 0.5}, "top_p"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
async def test_tokens_of_another_distribution_are_context_and_the_reason_is_told(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    reason: str,
) -> None:
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    trace, told = await play(asked, model, monkeypatch, reply)
    assert len(told) == 1
    assert trace.info["quarantined_turns"] == [0]
    assert trace.info["untrained_turns"] == {reason: [0], "unread": []}


@pytest.mark.parametrize(("is_read", "unread"), [(False, [0]), (True, [])])
async def test_a_reply_whose_program_left_before_it_was_written_is_context_until_it_is_read(
    is_read: bool,
    unread: list[int],
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = [True, not is_read]

    def check(_: object) -> None:
        if gone.pop(0):
            raise ConnectionError

    monkeypatch.setattr(gradus_program.door, "_check_open", check)
    again = f'{ASK} -H "x-stainless-retry-count: 1"'
    monkeypatch.setattr(f"{__name__}.ASK", f'{ASK} -d "$0" >/dev/null; {again}')
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    trace, told = await play({}, model, monkeypatch, reply)
    assert (len(told), trace.num_turns) == (1, 1)
    assert trace.info["untrained_turns"] == {"unread": unread}
    assert trace.info["quarantined_turns"] == unread
    assert trace.info["program"]["num_unread"] == 1 + (not is_read)
    assert ("choices" in trace.info["program"]["stdout"]) == is_read


async def test_a_turn_of_another_harness_trains_without_word_of_who_read_it(
    model: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    trace, told = await play({}, model, monkeypatch, reply, "gradus-chat")
    assert (trace.num_turns, len(told)) == (1, 1)
    assert trace.info.keys().isdisjoint({"quarantined_turns", "untrained_turns"})


async def test_tokens_are_counted_as_the_engine_is_asked(model: Path) -> None:
    client = vf.TrainClientConfig(
        base_url="http://127.0.0.1:1",
        renderer_model_name=str(model),
        renderer=Qwen3RendererConfig(),
    )
    counts = []
    for kwargs in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        sampling = vf.SamplingConfig.model_validate(kwargs)
        context = SimpleNamespace(client=client, model="policy", sampling=sampling)
        count = _counter(context)
        assert count is not None
        counts.append(await count([{"role": "user", "content": "hi"}], None))
    assert counts[1] > counts[0]


async def test_a_temperature_below_the_engine_s_coldest_trains_at_what_the_engine_takes(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    trace, told = await play({"temperature": 0.001}, model, monkeypatch, reply)
    assert [params["temperature"] for params in told] == [0.01]
    assert list(trace.info["temperatures"].values()) == [0.01]


@pytest.mark.parametrize(
    ("stop", "text", "found"), [("l", "he", "l"), (["o", "ell"], "h", "ell"), ("x", "hello.", None)]
)
def test_which_stop_ended_a_text_is_told(stop: Any, text: str, found: str | None) -> None:
    message, shown = SimpleNamespace(content="hello."), {"content": "hello."}
    assert replies._cut(message, shown, [stop] if isinstance(stop, str) else stop) == found
    assert message.content == shown["content"] == text


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]},
        },
    }
    for name in ("look", "write")
]
NAMED = {"type": "function", "function": {"name": "write"}}
CALL = '<tool_call>\n{"name": "write", "arguments": {"a": 5}}\n</tool_call>'


@pytest.mark.parametrize(("choice", "is_other_call_possible"), [("required", True), (NAMED, False)])
async def test_a_forced_call_is_sampled_by_the_structure_of_calls_and_is_context(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    choice: object,
    is_other_call_possible: bool,
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    reply = Reply(tokenizer.encode(CALL, add_special_tokens=False))
    asked = {"tools": TOOLS, "tool_choice": choice}
    trace, told = await play(asked, model, monkeypatch, reply)
    assert trace.errors == []
    assert trace.info["untrained_turns"] == {"tool_choice": [0], "unread": []}
    form = told[0]["structured_outputs"]["structural_tag"]
    xgrammar.Grammar.from_structural_tag(form)  # as vLLM checks it
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiled = xgrammar.GrammarCompiler(known).compile_structural_tag(form)

    def is_possible(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return all(map(matcher.accept_token, tokens)) and matcher.accept_token(
            tokenizer.convert_tokens_to_ids("<|im_end|>")
        )

    assert is_possible(CALL)
    assert is_possible(f"{CALL}\n{CALL}")
    assert is_possible(CALL.replace("write", "look")) is is_other_call_possible
    for text in (
        "",
        "hello",
        f"hi{CALL}",
        CALL.replace("5", "6"),
        CALL.replace("5}", "5   }"),
        CALL.replace("<tool_call>", "<"),
    ):
        assert not is_possible(text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "names none of"),
        ({"tool_choice": {"type": "allowed_tools"}}, "names none of the `tools`"),
        ({"tool_choice": 5}, "names none of the `tools`"),
        ({"tool_choice": "required", "response_format": SCHEMA}, "exclude each other"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        granted(wishes(asked, {}), {}, TOOLS)
    with pytest.raises(Refused, match="`tool_choice`"):
        granted(wishes(asked, {}), {}, [])


async def test_a_text_ends_before_its_stop_and_its_tokens_stay(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tokenizer.encode("hello. you", add_special_tokens=False)
    trace, told = await play({"stop": "."}, model, monkeypatch, Reply(tokens))
    assert told[0]["stop"] == ["."]
    assert (trace.last_reply, trace.reward) == ("hello", 5.0)
    assert trace.nodes[-1].token_ids[-len(tokens) - 1 : -1] == tokens


async def test_a_program_that_may_not_call_tools_is_told_of_none(
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = Reply(tokenizer.encode("hello", add_special_tokens=False))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = {"tools": tools, "tool_choice": "none"}
    trace, _ = await play(asked, model, monkeypatch, reply)
    assert (trace.errors, trace.nodes[0].tools) == ([], [])
