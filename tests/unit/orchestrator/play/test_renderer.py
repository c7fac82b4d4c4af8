"""The renderer of the policy: by name, from the chat template, and what it means for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.config import ModelConfig
from gradus.errors import ConfigError
from gradus.orchestrator.play.renderer import (
    check_bodies,
    check_tools,
    find_renderer,
    known_renderer,
    load_policy_tokenizer,
    main,
    reads_tool_calls,
    settle_renderer,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gradus.testing.tiny_model import build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def _asked_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The child's answers without the child, which imports torch for seconds."""

    async def ask(*arguments: str) -> dict[str, Any]:
        main(*arguments)
        answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answer

    monkeypatch.setattr("gradus.orchestrator.play.renderer._ask_child", ask)


def with_template(tiny: Path, folder: Path, template: str | None) -> str:
    """A copy of the tokenizer with another chat template; None takes it away."""
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_name_on_the_hub_is_enough() -> None:
    assert known_renderer(ModelConfig(name="Qwen/Qwen3-0.6B")) == {"name": "qwen3"}
    other = ModelConfig(name="runs/warm-up/model", tokenizer="Qwen/Qwen3-0.6B")
    assert known_renderer(other) == {"name": "qwen3"}


def test_settings_without_a_name_are_those_of_the_known_renderer() -> None:
    model = ModelConfig(name="Qwen/Qwen3-0.6B", renderer={"enable_thinking": False})
    assert known_renderer(model) == {"name": "qwen3", "enable_thinking": False}


@pytest.mark.torch
def test_a_folder_with_a_known_template_gets_the_renderer_of_its_family(tiny: Path) -> None:
    assert find_renderer(str(tiny)) == {"name": "qwen3"}


@pytest.mark.torch
def test_a_template_of_no_known_model_is_asked_itself(tiny: Path, tmp_path: Path) -> None:
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
    assert find_renderer(with_template(tiny, tmp_path, chatml)) == {"name": "default"}


@pytest.mark.torch
def test_a_model_without_a_chat_template_is_refused(tiny: Path, tmp_path: Path) -> None:
    name = with_template(tiny, tmp_path, None)
    with pytest.raises(ConfigError, match="has no chat template, so no prompt can be written"):
        find_renderer(name)
    assert load_policy_tokenizer(name, {"name": "qwen3"}).chat_template is None


@pytest.mark.torch
async def test_the_run_settles_the_renderer_without_loading_a_tokenizer_itself(tiny: Path) -> None:
    settled = await settle_renderer(ModelConfig(name=str(tiny), renderer="auto"))
    assert settled.renderer == {"name": "qwen3"}


@pytest.mark.torch
async def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer of .* cannot be loaded"):
        await settle_renderer(ModelConfig(name=str(tmp_path)))


async def test_a_renderer_that_is_written_is_taken() -> None:
    settled = await settle_renderer(ModelConfig(name="nowhere", renderer="qwen3"))
    assert settled.renderer == {"name": "qwen3"}


async def test_an_unknown_renderer_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match="there is no such renderer; use one of 'auto', "):
        await settle_renderer(ModelConfig(name="nowhere", renderer="qwen33"))


def test_tools_are_refused_where_no_call_would_be_read() -> None:
    model = ModelConfig(name="tiny", renderer="default")
    with pytest.raises(ConfigError, match=r"source 'words' offers tools, but no renderer reads"):
        check_tools("words", model, offers_tools=True)
    check_tools("words", model, offers_tools=False)


def test_the_chat_template_with_a_parser_reads_tool_calls() -> None:
    assert reads_tool_calls({"name": "default", "tool_parser": "qwen3"})
    assert not reads_tool_calls({"name": "default"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "default", "thinking_retention": "all"}, "decides itself which reasoning"),
        ({"name": "qwen3", "thinking_retention": "some"}, "'some' is not one of"),
        ({"name": "qwen3", "tool_parser": "hermes"}, "'qwen3' has its own parser"),
        ({"name": "qwen3", "enable_thinking": "no"}, "must be true or false, without quotes"),
        ({"name": "default", "tool_parser": "herms"}, "there is no 'herms'; use one of"),
        ({"name": "default", "reasoning_parser": "thinks"}, "there is no 'thinks'; use one of"),
    ],
)
async def test_settings_that_would_fail_every_call_are_refused_at_the_start(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await settle_renderer(ModelConfig(name="nowhere", renderer=settings))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "qwen3", "enable_thinking": False, "thinking_retention": "all"},
        {"name": "default", "tool_parser": "glm", "reasoning_parser": "think"},
        {"name": "default", "a_variable_of_the_template": 1},
    ],
)
def test_tables_that_the_renderer_takes_are_taken(settings: dict[str, Any]) -> None:
    assert known_renderer(ModelConfig(name="nowhere", renderer=settings)) == settings


@pytest.mark.torch
@pytest.mark.usefixtures("_asked_here")
async def test_thinking_cannot_be_kept_by_a_template_of_no_known_model(
    tiny: Path, tmp_path: Path
) -> None:
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
    model = ModelConfig(
        name=with_template(tiny, tmp_path, chatml), renderer={"thinking_retention": "all"}
    )
    with pytest.raises(ConfigError, match="decides itself which reasoning it takes out"):
        await settle_renderer(model)


def test_the_parser_of_hermes_calls_is_known_by_both_of_its_names() -> None:
    model = ModelConfig(name="nowhere", renderer={"name": "default", "tool_parser": "hermes"})
    assert known_renderer(model) == {"name": "default", "tool_parser": "qwen3"}


@pytest.mark.torch
@pytest.mark.usefixtures("_asked_here")
async def test_a_renderer_that_marks_no_bodies_is_refused_for_what_learns_them(tiny: Path) -> None:
    """The plain chat template's tells nothing of its tokens."""
    plain = ModelConfig(name=str(tiny), renderer={"name": "default", "tool_parser": "qwen3"})
    with pytest.raises(ConfigError, match="'default' does not mark which tokens that is"):
        await check_bodies("words", plain, ["tool"])
    await check_bodies("words", ModelConfig(name=str(tiny), renderer="qwen3"), ["tool", "user"])


@pytest.mark.torch
@pytest.mark.usefixtures("_asked_here")
async def test_a_role_that_the_template_refuses_is_told(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelConfig(name=str(tiny), renderer="qwen3")
    with caplog.at_level("WARNING"):
        await check_bodies("words", model, ["tool", "developer"])
    assert "what messages of developer say" in caplog.text
