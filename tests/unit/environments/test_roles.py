"""Who says what of a seat: the config, then the environment's author, then the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import harness_class

from gradus.config.resolve import verifiers_config
from gradus.config.schema.environment import TrainEnvironmentConfig
from gradus.environments.roles import complete_roles
from gradus.environments.tasks import load_tasks
from gradus.errors import ConfigError

MODULES = Path(__file__).parents[2] / "environments"
ROLES = "gradus-test-roles"
REMOTE = "gradus-test-remote"


@pytest.fixture(autouse=True)
def _test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODULES))


def completed(**source: Any) -> dict[str, Any]:
    """verifiers' config of a source, with a seat for each role of its environment."""
    return complete_roles("here", verifiers_config(TrainEnvironmentConfig.model_validate(source)))


def environment(**source: Any) -> Any:
    return vf.resolve_env_config(completed(**source))


def test_every_role_gets_the_settings_of_the_source() -> None:
    config = environment(
        id="gradus-kuhn-poker", agent={"max_turns": 3, "timeout": {"rollout": 7.0}}
    )
    for role in (config.first, config.second):
        assert (role.harness.id, role.runtime.type) == ("gradus_chat", "subprocess")
        assert (role.max_turns, role.timeout.rollout, role.timeout.setup) == (3, 7.0, 120.0)


def test_a_role_keeps_what_its_author_pinned_and_gets_the_rest_of_the_source() -> None:
    config = environment(id=ROLES, agent={"max_turns": 9, "max_total_tokens": 50})
    critic = config.critic
    assert (critic.max_turns, critic.max_total_tokens) == (2, 50)
    assert (critic.timeout.rollout, critic.timeout.scoring) == (5.0, 120.0)
    assert critic.runtime.type == "subprocess"
    assert (config.boxed.harness.id, config.boxed.runtime.type) == ("bash", "docker")
    assert config.boxed.runtime.image == "box"


def test_a_plain_chat_is_played_by_ours_with_the_other_keys_of_the_pin() -> None:
    critic = environment(id=ROLES).critic
    assert (critic.harness.id, critic.harness.tool_timeout) == ("gradus_chat", 7.0)


@pytest.mark.parametrize(
    "source",
    [{"agent": {"harness": {"id": "null"}}}, {"agents": {"critic": {"harness": {"id": "null"}}}}],
)
def test_a_config_that_asks_for_the_plain_chat_gets_it(source: dict[str, Any]) -> None:
    assert environment(id=ROLES, **source).critic.harness.id == "null"


def test_a_harness_may_lie_inside_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_agents" / "play"
    package.mkdir(parents=True)
    (package / "shell.py").write_text(
        "from verifiers.v1.harnesses.null import NullHarness\n"
        "class Shell(NullHarness): pass\n"
        "__all__ = ['Shell']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    nested = {"id": "my_agents.play.shell"}
    first = environment(id="gradus-kuhn-poker", agent={"harness": nested}).first
    assert first.harness.id == "my_agents.play.shell"
    assert harness_class("my_agents.play.shell@1.0").__name__ == "Shell"
    with pytest.raises(ConfigError, match="no Python module"):
        environment(id="gradus-kuhn-poker", agent={"harness": {"id": "my_agents.play.none"}})


def test_a_key_of_the_source_that_reaches_no_role_is_refused() -> None:
    chat = {"id": "chat"}
    own = {"harness": chat}
    with pytest.raises(
        ConfigError, match=r"`agent.harness`.*plain, critic, boxed; write agents\.plain\."
    ):
        completed(id=ROLES, agent=own)
    with pytest.raises(ConfigError, match=r"set it for boxed; write agents\.boxed\.harness"):
        completed(id=ROLES, agent=own, agents={"plain": own, "critic": own})
    every = {"plain": own, "critic": own, "boxed": own}
    assert environment(id=ROLES, agent=own, agents=every).boxed.harness.id == "gradus_chat"


def test_a_harness_of_the_task_sets_own_package_is_a_pin() -> None:
    config = environment(id=ROLES)
    assert config.plain.harness is None
    assert config.agent_harnesses()["plain"].id == ROLES
    named = environment(id=ROLES, agents={"plain": {"harness": {"id": "bash"}}})
    assert named.plain.harness.id == "bash"


def test_what_the_config_writes_for_a_role_goes_before_the_author() -> None:
    own = {
        "max_turns": 4,
        "runtime": {"type": "subprocess"},
        "harness": {"id": "chat"},
        "timeout": {"setup": 1.0},
        "max_output_tokens": 8,
    }
    config = environment(id=ROLES, agents={"critic": own, "boxed": {"runtime": own["runtime"]}})
    critic = config.critic
    assert (critic.max_turns, critic.max_output_tokens) == (4, 8)
    assert (critic.timeout.setup, critic.timeout.rollout) == (1.0, 5.0)
    assert config.boxed.runtime.type == "subprocess"
    assert config.boxed.harness.id == "bash"


def test_a_role_that_is_named_without_keys_is_like_one_that_is_not_named() -> None:
    assert completed(id=ROLES, agents={"critic": {}, "boxed": {}}) == completed(id=ROLES)


def test_what_is_written_for_a_source_with_one_role_is_written_for_the_role() -> None:
    local = {"type": "subprocess"}
    assert environment(id=REMOTE, agent={"runtime": local}).agent.max_turns == 9
    config = environment(id=REMOTE, agent={"runtime": local, "max_turns": 3})
    assert (config.agent.max_turns, config.agent.runtime.type) == (3, "subprocess")


def test_a_remote_sandbox_is_used_only_when_the_config_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'agent' in 'prime'.* agents\.agent\.runtime = "):
        completed(id=REMOTE)
    prime = {"agent": {"runtime": {"type": "prime"}}}
    assert environment(id=REMOTE, agents=prime).agent.runtime.type == "prime"


def test_a_simulated_user_of_verifiers_needs_no_role_named() -> None:
    config = environment(id="user-sim", taskset={"id": "gradus-test-echo"}, agent={"max_turns": 3})
    assert (config.user.harness.id, config.user.max_turns) == ("gradus_chat", 8)
    assert (config.assistant.harness.id, config.assistant.max_turns) == ("gradus_chat", 3)


@pytest.mark.parametrize(
    ("role", "words"),
    [("frist", "did you mean 'first'?"), ("judge", "its roles: first, second")],
)
def test_a_role_that_the_class_lacks_is_refused_with_its_roles(role: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(id="gradus-kuhn-poker", agents={role: {}})
    assert f"agents.{role} is not a role of this environment; {words}" in str(caught.value)


def test_a_role_among_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"settings\.first is a role; write agents\.first"):
        completed(id="gradus-kuhn-poker", settings={"first": {"max_turns": 1}})


def test_settings_of_the_environment_reach_it() -> None:
    settings = {"persona": "x", "max_concurrent_agents": 2}
    config = environment(id="user-sim", taskset={"id": "gradus-test-echo"}, settings=settings)
    assert (config.persona, config.max_concurrent_agents) == ("x", 2)


def test_a_setting_that_the_environment_does_not_have_is_refused() -> None:
    config = completed(id="user-sim", taskset={"id": "gradus-test-echo"}, settings={"personna": 1})
    with pytest.raises(ConfigError, match="personna is not a setting of this environment"):
        load_tasks("here", config)


def test_what_verifiers_refuses_to_play_is_told_as_a_matter_of_the_config() -> None:
    config = completed(id="agentic-judge", taskset={"id": "gradus-test-echo"})
    with pytest.raises(
        ConfigError, match=r"refuses this configuration: .*can execute code.*agents"
    ):
        load_tasks("here", config)


@pytest.mark.parametrize(
    ("source", "runtime"),
    [
        ({"id": "gradus-general-agent"}, "podman"),
        (
            {"id": "gradus-general-agent", "agent": {"runtime": {"type": "subprocess"}}},
            "subprocess",
        ),
        ({"id": "gradus-reverse-text"}, "subprocess"),
        ({"id": "gradus-reverse-text", "agent": {"harness": {"id": "rlm"}}}, "podman"),
    ],
)
def test_what_needs_a_container_gets_the_engine_that_answers(
    source: dict[str, Any], runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine, code in (("docker", 1), ("podman", 0)):
        (tmp_path / engine).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / engine).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert completed(**source)["agent"]["runtime"] == {"type": runtime}
