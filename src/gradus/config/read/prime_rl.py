"""A file of prime-rl as one of gradus: every key of it is carried, translated or listed.

A key leaves the old table only by a line of `foreign` or a rule here; whatever is left is listed
with its place. The result is what a person would write; `gradus check --from prime-rl FILE` prints
it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from gradus.config.keys import UNKNOWN, KeyPath, annotation_at, dotted, members, models
from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.problems import validation_problems
from gradus.config.read import foreign
from gradus.config.schema.algorithms import AlgorithmConfig, ReferenceConfig
from gradus.config.schema.base import PluginConfig
from gradus.config.schema.environment import (
    AgentRoleConfig,
    CurriculumConfig,
    EvalEnvironmentConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.learning import LossConfig
from gradus.config.schema.monitor import WandbConfig
from gradus.config.schema.orchestrator import FilterConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig, SftMixedDataConfig, SftValidationConfig
from gradus.config.schema.trainer import TrainerConfig
from gradus.errors import ConfigError

Table = dict[str, Any]
Names = tuple[str, ...]

SCHEMAS: Mapping[str, type[BaseModel]] = {"rl": RunConfig, "sft": SftConfig, "eval": EvalConfig}
_ONLY = {
    "rl": {"orchestrator", "trainer"},
    "sft": {"data", "val"},
    "inference": {"vllm", "server", "parallel"},
    "eval": {"env", "source", "client", "num_examples"},
    "orchestrator": {"train", "batch_size", "token_batch_size", "buffer", "advantage", "algo"},
    "trainer": {"optim", "scheduler", "loss", "rollout_transport"},
}
"""Keys at the top that tell the files of one command, in the order in which they are asked."""
_ALGORITHMS = {"default": "grpo", "rl": "grpo", "ema_per_member": "rae", "sft_distill": "sft"}
_ROLE_KEYS = {"harness", "runtime", "model", "client", "sampling", "trainable"}
_SIZES = {"num_examples": "num_tasks", "rollouts_per_example": "group_size"}
_HELD_OUT = {
    "holdout_fraction": ("holdout_fraction", "held_out_fraction", "heldout_fraction"),
    "holdout_seed": ("holdout_seed", "held_out_seed", "heldout_seed", "split_seed"),
    "side": ("side",),
}
_SIDES = dict.fromkeys(("test", "eval", "holdout", "heldout"), "held_out")
_SEATS = {"player0": "first", "player1": "second"}  # of our games of two


@dataclass(frozen=True)
class Conversion:
    """A converted file."""

    command: str
    """Which command of gradus takes it."""
    values: Table
    """What a file for gradus holds."""
    left_out: Names
    """Keys of the old file without an equivalent, each with a word about it."""

    def toml(self) -> str:
        """The file, with what was left out and what is still to be written as comments."""
        lines = [f"# For `gradus {self.command}`.", tomli_w.dumps(self.values)]
        for title, notes in (("Not as it was", self.left_out), ("Still refused", self._refused())):
            if notes:
                lines += ["", f"# {title}:", *(f"# {note}" for note in notes)]
        return "\n".join(lines).strip() + "\n"

    def _refused(self) -> list[str]:
        model = SCHEMAS[self.command]
        try:
            model.model_validate(self.values)
        except ValidationError as error:
            return [str(problem) for problem in validation_problems(error, model)]
        return []


def from_prime_rl(values: Mapping[str, Any]) -> Conversion:
    """The config of gradus for a file of prime-rl's `rl`, `sft`, `eval` or `inference`."""
    command = _command(set(values))
    work = _Work(copy.deepcopy(dict(values)), SCHEMAS[command])
    {"rl": _rl, "sft": _sft, "eval": _evaluations}[command](work)
    _monitors(work)
    work.move_all(foreign.MOVES[command])
    _fit(work, {"rl": "trainer.", "sft": ""}.get(command))
    if not work.new:
        raise ConfigError(f"nothing of this file has an equivalent in gradus: {', '.join(values)}")
    return Conversion(command, work.new, tuple(work.notes))


def _command(keys: set[str]) -> str:
    """Which command the file is for; refuses one for a single process."""
    for command, own in _ONLY.items():
        if keys & own and command in SCHEMAS:
            return command
        if keys & own:
            raise ConfigError(
                f"a file for prime-rl's {command} alone ({', '.join(sorted(keys & own))}) is no "
                f"run; convert the one of `rl` with it under [{command}]. A model is served by "
                "`gradus serve MODEL`"
            )
    return "rl"


@dataclass
class _Work:
    """One table while it is converted: what is left of the old one, and the new one."""

    old: Table
    schema: Any
    """The model of the new table."""
    at: str = ""
    """Where the old table stands in its file."""
    notes: list[str] = field(default_factory=list)
    new: Table = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """The old value at a dotted path; None when there is none."""
        return _at(self.old, _parts(path))

    def note(self, path: str, why: str) -> None:
        """List a key of the old table."""
        self.notes.append(f"{self.at}{path}: {why}")

    def below(self, path: str, schema: Any) -> _Work:
        """The work on a table of the old one, which leaves it here."""
        table = self.take(path)
        return _Work(dict(_table(table)), schema, f"{self.at}{path}.", self.notes)

    def move_all(self, moves: foreign.Moves) -> None:
        """Apply the moves, keep what has the same name, list the rest."""
        for old, new in moves.items():
            self.move(old, new)
        self.move("", "")
        self.list_rest()

    def list_rest(self, why: str = "") -> None:
        """List every key that is left, with its value."""
        for path, value in _leaves(self.old):
            shown = f" = {json.dumps(value, ensure_ascii=False)}" if value != {} else ""
            self.note(f"{dotted(path)}{shown}", why or _word(path))
        self.old.clear()

    def move(self, old: str, new: str | foreign.To) -> None:
        """Move one value, or what the new table has of an old one."""
        if isinstance(new, foreign.To):
            self._make(_parts(old), new)
        else:
            self._move(_parts(old), _parts(new))

    def _make(self, old: Names, to: foreign.To) -> None:
        value, key = _at(self.old, old), _parts(to.key)
        if value is None or annotation_at(self.schema, key) is UNKNOWN:
            return
        try:
            made = to.make(self._one(value, key, old))
        except (TypeError, ValueError, AttributeError, KeyError):
            return
        if to.is_whole or not isinstance(value, dict) or not value:
            self.take(old)
        for name, inner in made.items() if not key and made else ():
            self.put((name,), inner, old)
        if key and made is not None:
            self.put(key, made, old)

    def _move(self, old: Names, new: Names) -> None:
        value, wanted = _at(self.old, old), annotation_at(self.schema, new)
        if value is None or wanted is UNKNOWN:
            return
        is_engine = new == ("inference", "extra_args")
        if isinstance(value, dict) and (models(wanted) or is_engine):
            for key in list(value):
                if not (is_engine and key in OWNED_ENGINE_ARGS):
                    self._move((*old, key), (*new, key))
        elif old and new:
            self.put(new, self._one(self.take(old), new, old), old)

    def take(self, where: str | Names) -> Any:
        """The old value at a path, removed with the tables that it leaves empty."""
        path = _parts(where)
        value = _at(self.old, path)
        if value is None:
            return None
        del _at(self.old, path[:-1])[path[-1]]
        if path[:-1] and not _at(self.old, path[:-1]):
            self.take(path[:-1])
        return value

    def _one(self, value: Any, new: Names, old: Names) -> Any:
        """The first of a list where gradus takes one value."""
        kinds = {get_origin(kind) or kind for kind in members(annotation_at(self.schema, new))}
        if not isinstance(value, list) or not value or kinds & {list, tuple, Any, object}:
            return value
        for other in value[1:]:
            self.note(dotted(old), f"one value here; not {other!r}")
        return value[0]

    def put(self, where: str | Names, value: Any, at: str | Names) -> None:
        """Set a new value; one that is there stays, and the other is listed."""
        path, old = _parts(where), _parts(at)
        table: Any = self.new
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            self.note(f"{dotted(old)} = {json.dumps(value)}", f"{dotted(path[:-1])} is no table")
            return
        kinds = members(annotation_at(self.schema, path))
        if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
            value = int(value)
        present = table.get(path[-1])
        if present is None:
            table[path[-1]] = value
        elif isinstance(present, dict) and isinstance(value, dict):
            for key, inner in value.items():
                self.put((*path, key), inner, (*old, key))
        elif isinstance(present, list) and isinstance(value, list):
            table[path[-1]] = present + value
        elif present != value:
            chosen = f"{dotted(path)} = {json.dumps(present)} was taken"
            self.note(dotted(old), f"two values; {chosen}, not {json.dumps(value)}")


def _parts(path: str | Names) -> Names:
    return tuple(filter(None, path.split("."))) if isinstance(path, str) else path


def _at(table: Any, path: Names) -> Any:
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return table


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The keys below a table with their values."""
    if path and (not isinstance(value, dict) or not value):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))


def _table(value: Any) -> Table:
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[Table]:
    """A list of tables, of which one may stand alone or be a name."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [dict(entry) if isinstance(entry, dict) else {"id": entry} for entry in values]


def _word(path: KeyPath) -> str:
    """What to know about a key that gradus does not have."""
    names = [str(part) for part in path]
    known = [".".join(names[:length]) for length in range(len(names), 0, -1)] + [names[-1]]
    owner = OWNED_ENGINE_ARGS.get(names[-1]) if "vllm" in names[0:-1] else None
    found = (foreign.WORDS[key] for key in known if key in foreign.WORDS)
    return owner or next(found, "gradus has no such setting")


def _rl(work: _Work) -> None:
    _learning(work, "trainer.", "trainer.")
    if work.get("trainer.model.lora") is None:  # adapters reach vLLM as files
        work.move("weight_broadcast.type", foreign.BROADCAST)
    if isinstance(work.get("trainer.loss"), dict):
        loss = _plugin(work.below("trainer.loss", None), LossConfig, "dppo", {})
        work.put("trainer.loss", loss, "trainer.loss")
    _filters(work)
    player = _algorithm(work)
    sizes = _shared(work, "orchestrator", "group_size", "rollouts_per_example")
    shared = {"group_size": 1, **sizes}
    if (retries := work.take("orchestrator.train.max_retries")) is not None:
        shared["errors"] = {"retries": retries}
    for path in ("orchestrator.curriculum", "orchestrator.train.curriculum", "orchestrator.buffer"):
        if curriculum := _curriculum(work, path):
            shared["curriculum"] = curriculum
    ratios = work.take("orchestrator.buffer.env_ratios")
    lists = ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env")
    sources = _sources(work, lists, TrainEnvironmentConfig, shared)
    for number, source in enumerate(sources):
        if isinstance(ratios, list) and number < len(ratios):
            source.setdefault("ratio", ratios[number])
        if player and "algo" not in source:
            source.setdefault("agents", {}).setdefault("agent", player)
    _batch(work, max([source["group_size"] for source in sources] or [shared["group_size"]]))
    _evaluations(work, "orchestrator.eval")


def _sft(work: _Work) -> None:
    _learning(work, "", "")
    mixed = []
    kinds = ("data", "data", SftMixedDataConfig), ("val.data", "validation", SftValidationConfig)
    for old, new, schema in kinds:
        for number, entry in enumerate(_entries(work.take(f"{old}.source"))):
            one = _Work(entry, schema, f"{old}.source.{number}.", work.notes)
            if number and new == "validation":
                one.list_rest("one data set is validated on")
            one.move_all({"dataset": "path", "name": "path"})
            if number and one.new:
                mixed.append(one.new)
            for key, value in one.new.items() if number == 0 else ():
                work.put(f"{new}.{key}", value, f"{old}.source.0.{key}")
        work.move(f"{old}.splits", f"{new}.split")
    if mixed:
        work.put("data.mix", mixed, "data.source")
    if work.get("data.batch_size") is not None:
        work.note("data.batch_size", "counts packed rows there, conversations here")
    _evaluations(work, "eval")


def _evaluations(work: _Work, path: str = "") -> None:
    """The evaluated sources; the sizes of an evaluation go to each of its sources."""
    at = f"{path}." if path else ""
    shared = _shared(
        work, path, "select.limit", "num_examples", "group_size", "rollouts_per_example"
    )
    for old in (f"{at}env", f"{at}source") if path else ():
        entries = work.get(old)
        for number, source in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(source, dict) and "interval" in source:
                where = f"{old}.{number}.interval"
                work.put(f"{path}.interval_steps", source.pop("interval"), where)
    _sources(work, (f"{at}env", f"{at}source"), EvalEnvironmentConfig, shared)


def _shared(work: _Work, path: str, *names: str) -> Table:
    """What a section says for each of its sources."""
    found: Table = {}
    for name in names:
        value = work.take(f"{path}.{name}" if path else name)
        new = "num_tasks" if "." in name else _SIZES.get(name, name)
        if value not in (None, -1) and found.setdefault(new, value) != value:
            work.note(f"{path}.{name}", f"two values; {found[new]} was taken, not {value}")
    return found


def _learning(work: _Work, old: str, new: str) -> None:
    """Numbers that gradus derives from two."""
    betas = [work.take(f"{old}optim.betas{number}") for number in (1, 2)]
    if any(beta is not None for beta in betas):
        given = [
            usual if beta is None else beta for beta, usual in zip(betas, (0.9, 0.95), strict=True)
        ]
        work.put(f"{new}optimizer.betas", given, f"{old}optim.betas1")
    least, lr = work.get(f"{old}scheduler.min_lr"), work.get(f"{old}optim.lr")
    if isinstance(least, int | float) and isinstance(lr, int | float) and lr > 0:
        work.put(f"{new}optimizer.min_lr_ratio", work.take(f"{old}scheduler.min_lr") / lr, "")


def _batch(work: _Work, largest: int) -> None:
    """Episodes of a batch become groups: a division."""
    path = "orchestrator.batch_size"
    episodes = work.get(path)
    if not isinstance(episodes, int | float) or not isinstance(largest, int):
        return
    work.take(path)
    work.put("orchestrator.groups_per_batch", max(1, int(episodes) // largest), path)
    if int(episodes) % largest:
        work.note(path, f"{episodes} is no multiple of {largest}; rounded down")


def _fit(work: _Work, prefix: str | None) -> None:
    """Numbers that prime-rl derives: a micro batch holds the longest sample, ranks share one."""
    if prefix is None:
        return
    length = _at(work.new, ("model", "max_length_tokens"))
    table = _table(work.new.get("trainer")) if prefix else work.new
    usual = TrainerConfig().micro_batch_tokens
    if isinstance(length, int) and length > table.get("micro_batch_tokens", usual):
        table["micro_batch_tokens"] = length
    ranks = _at(table, ("parallel", "context_parallel_size"))
    if isinstance(ranks, int) and ranks > 1 and "num_processes" not in table:
        table["num_processes"] = ranks
        work.note(f"{prefix}num_processes", f"not given; {ranks} is the least for cp = {ranks}")
    if table and prefix:
        work.new["trainer"] = table


def _monitors(work: _Work) -> None:
    """Trackers; a run has one name, in its folder and at each tracker."""
    for path in ("wandb", "monitors.wandb", "orchestrator.wandb", "trainer.wandb"):
        if isinstance(work.get(path), dict):
            tracker = work.below(path, WandbConfig)
            if (name := tracker.take("name")) is not None:
                work.put("name", work.take("run.name") or name, "run.name")
                work.put("name", name, f"{path}.name")
            tracker.move_all(foreign.TRACKER)
            work.put("monitor", [{"type": "wandb", **tracker.new}], path)


def _filters(work: _Work) -> None:
    """The filters before and after a batch is made become one list."""
    found: dict[str, Table] = {}
    for name in ("filters", "pre_batch_filters", "post_batch_filters"):
        for number, entry in enumerate(_entries(work.take(f"orchestrator.{name}"))):
            one = _Work(entry, None, f"orchestrator.{name}.{number}.", work.notes)
            new = _plugin(one, FilterConfig, "", foreign.FILTER)
            before = found.setdefault(new["type"], new)
            for key in [key for key in new if before.setdefault(key, new[key]) != new[key]]:
                one.note(f"{key} = {json.dumps(new[key])}", f"{before[key]!r} was taken")
    if found:
        work.put("orchestrator.filters", list(found.values()), "orchestrator.filters")


def _algorithm(work: _Work) -> Table | None:
    """The algorithm of a run with its teacher; returns the frozen player of all sources."""
    player = None
    for old in ("algo", "algorithms", "advantage", "training_mode"):
        if work.get(f"orchestrator.{old}") is not None:
            algo, other = _algo(work, f"orchestrator.{old}")
            work.put("orchestrator.train.algo", algo, f"orchestrator.{old}")
            player = player or other
    for path in ("orchestrator.teacher", "teacher"):
        if isinstance(work.get(path), dict):
            if _at(work.new, ("orchestrator", "train", "algo")) is None:
                work.put("orchestrator.train.algo.type", "opd", path)
            work.put("orchestrator.train.algo.reference", _teacher(work, path), path)
    return player


def _algo(work: _Work, path: str) -> tuple[Table, Table | None]:
    """An algorithm with its options, and the frozen model that plays for it."""
    value = work.take(path)
    first, *others = value if isinstance(value, list) and value else [value]
    for spare in others:
        work.note(path, f"one algorithm here; not {spare!r}")
    table = dict(first) if isinstance(first, dict) else {"type": first}
    one = _Work(table, None, f"{work.at}{path}.", work.notes)
    kind = str(table.pop("type", None) or table.pop("id", "grpo"))
    table["type"] = kind = _ALGORITHMS.get(kind, kind)
    player = None
    if isinstance(one.get("sampling.source"), dict):
        frozen = one.below("sampling.source", AgentRoleConfig)
        frozen.move_all(foreign.FROZEN)
        player = frozen.new
    reference = _teacher(one, "teacher") if isinstance(one.get("teacher"), dict) else None
    if kind == "opsd" and "demo_key" not in table:
        table["demo_key"] = "demonstration"
    new = _plugin(one, AlgorithmConfig, "grpo", foreign.ALGORITHM)
    return {**new, **({"reference": reference} if reference else {})}, player


def _teacher(work: _Work, path: str) -> Table:
    """Where a frozen model is asked for logprobs."""
    teacher = work.below(path, ReferenceConfig)
    teacher.move_all(foreign.TEACHER)
    return teacher.new


def _plugin(work: _Work, kind: type[PluginConfig], default: str, moves: foreign.Moves) -> Table:
    """A plug-in with the options that it has here; one of the user's own keeps its options."""
    name = str(work.old.pop("type", default))
    name = default if name == "default" else name
    work.schema = kind.registered().get(name)
    if work.schema is None:
        options = {**_table(work.old.pop("options", {})), **work.old}
        return {"type": name, **({"options": options} if options else {})}
    work.move_all(moves)
    return {"type": name, **work.new}


def _curriculum(work: _Work, path: str) -> Table:
    """The order of tasks; of a buffer what is known of it."""
    table = work.get(path)
    if isinstance(table, str):
        return {"type": work.take(path)}
    names = [name for name in _table(table) if name in ("type", *foreign.CURRICULUM)]
    if not names:
        return {}
    one = _Work({}, None, f"{work.at}{path}.", work.notes)
    one.old = {name: work.take(f"{path}.{name}") for name in names}
    if one.old.get("type") == "simple":
        one.old["type"] = "uniform"
    return _plugin(one, CurriculumConfig, "difficulty", foreign.CURRICULUM)


def _sources(work: _Work, lists: Names, schema: type[BaseModel], shared: Table) -> list[Table]:
    """Every source, each with what its section says for all."""
    found = []
    for path in lists:
        for number, entry in enumerate(_entries(work.take(path))):
            one = _Work(entry, schema, f"{path}.{number}.", work.notes)
            _source(one)
            both = {**shared, **one.new}
            first = [k for k in ("id", "name", "ratio", "group_size", "num_tasks") if k in both]
            found.append({key: both[key] for key in dict.fromkeys((*first, *both))})
    if found:
        work.put(lists[0], found, lists[0])
    return found


def _source(work: _Work) -> None:
    """One source, with everything of its environment one table higher."""
    for place in foreign.PLACES:
        _harness(work, place)
    for place in ("env", "args.config"):
        for role, table in list(_table(work.get(place)).items()):
            keys = set(_table(table))
            is_seat = keys & _ROLE_KEYS and annotation_at(work.schema, (role,)) is UNKNOWN
            if is_seat and (role != "agent" or keys & {"model", "client"}):
                _role(work, f"{place}.{role}", role)
    if isinstance(work.get("curriculum"), dict):
        work.put("curriculum", _curriculum(work, "curriculum"), "curriculum")
    _credit(work)
    for key in [key for key in _table(work.get("args")) if key != "config"]:
        work.move(f"args.{key}", f"taskset.{key}")
    for old, new in foreign.SOURCE.items():
        work.move(old, new)
    for place in foreign.PLACES:
        work.move(f"{place}select.limit", "tasks.limit")
        if (shuffles := work.take(f"{place}select.shuffle")) is not None:
            seed = work.take(f"{place}select.seed") or 0
            if shuffles:
                work.put("tasks.shuffle", seed, f"{place}select.shuffle")
        work.move(place.removesuffix("."), "")
    for place in ("env", "args.config"):
        for key in [key for key in _table(work.get(place)) if key != "agent"]:
            work.move(f"{place}.{key}", f"settings.{key}")
    work.move_all({})
    _taskset(work)
    if isinstance(runtime := work.new.get("runtime"), dict):
        runtime.setdefault("type", "prime")


def _harness(work: _Work, place: str) -> None:
    """`harness = {id, runtime, ...}` becomes id and config; the runtime stands beside it."""
    harness, holder = work.get(f"{place}harness"), work.get(place.removesuffix("."))
    if isinstance(harness, str):
        holder["harness"] = {"id": harness}
    elif isinstance(harness, dict) and "config" not in harness:
        if "runtime" in harness:
            work.put("runtime", harness["runtime"], f"{place}harness.runtime")
        rest = {key: it for key, it in harness.items() if key not in ("id", "runtime")}
        chosen = {"id": harness["id"]} if "id" in harness else {}
        holder["harness"] = {**chosen, **({"config": rest} if rest else {})}


def _role(work: _Work, path: str, role: str) -> None:
    """One named role."""
    one = work.below(path, AgentRoleConfig)
    _harness(one, "")
    one.move_all(foreign.ROLE)
    work.new.setdefault("agents", {})[role] = one.new


def _credit(work: _Work) -> None:
    """The algorithm of one source; learning from what tools say is `echo`."""
    if isinstance(work.get("sft"), dict):
        echo = work.below("sft", None)
        if echo.old.get("on_tool_outputs", True):
            echo.take("on_tool_outputs")
            echo.old["type"] = "echo"
            moves = {"alpha": "roles.tool", **foreign.ALGORITHM}
            algo = _plugin(echo, AlgorithmConfig, "echo", moves)
            work.put("algo", {**algo, "normalize": "batch"}, "sft")
        else:
            echo.list_rest("on_tool_outputs is false: nothing is learned of what tools say")
    for old in ("algo", "algorithms", "advantage"):
        if work.get(old) is not None:
            algo, player = _algo(work, old)
            work.put("algo", algo, old)
            if player is not None:
                work.put("agents", {"agent": player}, old)


def _taskset(work: _Work) -> None:
    """`taskset.id` alone is the id of the source; what is held out is ours to choose."""
    taskset = work.new.get("taskset")
    if isinstance(taskset, dict):
        if "id" in taskset and "id" not in work.new:
            work.new["id"] = taskset.pop("id")
        is_split = any(name in taskset for name in _HELD_OUT["holdout_fraction"])
        for new, olds in _HELD_OUT.items() if is_split else ():
            for old in [old for old in olds if old in taskset]:
                value = taskset.pop(old)
                value = _SIDES.get(value, value) if new == "side" else value
                work.put(f"tasks.{new}", value, f"taskset.{old}")
        if is_split:
            work.note("taskset", "gradus holds tasks out by its own hash: other ones than there")
        if not taskset:
            del work.new["taskset"]
    if str(work.new.get("id")).replace("_", "-").endswith(("kuhn-poker", "kuhn-poker-v1", "games")):
        agents = work.new.get("agents", {})
        for old in [old for old, ours in _SEATS.items() if old in agents and ours not in agents]:
            agents[_SEATS[old]] = agents.pop(old)
