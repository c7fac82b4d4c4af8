"""The settings of a debate, and the rules that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import verifiers.v1 as vf
from jinja2 import Template
from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from gradus.errors import ConfigError, GradusError
from gradus.plugins import find_function
from gradus_debate.other_order import check_order
from gradus_kit.multiagent.channels import Channel
from gradus_kit.multiagent.kernel import TurnSlot
from gradus_kit.multiagent.pack import (
    DECISION,
    JUDGE,
    Pack,
    load_pack,
    load_pack_file,
    pack_problems,
)
from gradus_kit.multiagent.pack import refuse as refuse_pack
from gradus_kit.multiagent.prompts import channels_of
from gradus_kit.multiagent.schedule import Schedule
from gradus_kit.multiagent.scores import TIE, DialogueScorer
from gradus_kit.multiagent.seats import RULES as SEAT_RULES
from gradus_kit.multiagent.seats import stable_hash

OPPONENT = "opponent"
MAX_MODEL_CALLS = 2
"""Of one turn."""
SHIPPED = ("selfplay", "sequential", "consultancy", "open-ended", "direct")
"""Packs that come with the package."""


class SlotConfig(BaseConfig):
    """One slot of the schedule."""

    members: list[str] = Field(min_length=1)
    """Who speaks; several speak at the same time and do not see each other."""
    phase: str = Field(min_length=1)
    """Which of the pack's instructions they get."""


class VerdictConfig(BaseConfig):
    """A model that compares two answers with one of two words."""

    base_url: str
    """Its OpenAI-compatible endpoint, e.g. "http://host:8000/v1"."""
    model: str
    """Its name there."""
    api_key_var: str = "GRADUS_NO_KEY"
    """Name of the environment variable that holds its key."""
    deadline_seconds: float = Field(15.0, gt=0, le=30)
    """A call that takes longer counts as failed. All calls of an episode run at once."""


def _seat() -> vf.AgentConfig:
    # A reply that is only a tool call is answered once; then the turn is what was said.
    harness = {"id": "gradus-chat", "max_model_calls": MAX_MODEL_CALLS}
    return vf.AgentConfig.model_validate({"harness": harness})


class DebateEnvConfig(vf.EnvConfig):
    """Who may play, and by which rules."""

    debater_a: vf.AgentConfig = _seat()
    """The first debater."""
    debater_b: vf.AgentConfig = _seat()
    """The second debater."""
    consultant: vf.AgentConfig = _seat()
    """Argues alone for the answer that it was assigned."""
    opponent: vf.AgentConfig = _seat()
    """With an endpoint it plays every seat but the learner's and the judge's; without one, none."""
    judge: vf.AgentConfig = _seat()
    """Reads the others and decides."""
    max_concurrent_agents: int | None = Field(None, ge=1)
    """Members of one episode that speak at the same time. None means all of a slot."""
    pack: str = "selfplay"
    """The texts: a pack that comes with the package, or the path of a YAML file."""
    schedule: list[SlotConfig] | str | None = None
    """The order of turns: slots, or "module:function" that gives the next slot for what was said.
    None means that of the pack."""
    seats: str | None = None
    """"module:function" that says for a task's data which role plays each member. None means the
    role of its name, and the opponent for all but the learner."""
    quarantine: Literal["mask", "train"] = "mask"
    """True if a reply that cannot be read is left out of training, whatever came of it, or trains
    and costs `format_penalty`. Where a judge cannot tell what was hidden from it, a policy that is
    never pushed away from such replies may drift into them."""
    format_penalty: float = Field(0.5, gt=0, le=10)
    """With quarantine = "train": what a member's reward loses when none of its replies can be read,
    or has the answer that was asked for; in proportion when some are so."""
    drop_judge: bool = True
    """True if the judge's trace is recorded and never trains."""
    order: Literal["drawn", "fixed"] = "drawn"
    """True if two debaters with the same turns change places in half of the tasks, as a hash of the
    task says: else the judge reads the same one first in every episode."""
    ask_judge_again: float = Field(0.0, ge=0, le=1)
    """Share of the tasks of which the judge is asked a second time, with the sides in the other
    order: `episode/judge_flipped` says how often its verdict changes. No reward depends on it."""
    grader: VerdictConfig | None = None
    """A model that compares free answers with the right one. None means off."""
    matcher: VerdictConfig | None = None
    """A model that compares free answers with each other. None means off."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quarantine == "mask" and "format_penalty" in self.model_fields_set:
            raise ValueError(
                f"format_penalty = {self.format_penalty:g} has no effect while replies that cannot "
                'be read do not train: set quarantine = "train"'
            )
        try:
            rules_of(self)
        except GradusError as error:
            raise ValueError(str(error)) from error
        return self


@dataclass(frozen=True)
class Rules:
    """The rules of every episode: texts, order of turns, who may play which member."""

    pack: Pack
    schedule: Schedule
    has_opponent: bool
    """True if another model plays the seats that do not learn."""
    cast: Callable[[Mapping[str, Any]], Mapping[str, str]] | None
    """The function of `seats`."""
    endpoints: frozenset[str]
    """Roles that another model plays."""
    order: str = "drawn"

    @property
    def members(self) -> tuple[str, ...]:
        """Everyone who has a turn."""
        return self.schedule.members

    @cached_property
    def channels(self) -> dict[str, Channel]:
        """How each member marks private text."""
        return channels_of(self.pack, self.members)

    @cached_property
    def scorer(self) -> DialogueScorer:
        """Scores for the members in the schedule's order."""
        return DialogueScorer(self.pack, self.members)

    @cached_property
    def other_order(self) -> Schedule | None:
        """The schedule with the two sides in each other's place; None where there is none."""
        if self.order == "fixed" or len(self.scorer.contestants) != 2:
            return None
        return self.schedule.swapped(*self.scorer.contestants)

    def schedule_of(self, question: str) -> Schedule:
        """The order of turns of one task; the same in all its episodes."""
        is_swapped = stable_hash(f"order {question}") % 2 == 1
        return (self.other_order if is_swapped else None) or self.schedule

    def plays(self, role: str) -> bool:
        """Tell whether a role has a seat in some episode."""
        if role == OPPONENT:
            return self.has_opponent
        return role in self.members

    def seat(self, data: Mapping[str, Any]) -> dict[str, str]:
        """Member → role for one task; ConfigError when that cannot be."""
        learner = data.get("learner_seat")
        contestants = self.scorer.contestants
        if learner is not None and learner not in contestants:
            raise ConfigError(
                f"learner_seat = {learner!r} is not a seat; there are {', '.join(contestants)}"
            )
        if self.cast is not None:
            return self._checked(dict(self.cast(data)))
        if self.has_opponent and learner is None:
            raise ConfigError(
                "an opponent with an endpoint needs a learner_seat in each task: set the key "
                "taskset.learner_seat"
            )
        others = {m for m in contestants if m != learner} if self.has_opponent else set()
        return {m: OPPONENT if m in others else m for m in self.members}

    def _checked(self, cast: dict[str, str]) -> dict[str, str]:
        if set(cast) != set(self.members):
            raise ConfigError(
                f"the function of `seats` names {', '.join(sorted(cast)) or 'none'}; it must name"
                f" {', '.join(self.members)}"
            )
        for member, role in cast.items():
            if role != member and role not in self.endpoints:
                raise ConfigError(
                    f"the function of `seats` gives {member} to the role {role!r}, which has no "
                    "endpoint; the policy plays the member of its role's name"
                )
        return cast


def rules_of(config: DebateEnvConfig) -> Rules:
    """The rules of a configuration; ConfigError lists what is wrong with its pack."""
    pack = find_pack(config.pack)
    schedule = _schedule(config, pack)
    roles = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    problems = []
    if unknown := [m for m in schedule.members if m not in roles or m == OPPONENT]:
        known = ", ".join(name for name in roles if name != OPPONENT)
        problems.append(f"schedule: {', '.join(unknown)} is not a member; there are {known}")
    problems += pack_problems(pack, schedule.members, schedule.turns, _rendered)
    problems += _judge_problems(pack, schedule)
    refuse_pack(pack.name, problems)
    endpoints = frozenset(name for name, agent in roles.items() if agent.client is not None)
    seat = getattr(config.taskset, "learner_seat", "")
    if OPPONENT in endpoints and config.seats is None and seat is None:
        raise ConfigError(
            "agents.opponent has an endpoint, so one seat learns and the opponent plays the other: "
            'set taskset.learner_seat, e.g. "bernoulli"'
        )
    if pack.reward == "picked" and getattr(config.taskset, "assign_sides", True) is False:
        raise ConfigError(
            f"pack {pack.name!r} rewards the assigned answer that the judge picks, and no task "
            "assigns one, so that every reward is 0: set taskset.assign_sides = true"
        )
    check_order(
        schedule.slots,
        [member for member in schedule.members if member != JUDGE],
        config.ask_judge_again,
    )
    _refuse_seat(seat, [member for member in schedule.members if member != JUDGE])
    cast = None if config.seats is None else find_function("seats", config.seats)
    return Rules(pack, schedule, OPPONENT in endpoints, cast, endpoints, config.order)


def _refuse_seat(seat: str | None, contestants: list[str]) -> None:
    """ConfigError for a learner's seat that no episode of this schedule has."""
    if not seat or seat in contestants or (seat in SEAT_RULES and len(contestants) > 1):
        return
    reason = "draws between seats" if seat in SEAT_RULES else "is not a seat"
    raise ConfigError(
        f"taskset.learner_seat = {seat!r} {reason}, and the schedule's members beside the judge "
        f"are {', '.join(contestants)}"
    )


@lru_cache(maxsize=16)
def _shipped(name: str) -> Pack:
    text = (files("gradus_debate") / "packs" / f"{name}.yaml").read_text(encoding="utf-8")
    return load_pack(name, text)


def find_pack(name: str) -> Pack:
    """A pack by its name or by its path."""
    if name in SHIPPED:
        return _shipped(name)
    if name.endswith((".yaml", ".yml")):
        return load_pack_file(Path(name))
    raise ConfigError(
        f"pack = {name!r} is none of {', '.join(SHIPPED)}; a pack of your own is a path that ends "
        "in .yaml"
    )


def _schedule(config: DebateEnvConfig, pack: Pack) -> Schedule:
    if isinstance(config.schedule, str):
        return Schedule.of_function(find_function("schedule", config.schedule), config.schedule)
    if config.schedule is None:
        if not pack.slots:
            raise ConfigError(f"pack {pack.name!r} has no schedule; set settings.schedule")
        return Schedule.of_slots(pack.slots)
    slots = []
    for number, slot in enumerate(config.schedule):
        try:
            slots.append(TurnSlot(number, tuple(slot.members), slot.phase))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return Schedule.of_slots(slots)


def _judge_problems(pack: Pack, schedule: Schedule) -> list[str]:
    """List what keeps the rewards of a pack from being read."""
    contestants = [member for member in schedule.members if member != JUDGE]
    if pack.reward == "exact":
        return [
            f"fields: reward 'exact' needs the field answer in the last turn of {member}"
            for member in contestants
            if "answer" not in pack.fields_of(member, _last_phase(schedule, member))
        ]
    last = schedule.slots[-1]
    if last.members != (JUDGE,):
        return [f"schedule: reward {pack.reward!r} needs a last slot of {JUDGE!r} alone"]
    fields = pack.fields_of(JUDGE, last.phase)
    if pack.reward == "picked":
        return [] if "answer" in fields else [f"fields: {JUDGE} needs `answer` in {last.phase!r}"]
    decision = fields.get(DECISION)
    if decision is None or decision.mode != "enum":
        return [f"fields: {JUDGE} needs `{DECISION}` in {last.phase!r}, with scoring enum"]
    if set(decision.values) - {TIE} != set(contestants):
        return [
            f"fields.{JUDGE}.{last.phase}.{DECISION}: values are {', '.join(decision.values)}; "
            f"they must be {', '.join(contestants)}, and may have {TIE}"
        ]
    return []


def _last_phase(schedule: Schedule, member: str) -> str:
    return [slot.phase for slot in schedule.slots if member in slot.members][-1]


def _rendered(template: Template) -> str:
    """A template filled in with made-up values."""
    return template.render(
        task_prompt="a question",
        viewer_id="member",
        answer="A",
        has_assigned_answer=True,
        schedule_explainer="1. phase: member",
        phase="phase",
        round_index=0,
        num_rounds=2,
        is_first_round=True,
        is_last_round=False,
    )
