"""A pack: every text of a game between agents, with its fields, channels and order of turns.

A pack is YAML. It is checked as a whole when it is loaded, and once more against the schedule that
plays it; an error lists everything that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml
from jinja2 import StrictUndefined, Template, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gradus.errors import ConfigError
from gradus_kit.multiagent.channels import TAG_PATTERN, VISIBILITIES, Channel, Visibility
from gradus_kit.multiagent.fields import FieldSpec, build_field, canonical
from gradus_kit.multiagent.kernel import TurnSlot

PACK_VERSION = 2
ANSWER, DECISION = "answer", "decision"
"""Fields that scoring reads: the answer that a member defends, the winner that a judge names."""
EVERY_TURN = frozenset({"task_prompt", "viewer_id", "answer", "has_assigned_answer"}) | {
    "schedule_explainer"
}
"""Variables that never change for a member, so that they may stand at the top of its prompt."""
PER_TURN = frozenset(
    {"round_index", "num_rounds", "phase", "is_first_round", "is_last_round", "slot_id"}
) | {"member_id"}
INSTRUCTION = EVERY_TURN | (PER_TURN - {"member_id", "slot_id"})
WRAP = EVERY_TURN | {"member_id", "slot_id", "phase", "text", "private"}
VERDICT = frozenset({"task_prompt", "answer", "other"})
JUDGE = "judge"
Reward = Literal["winner", "picked", "exact"]
"""`winner`: the judge names it. `picked`: the judge gives the member's assigned answer.
`exact`: its last answer is the task's."""
_KEYS = {
    *("version", "schedule", "reward", "system", "question", "user", "think", "fields"),
    *("opponent_wrap", "_judge_prompts", "_grader", "_matcher"),
}
_DEFAULT_WRAP = (
    "[{{ member_id }}, {{ phase }}]\n{{ text }}"
    "{% if private %}\n[{{ member_id }}, {{ phase }}, not said aloud]\n{{ private }}{% endif %}"
)
_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
ByMember = Mapping[str, Template]


@dataclass(frozen=True)
class VerdictPrompt:
    """How another model is asked for one of two words."""

    system: Template | None
    user: Template
    positive: str
    negative: str

    def read(self, reply: str) -> bool:
        """Tell whether the reply is the positive word; ValueError when it is neither."""
        word = reply.strip()
        if word not in (self.positive, self.negative):
            raise ValueError(
                f"the verdict is {word[:80]!r}; it must be {self.positive!r} or {self.negative!r}"
            )
        return word == self.positive


@dataclass(frozen=True)
class Pack:
    """Texts, fields and channels by member; `*` is for every member without its own.

    >>> pack = load_pack("selfplay", text)  # doctest: +SKIP
    """

    name: str
    system: ByMember = field(default_factory=dict)
    question: ByMember = field(default_factory=dict)
    user: Mapping[str, ByMember] = field(default_factory=dict)
    opponent_wrap: ByMember = field(default_factory=dict)
    channels: Mapping[str, Channel] = field(default_factory=dict)
    fields: Mapping[tuple[str, str], Mapping[str, FieldSpec]] = field(default_factory=dict)
    grader: VerdictPrompt | None = None
    matcher: VerdictPrompt | None = None
    slots: tuple[TurnSlot, ...] = ()
    """The order of turns unless the configuration has another."""
    reward: Reward = "winner"

    def channel(self, member: str) -> Channel:
        return self.channels.get(member) or self.channels.get("*") or Channel()

    def fields_of(self, member: str, phase: str) -> Mapping[str, FieldSpec]:
        return self.fields.get((member, phase), {})

    def text(self, part: ByMember, member: str) -> Template | None:
        return part.get(member) or part.get("*")


def load_pack_file(path: Path) -> Pack:
    """The pack in a file; ConfigError lists everything that is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pack {str(path)!r} cannot be read: {error}") from error
    return load_pack(path.stem, text)


def load_pack(name: str, text: str) -> Pack:
    """The pack in a YAML text; ConfigError lists everything that is wrong with it."""
    try:
        loader = _NoDuplicates(text)
        try:
            written = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"pack {name!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"pack {name!r} must be a map, e.g. `system: {{...}}`")
    reader = _Reader({str(key): value for key, value in written.items()})
    pack = reader.pack(name)
    refuse(name, reader.problems)
    return pack


def refuse(name: str, problems: Sequence[str]) -> None:
    """ConfigError with all problems of a pack, if there are any."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"pack {name!r} cannot be played:{listed}")


class _NoDuplicates(yaml.SafeLoader):
    """YAML of plain values in which a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in keys if keys.count(key) > 1 and key != "<<"}):
            raise ValueError(f"key {twice[0]!r} stands twice, {node.start_mark}")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


class _Reader:
    """Reads a written pack part by part and gathers what is wrong."""

    def __init__(self, written: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self._written = written

    def pack(self, name: str) -> Pack:
        """The pack, of use only when there are no problems."""
        for key in sorted(self._written.keys() - _KEYS):
            self._add(key, f"unknown key; a pack takes {', '.join(sorted(_KEYS))}")
        if self._written.get("version") != PACK_VERSION:
            self._add("version", f"{self._written.get('version')!r} must be {PACK_VERSION}")
        self._merge_judge()
        fields = self._fields()
        answers = {
            canonical(value)
            for by_tag in fields.values()
            for value in (by_tag[ANSWER].values if ANSWER in by_tag else ())
        }
        reward: Any = self._written.get("reward", "winner")
        if reward not in get_args(Reward):
            self._add("reward", f"{reward!r} is none of {', '.join(get_args(Reward))}")
        return Pack(
            name=name,
            system=self._texts("system", EVERY_TURN),
            question=self._texts("question", EVERY_TURN),
            user=self._instructions(),
            opponent_wrap={"*": _DEFAULT_WRAP_TEMPLATE, **self._texts("opponent_wrap", WRAP)},
            channels=self._channels(),
            fields=fields,
            grader=self._verdict("_grader", answers),
            matcher=self._verdict("_matcher", answers),
            slots=self._slots(),
            reward=reward,
        )

    def _add(self, where: str, problem: str) -> None:
        self.problems.append(f"{where}: {problem}")

    def _map(self, where: str, written: Any) -> Mapping[str, Any]:
        if written is None:
            return {}
        if not isinstance(written, Mapping):
            self._add(where, f"must be a map, not {type(written).__name__}")
            return {}
        return {str(key): value for key, value in written.items()}

    def _merge_judge(self) -> None:
        """`_judge_prompts` holds the judge's system, question and user texts in one place."""
        own = self._map("_judge_prompts", self._written.get("_judge_prompts"))
        for key, text in own.items():
            if key not in ("system", "question", "user"):
                self._add(f"_judge_prompts.{key}", "unknown key; it takes system, question, user")
                continue
            part = self._written.get(key)
            part = {"*": part} if isinstance(part, str) else dict(self._map(key, part))
            if JUDGE in part:
                self._add(f"{key}.{JUDGE}", f"stands in _judge_prompts.{key} as well")
            self._written[key] = {**part, JUDGE: text}

    def _texts(self, part: str, allowed: frozenset[str]) -> ByMember:
        written = self._written.get(part)
        by_member = {"*": written} if isinstance(written, str) else self._map(part, written)
        compiled = {
            member: self._template(part if member == "*" else f"{part}.{member}", text, allowed)
            for member, text in by_member.items()
        }
        return {member: text for member, text in compiled.items() if text is not None}

    def _template(self, where: str, text: Any, allowed: frozenset[str]) -> Template | None:
        if not isinstance(text, str) or not text.strip():
            self._add(where, "must be a text that is not empty")
            return None
        try:
            tree = _JINJA.parse(text)
            template = _JINJA.from_string(text)
            unknown = meta.find_undeclared_variables(tree) - allowed
        except (TemplateError, RecursionError) as error:
            self._add(where, f"is not a template: {error}")
            return None
        used = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
        if early := sorted(used & PER_TURN - allowed):
            self._add(
                where, f"{early[0]!r} changes from turn to turn; it can stand in `user` alone"
            )
        for name in sorted(unknown - PER_TURN):
            self._add(where, f"unknown variable {name!r}; it may use {', '.join(sorted(allowed))}")
        return template

    def _instructions(self) -> Mapping[str, ByMember]:
        found: dict[str, ByMember] = {}
        for member, by_phase in self._map("user", self._written.get("user")).items():
            where = f"user.{member}"
            texts = {
                phase: self._template(f"{where}.{phase}", text, INSTRUCTION)
                for phase, text in self._map(where, by_phase).items()
            }
            found[member] = {phase: text for phase, text in texts.items() if text is not None}
        return found

    def _channels(self) -> Mapping[str, Channel]:
        written = self._written.get("think")
        by_member = {"*": written} if isinstance(written, str) else self._map("think", written)
        found = {}
        for member, one in by_member.items():
            where = "think" if member == "*" else f"think.{member}"
            keys = {"tag": one} if isinstance(one, str) else self._map(where, one)
            for key in sorted(keys.keys() - {"tag", "visibility"}):
                self._add(f"{where}.{key}", "unknown key; it takes tag, visibility")
            tag, visibility = keys.get("tag", "thinking"), keys.get("visibility", "private")
            if not isinstance(tag, str) or not TAG_PATTERN.fullmatch(tag):
                self._add(where, f"{tag!r} is not a name of a tag")
            elif visibility not in VISIBILITIES:
                self._add(where, f"visibility {visibility!r} is none of {', '.join(VISIBILITIES)}")
            else:
                found[member] = Channel(tag, cast("Visibility", visibility))
        return found

    def _fields(self) -> dict[tuple[str, str], Mapping[str, FieldSpec]]:
        found: dict[tuple[str, str], Mapping[str, FieldSpec]] = {}
        for member, by_phase in self._map("fields", self._written.get("fields")).items():
            for phase, by_tag in self._map(f"fields.{member}", by_phase).items():
                specs: dict[str, FieldSpec] = {}
                for tag, one in self._map(f"fields.{member}.{phase}", by_tag).items():
                    try:
                        specs[tag] = build_field(tag, one)
                    except ValueError as error:
                        self._add(f"fields.{member}.{phase}.{tag}", str(error))
                found[member, phase] = specs
        return found

    def _verdict(self, key: str, answers: set[str]) -> VerdictPrompt | None:
        keys = self._map(key, self._written.get(key))
        if not keys:
            return None
        for name in sorted(keys.keys() - {"system", "user", "positive", "negative"}):
            self._add(f"{key}.{name}", "unknown key; it takes system, user, positive, negative")
        user = self._template(f"{key}.user", keys.get("user"), VERDICT)
        system = None
        if "system" in keys:
            system = self._template(f"{key}.system", keys["system"], VERDICT)
        written = [keys.get(name, "") for name in ("positive", "negative")]
        if not all(isinstance(word, str) for word in written):
            self._add(key, f"positive and negative are {written}; each must be a word in quotes")
            return None
        words = [str(word).strip() for word in written]
        short = [canonical(word) for word in words]
        if not all(short) or short[0] == short[1]:
            self._add(key, f"positive and negative are {words}; they must be two different words")
        elif clash := answers & set(short):
            self._add(key, f"the word {min(clash)!r} is a value of the field {ANSWER!r} too")
        return None if user is None else VerdictPrompt(system, user, *words)

    def _slots(self) -> tuple[TurnSlot, ...]:
        written = self._written.get("schedule")
        if written is None:
            return ()
        if not isinstance(written, list):
            self._add("schedule", "must be a list of slots, each with members and phase")
            return ()
        slots = []
        for number, one in enumerate(written):
            keys = self._map(f"schedule.{number}", one)
            try:
                slots.append(build_slot(number, keys))
            except ValueError as error:
                self._add(f"schedule.{number}", str(error))
        return tuple(slots)


def build_slot(number: int, written: Mapping[str, Any]) -> TurnSlot:
    """One slot as it is written; ValueError says what is wrong with it."""
    if unknown := set(written) - {"members", "phase", "slot_id"}:
        raise ValueError(f"unknown key {min(unknown)!r}; a slot takes members, phase, slot_id")
    members, phase = written.get("members"), written.get("phase")
    slot_id = written.get("slot_id", number)
    if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
        raise ValueError("members must be a list of names")
    if not isinstance(phase, str) or not phase:
        raise ValueError("phase must be a name")
    if isinstance(slot_id, bool) or not isinstance(slot_id, int):
        raise ValueError("slot_id must be a whole number")
    return TurnSlot(slot_id, tuple(members), phase)


_DEFAULT_WRAP_TEMPLATE = _JINJA.from_string(_DEFAULT_WRAP)


def pack_problems(
    pack: Pack,
    members: Sequence[str],
    turns: Sequence[tuple[str, str]],
    render: Callable[[Template], str],
) -> Iterator[str]:
    """List what keeps a pack from playing these (member, phase) turns.

    `render` tries a template with made-up values.
    """
    for member in members:
        for part, by_member in (("system", pack.system), ("question", pack.question)):
            template = pack.text(by_member, member)
            if template is None:
                yield f"{part}: {member} has no text"
            else:
                yield from _tried(f"{part}.{member}", template, render)
    for member, phase in turns:
        instruction = pack.user.get(member, {}).get(phase)
        if instruction is None:
            yield f"user: {member} has no instruction for the phase {phase!r}"
        else:
            yield from _tried(f"user.{member}.{phase}", instruction, render)
    for member in sorted({name for name, _ in pack.fields} - set(members) - {"*"}):
        yield f"fields: {member!r} has no turn in the schedule"


def _tried(where: str, template: Template, render: Callable[[Template], str]) -> Iterator[str]:
    try:
        text = render(template)
    except Exception as error:
        yield f"{where}: cannot be filled in: {type(error).__name__}: {error}"
    else:
        if not text.strip():
            yield f"{where}: is empty when it is filled in"
