"""Tasks by index, and what is said when an environment cannot be loaded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from echo_tasksets import EchoConfig, EchoTaskset, TalkConfig, TalkEnv

from gradus.config import TaskSelectionConfig
from gradus.config.resolve import verifiers_config
from gradus.config.schema.environment import TrainEnvironmentConfig
from gradus.environments import tasks
from gradus.environments.load_errors import Stopped
from gradus.environments.roles import complete_roles
from gradus.environments.tasks import TaskIndex, load_tasks, trainable_agents
from gradus.errors import ConfigError, EnvironmentFailure

MODULES = Path(__file__).parents[2] / "environments"


@pytest.fixture(autouse=True)
def _test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODULES))


def load(**taskset: Any) -> TaskIndex:
    seat = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}}
    return load_tasks("here", {"taskset": taskset, "agent": seat})


def echo(num_tasks: int | None) -> TaskIndex:
    return TaskIndex(EchoTaskset(EchoConfig(id="echo", num_tasks=num_tasks)))


async def test_a_finite_taskset_knows_its_number_and_serves_any_order() -> None:
    index = load(id="gradus-test-echo", num_tasks=5)
    assert (index.num_tasks, index.taskset_id) == (5, "gradus-test-echo")
    prompts = [(await index.task(i))["task_data"]["prompt"] for i in (4, 0, 4)]
    assert prompts == ["repeat 4", "repeat 0", "repeat 4"]


async def test_the_task_record_keeps_the_fields_of_its_own_package() -> None:
    record = await load(id="gradus-test-echo").task(1)
    assert record["task_data"]["answer"] == "repeat 1"
    assert vf.WireTaskData.model_validate(record["task_data"]).model_extra == {
        "answer": "repeat 1",
        "behaviour": "plain",
    }


async def test_the_key_is_the_same_in_every_process() -> None:
    first, second = (await echo(3).task(1))["key"], (await echo(3).task(1))["key"]
    assert first == second != (await echo(3).task(2))["key"]


async def test_an_endless_taskset_goes_forward_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ENDLESS_WINDOW", 4)
    index = echo(None)
    assert index.num_tasks is None
    for wanted in (0, 100, 98, 3, 101):
        assert (await index.task(wanted))["task_data"]["prompt"] == f"repeat {wanted}"


class _Liar(EchoTaskset):
    """Says that it is endless, and ends."""

    def load(self) -> Iterator[Any]:
        self.config.num_tasks = 2
        return iter(super().load())


@pytest.mark.shows("F49")
async def test_an_endless_taskset_that_ends_is_told_so() -> None:
    index = TaskIndex(_Liar(EchoConfig(id="liar", num_tasks=None)))
    with pytest.raises(EnvironmentFailure, match="says that it is endless, and ended before"):
        await index.task(2)


class _Broken(EchoTaskset):
    """Raises at its third task."""

    def load(self) -> Iterator[Any]:
        yield from itertools.islice(super().load(), 2)
        raise KeyError("answer")


async def test_an_endless_taskset_that_raises_says_where_also_later() -> None:
    index = TaskIndex(_Broken(EchoConfig(id="broken", num_tasks=None)))
    await index.task(1)
    for wanted in (2, 3, 2):
        with pytest.raises(EnvironmentFailure, match="failed at task 2: KeyError: 'answer'"):
            await index.task(wanted)


@pytest.mark.parametrize("wanted", [-1, 3])
async def test_a_task_outside_the_range_is_refused_with_the_range(wanted: int) -> None:
    with pytest.raises(EnvironmentFailure, match="it has 3 tasks, counted from 0"):
        await echo(3).task(wanted)


def test_an_unknown_environment_is_refused_by_its_id() -> None:
    with pytest.raises(ConfigError) as caught:
        load(id="no-such-thing")
    assert str(caught.value) == (
        "source 'here': environment 'no-such-thing' is not installed: there is no Python module "
        "'no_such_thing'. Install its package, or correct the id"
    )


def test_an_environment_that_lacks_a_package_is_told_which() -> None:
    with pytest.raises(ConfigError, match="needs the Python module 'a_package_that_nobody_has'"):
        load(id="gradus-test-missing-module")


def test_an_environment_that_raises_at_import_is_told_with_the_place() -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        load(id="gradus-test-broken-import")
    message = str(caught.value)
    assert "RuntimeError: the data of this environment is not there" in message
    assert "gradus_test_broken_import.py, line 5" in message
    assert "\n" not in message


def test_settings_that_the_environment_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"refuses its settings: taskset\.colour is not a key of"):
        load(id="gradus-test-echo", colour="red")


def test_a_data_set_that_cannot_be_read_is_told_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gradus-reverse-text': .*none\.jsonl"):
        load(id="gradus-reverse-text", source="file", path=str(tmp_path / "none.jsonl"))


def test_what_a_taskset_says_in_our_errors_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^source 'here': .*: 'o/n' needs the package"):
        load(id="gradus-reverse-text", source="hub", dataset="o/n")


def test_a_taskset_that_exits_is_told_with_the_place() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"load its tasks: SystemExit: 4 .*_exits.py, line"
    ):
        load(id="gradus-test-exits")


def test_a_stop_signal_while_tasks_are_loaded_is_no_failure() -> None:
    with pytest.raises(Stopped):
        load(id="gradus-test-exits", is_signal=True)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gradus-test-echo' has no tasks"):
        load(id="gradus-test-echo", num_tasks=0)


class MarkingEnv(TalkEnv):
    """Lets its agent train or not, or wants more of it than a mark."""

    trainable = False
    needs_more = False

    async def setup(self, agents: vf.Agents) -> None:
        if self.needs_more:
            agents.agent.config  # noqa: B018 - reading it is what fails
        agents.agent.trainable = self.trainable


@pytest.mark.parametrize(
    ("trainable", "needs_more", "expected"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_agents_are_known_with_the_mark_that_setup_gives_them(
    trainable: bool, needs_more: bool, expected: bool
) -> None:
    seat = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}}
    config = TalkConfig.model_validate({"taskset": {"id": "gradus-test-echo"}, "agent": seat})
    environment = MarkingEnv(config)
    environment.trainable, environment.needs_more = trainable, needs_more
    assert trainable_agents(environment) == {"agent": expected}


def test_a_single_seat_is_an_agent() -> None:
    assert load(id="gradus-test-echo").agents == {"agent": True}


def test_both_seats_of_a_game_are_agents() -> None:
    seat = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": "gradus-kuhn-poker"}, "first": seat, "second": seat}
    assert load_tasks("here", config).agents == {"first": True, "second": True}


def completed(**source: Any) -> dict[str, Any]:
    """verifiers' config of a source, with a seat for each role of its environment."""
    return complete_roles("here", verifiers_config(TrainEnvironmentConfig.model_validate(source)))


def test_a_key_that_the_taskset_does_not_take_is_refused_with_the_nearest() -> None:
    config = completed(id="gradus-test-echo", taskset={"num_task": 3})
    with pytest.raises(ConfigError, match=r"taskset\.num_task is not a key .* mean 'num_tasks'\?"):
        load_tasks("here", config)


def test_packages_that_a_shipped_environment_lacks_are_named_with_its_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    for name in ("verifiers.v1.tasksets.textarena", "verifiers.v1.tasksets.textarena.taskset"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"needs the Python module 'nltk'.*verifiers"):
        completed(id="textarena", taskset={"game": "Wordle-v0"})


def test_settings_that_a_shipped_environment_wants_are_named() -> None:
    with pytest.raises(ConfigError, match=r"refuses its settings: .*pass `env` or `base_url`"):
        load_tasks("here", completed(id="openenv"))


@pytest.mark.parametrize(
    ("harness", "expected"), [({"id": "gradus-chat"}, False), ({"id": "bash"}, True)]
)
def test_a_harness_that_runs_code_offers_tools(harness: dict[str, Any], expected: bool) -> None:
    index = load_tasks("here", completed(id="gradus-test-echo", agent={"harness": harness}))
    assert index.offers_tools is expected


def test_a_taskset_with_a_tool_server_offers_tools() -> None:
    assert load_tasks("here", completed(id="gradus-word-lookup")).offers_tools


@pytest.mark.parametrize(
    ("harness", "words"),
    [
        ({"id": "codex"}, "asks the model by OpenAI's Responses"),
        ({"id": "claude-code"}, "asks the model by Anthropic's Messages"),
        (
            {"id": "pi", "transport": "responses"},
            'use agent.harness.transport = "chat_completions"',
        ),
    ],
)
def test_a_harness_whose_tokens_cannot_be_recorded_is_refused(
    harness: dict[str, Any], words: str
) -> None:
    source = {
        "id": "gradus-test-echo",
        "agent": {"harness": harness, "runtime": {"type": "docker"}},
    }
    config = completed(**source)
    with pytest.raises(ConfigError) as caught:
        load_tasks("here", config, is_rendered=True)
    assert words in str(caught.value)
    assert load_tasks("here", config).num_tasks is not None


def test_containers_ahead_are_refused_where_no_runtime_is_a_container_engine() -> None:
    config = completed(id="gradus-test-echo")
    with pytest.raises(ConfigError, match=r"warm_containers = 2 would start nothing"):
        load_tasks("here", config, warm_containers=2)
    assert load_tasks("here", config).num_tasks is not None
    config = completed(id="gradus-test-echo", agent={"runtime": {"type": "podman"}})
    assert load_tasks("here", config, warm_containers=2).num_tasks is not None


def test_a_task_that_shows_an_image_is_refused_where_the_policy_plays() -> None:
    config = completed(id="gradus-test-picture")
    with pytest.raises(ConfigError, match="task 'picture' shows the model an image"):
        load_tasks("here", config, is_rendered=True)
    words = TaskSelectionConfig(exclude=["picture"])
    assert load_tasks("here", config, is_rendered=True, selection=words).num_tasks == 1
    assert load_tasks("here", config).num_tasks == 2
    assert load_tasks("here", config, is_rendered=True, reads_images=True).num_tasks == 2


def test_a_task_that_shows_an_image_by_its_address_is_refused_by_name() -> None:
    config = completed(id="gradus-test-picture", taskset={"url": "https://example.org/a.png"})
    with pytest.raises(ConfigError, match=r"task 'picture' .* by the address 'https://example.org"):
        load_tasks("here", config, is_rendered=True, reads_images=True)


def test_a_task_that_shows_an_image_is_refused_where_a_model_is_asked_by_text() -> None:
    config = completed(id="gradus-test-picture")
    seen: Any = {"is_rendered": True, "reads_images": True, "asks_by_text": "opd"}
    with pytest.raises(ConfigError, match=r"task 'picture' .* and opd asks a model by text alone"):
        load_tasks("here", config, **seen)
    words = TaskSelectionConfig(exclude=["picture"])
    assert load_tasks("here", config, **seen, selection=words).num_tasks == 1


def test_modules_that_are_imported_only_while_it_plays_are_looked_for() -> None:
    index = load_tasks("here", completed(id="openenv", taskset={"env": "x"}))
    assert index.missing_modules == ("openenv",)
    assert load_tasks("here", completed(id="gradus-test-echo")).missing_modules == ()


def chosen(num_tasks: int | None = 20, **selection: Any) -> TaskIndex:
    taskset = EchoTaskset(EchoConfig(id="echo", num_tasks=num_tasks))
    return TaskIndex(taskset, selection=TaskSelectionConfig(**selection))


async def prompts(index: TaskIndex, number: int | None = None) -> list[str]:
    number = index.num_tasks if number is None else number
    return [(await index.task(i))["task_data"]["prompt"] for i in range(number or 0)]


async def names(index: TaskIndex) -> list[str]:
    count = index.num_tasks
    assert count is not None
    return [(await index.task(i))["task_data"]["name"] for i in range(count)]


async def test_tasks_are_selected_by_key_shuffled_and_limited() -> None:
    every = await prompts(chosen())
    keys = [(await chosen().task(i))["key"] for i in (3, 5)]
    assert await prompts(chosen(include=keys)) == [every[3], every[5]]
    assert await prompts(chosen(exclude=keys)) == [
        p for p in every if p not in (every[3], every[5])
    ]
    assert await prompts(chosen(limit=2)) == every[:2]
    mixed = await prompts(chosen(shuffle=1))
    assert sorted(mixed) == sorted(every) != mixed
    assert await prompts(chosen(shuffle=1, limit=4)) == mixed[:4]
    assert await prompts(chosen(shuffle=2)) != mixed


async def test_what_is_held_out_and_what_is_left_are_the_whole_and_share_nothing() -> None:
    sides = [
        await prompts(chosen(40, holdout_fraction=0.3, side=side)) for side in ("train", "held_out")
    ]
    assert sides[0]
    assert sides[1]
    assert sorted(sides[0] + sides[1]) == sorted(await prompts(chosen(40)))
    fewer = await prompts(chosen(20, holdout_fraction=0.3, side="held_out"))
    assert fewer == [prompt for prompt in sides[1] if prompt in fewer], "stable under growth"


@pytest.mark.parametrize("prompt", [True, False])
async def test_another_instruction_holds_out_the_same_tasks(prompt: bool) -> None:
    """Training asks with an instruction, the evaluation with another one; some environments give
    the prompt only as they play."""

    class Told(EchoTaskset):
        text = ""

        def load(self) -> Iterator[Any]:
            for task in super().load():
                kept = task.data.prompt if prompt else None
                named = {"prompt": kept, "name": str(task.data.prompt)}
                yield task.with_data(**named, system_prompt=self.text)

    def side(name: str, text: str) -> TaskIndex:
        taskset = type("Other", (Told,), {"text": text})(EchoConfig(id="echo", num_tasks=40))
        selection = {"holdout_fraction": 0.3, "side": name}
        return TaskIndex(taskset, selection=TaskSelectionConfig.model_validate(selection))

    trained, measured = side("train", "Be short."), side("held_out", "Think first.")
    assert not set(await names(trained)) & set(await names(measured))
    same = side("train", "Think first.")
    assert [(await trained.task(i))["key"] for i in range(3)] == [
        (await same.task(i))["key"] for i in range(3)
    ]


async def test_an_instruction_that_is_all_of_a_task_counts() -> None:
    class Told(EchoTaskset):
        def load(self) -> Iterator[Any]:
            for task in super().load():
                yield task.with_data(prompt=None, name=None, system_prompt=str(task.data.prompt))

    index = TaskIndex(Told(EchoConfig(id="echo", num_tasks=2)), selection=TaskSelectionConfig())
    assert (await index.task(0))["key"] != (await index.task(1))["key"]


class _Variants(EchoTaskset):
    """Three tasks about each word: other prompts, the same answer."""

    def load(self) -> Iterator[Any]:
        for number, task in enumerate(super().load()):
            text = f"word {number // 3}"
            data = task.data.model_copy(update={"answer": text})
            yield type(task)(data, self.config.task)


async def test_variants_of_one_word_stay_on_one_side() -> None:
    def side(name: str, by: str | None) -> TaskIndex:
        taskset = _Variants(EchoConfig(id="echo", num_tasks=120))
        selection = {"holdout_fraction": 0.4, "side": name, "holdout_by": by}
        return TaskIndex(taskset, selection=TaskSelectionConfig.model_validate(selection))

    async def words(index: TaskIndex) -> list[str]:
        return [(await index.task(i))["task_data"]["answer"] for i in range(index.num_tasks or 0)]

    train, held_out = await words(side("train", "answer")), await words(side("held_out", "answer"))
    assert len(train) + len(held_out) == 120
    assert not set(train) & set(held_out)
    assert 3 * len(set(held_out)) == len(held_out) > 0
    # By its own key each variant has a side of its own.
    assert set(await words(side("train", None))) & set(await words(side("held_out", None)))


def test_a_field_that_tasks_do_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no value in the field 'info.word' .* it has: .*answer"):
        chosen(holdout_fraction=0.5, holdout_by="info.word")


async def test_an_endless_taskset_is_filtered_as_it_comes_or_ends_at_the_limit() -> None:
    endless = chosen(None, holdout_fraction=0.5)
    assert endless.num_tasks is None
    first = await prompts(endless, 5)
    limited = chosen(None, holdout_fraction=0.5, limit=5)
    assert (limited.num_tasks, await prompts(limited)) == (5, first)
    shuffled = chosen(None, holdout_fraction=0.5, limit=5, shuffle=0)
    assert sorted(await prompts(shuffled)) == sorted(first)


async def test_an_endless_taskset_that_selects_no_more_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "LOOK_AHEAD", 50)
    keys = [(await chosen(None).task(i))["key"] for i in (3, 5)]
    index = chosen(None, include=keys)
    assert len(await prompts(index, 2)) == 2
    with pytest.raises(EnvironmentFailure, match=r"none of the 50 tasks after .*limit = 2$"):
        await index.task(2)
    with pytest.raises(ConfigError, match=r"set tasks\.limit = 2$"):
        chosen(None, include=keys, limit=3)
    assert chosen(None, include=keys, limit=2).num_tasks == 2


async def test_a_selection_without_tasks_is_refused_with_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"none of its 20 tasks is selected .* Names begin with"):
        chosen(include=["no-such-*"])
    with pytest.raises(EnvironmentFailure, match="none of its 10,000 tasks is selected"):
        await chosen(None, include=["no-such-*"]).task(0)
