"""A file of prime-rl as one of gradus: every key of it is carried, translated or listed.

A key moves by a line of `foreign` or a rule here; what the schema then has no place for is taken
out and listed. The result is what a person would write; `gradus convert FILE` prints it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from gradus.config.check import contradictions
from gradus.config.keys import UNKNOWN, KeyPath, annotation_at, dotted
from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.problems import validation_problems
from gradus.config.schema.algorithms import AlgorithmConfig, ReferenceConfig
from gradus.config.schema.base import PluginConfig, tag_of
from gradus.config.schema.environment import (
    CurriculumConfig,
    EvalEnvironmentConfig,
    RoleConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.learning import LossConfig
from gradus.config.schema.monitor import PrometheusConfig, WandbConfig
from gradus.config.schema.orchestrator import FilterConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig, SftMixedDataConfig, SftValidationConfig
from gradus.config.schema.trainer import TrainerConfig
from gradus.config.sources import LaunchedConfig, resolve_sources
from gradus.convert import moves as foreign
from gradus.convert.draft import Draft, Moves, Table, shown_json
from gradus.errors import ConfigError

SCHEMAS: Mapping[str, type[LaunchedConfig]] = {
    "rl": RunConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
}
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
_MONITORS = (
    *("wandb", "monitors.wandb", "orchestrator.wandb", "trainer.wandb"),
    *("metrics_server", "trainer.metrics_server"),
)
_SEATS = {"player0": "first", "player1": "second"}  # of our games of two


@dataclass(frozen=True)
class Conversion:
    """A converted file."""

    command: str
    """Which command of gradus takes it."""
    values: Table
    """What a file for gradus holds."""
    left_out: tuple[str, ...]
    """Keys of the old file without an equivalent, each with a word about it."""

    def toml(self) -> str:
        lines = [f"# For `gradus {self.command}`.", tomli_w.dumps(self.values)]
        below = {"Not as it was": self.left_out, "Still refused": self._refused()}
        for title, notes in below.items():
            if notes:
                lines += ["", f"# {title}:", *(f"# {note}" for note in notes)]
        return "\n".join(lines).strip() + "\n"

    def _refused(self) -> list[str]:
        """What the first start would say, as far as any machine can."""
        model = SCHEMAS[self.command]
        try:
            config = model.model_validate(self.values)
        except ValidationError as error:
            return [str(problem) for problem in validation_problems(error, model, self.values)]
        return [str(problem) for problem in contradictions(config, resolve_sources(config))]


def from_prime_rl(values: Mapping[str, Any]) -> Conversion:
    """The config of gradus for a file of prime-rl's `rl`, `sft`, `eval` or `inference`."""
    command = _command(set(values))
    draft = Draft(copy.deepcopy(dict(values)), SCHEMAS[command])
    {"rl": _rl, "sft": _sft, "eval": _evaluations}[command](draft)
    _monitors(draft)
    _finish(draft, foreign.MOVES[command])
    if command in ("rl", "sft"):
        _fit(draft, "trainer." if command == "rl" else "")
    if not draft.values:
        raise ConfigError(f"nothing of this file has an equivalent in gradus: {', '.join(values)}")
    return Conversion(command, draft.values, tuple(draft.notes))


def _command(keys: set[str]) -> str:
    """Which command the file is for; refuses one for a single process."""
    for command, own in _ONLY.items():
        if keys & own and command in SCHEMAS:
            return command
        if keys & own:
            raise ConfigError(
                f"a file for prime-rl's {command} alone ({', '.join(sorted(keys & own))}) is not "
                f"a run; convert the one of `rl` with it under [{command}]. A model is served by "
                "`gradus serve MODEL`"
            )
    return "rl"


def _finish(draft: Draft | None, moves: Moves, why: str = "") -> None:
    """Apply the moves, then take out and list every key that the schema does not have."""
    if draft is None:
        return
    draft.move(moves)
    for path, value in list(_leaves(draft.values)):
        if annotation_at(draft.schema, path) is UNKNOWN:
            shown = f" = {shown_json(value)}" if value != {} else ""
            draft.note(f"{dotted(path)}{shown}", why or _word(path))
            draft.take(path)


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if path and (not isinstance(value, dict) or not value):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))


def _word(path: KeyPath) -> str:
    """What to know about a key that gradus does not have."""
    names = [str(part) for part in path]
    known = [".".join(names[:length]) for length in range(len(names), 0, -1)] + [names[-1]]
    owner = OWNED_ENGINE_ARGS.get(names[-1]) if "vllm" in names[0:-1] else None
    found = (foreign.WORDS[key] for key in known if key in foreign.WORDS)
    return owner or next(found, "gradus has no such setting")


def _entries(value: Any) -> list[Table]:
    """A list of tables, of which one may stand alone or be a name."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [dict(entry) if isinstance(entry, dict) else {"id": entry} for entry in values]


def _drafts(draft: Draft, path: str, schema: Any) -> Iterator[Draft]:
    """A draft of each entry of a list, which leaves its place."""
    for number, entry in enumerate(_entries(draft.take(path))):
        yield Draft(entry, schema, f"{draft.at}{path}.{number}.", draft.notes)


def _rl(draft: Draft) -> None:
    _learning(draft, "trainer.", "trainer.")
    if draft.get("trainer.model.lora") is None:  # adapters reach vLLM as files
        draft.move({"weight_broadcast.type": foreign.BROADCAST})
    if (loss := draft.inside("trainer.loss")) is not None:
        _plugin(loss, LossConfig, "dppo", {})
    _filters(draft)
    player = _algorithm(draft)
    sizes = _shared(draft, "orchestrator.", "group_size", "rollouts_per_example")
    shared = {"group_size": 1, **sizes}
    if (retries := draft.take("orchestrator.train.max_retries")) is not None:
        shared["errors"] = {"retries": retries}
    for path in ("orchestrator.curriculum", "orchestrator.train.curriculum", "orchestrator.buffer"):
        if "curriculum" in shared:
            for key in _order_of_tasks(draft, path) if draft.keys(path) else [path]:
                value = draft.take(key)
                if value is not None:
                    said = f"{key} = {shown_json(value)}"
                    draft.note(said, "tasks have one order, and a curriculum above says which")
        elif curriculum := _curriculum(draft, path):
            shared["curriculum"] = curriculum
    ratios = draft.take("orchestrator.buffer.env_ratios")
    lists = ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env")
    sources = _sources(draft, lists, TrainEnvironmentConfig, shared)
    for number, source in enumerate(sources):
        if isinstance(ratios, list) and number < len(ratios):
            source.setdefault("ratio", ratios[number])
        if player and "algo" not in source:
            source.setdefault("agents", {}).setdefault("agent", player)
    _batch(draft, max([source["group_size"] for source in sources] or [shared["group_size"]]))
    _evaluations(draft, "orchestrator.eval.")


def _sft(draft: Draft) -> None:
    _learning(draft, "", "")
    mixed = []
    kinds = ("data", "data", SftMixedDataConfig), ("val.data", "validation", SftValidationConfig)
    for old, new, schema in kinds:
        for number, one in enumerate(_drafts(draft, f"{old}.source", schema)):
            if number and new == "validation":
                one.schema = UNKNOWN
                _finish(one, {}, "one data set is validated on")
            _finish(one, {"dataset": "path", "name": "path"})
            if number and one.values:
                mixed.append(one.values)
            for key, value in one.values.items() if number == 0 else ():
                draft.put(f"{new}.{key}", value, f"{old}.source.0.{key}")
        draft.move({f"{old}.splits": f"{new}.split"})
    if mixed:
        draft.put("data.mix", mixed, "data.source")
    if draft.get("data.batch_size") is not None:
        draft.note("data.batch_size", "counts packed rows there, conversations here")
    _evaluations(draft, "eval.")


def _evaluations(draft: Draft, at: str = "") -> None:
    """The evaluated sources; the sizes of an evaluation go to each of its sources."""
    names = ("select.limit", "num_examples", "group_size", "rollouts_per_example")
    shared = _shared(draft, at, *names)
    lists = (f"{at}env", f"{at}source")
    for old in lists if at else ():
        entries = draft.get(old)
        for number, source in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(source, dict) and "interval" in source:
                where = f"{old}.{number}.interval"
                draft.put(f"{at}interval_steps", source.pop("interval"), where)
    _sources(draft, lists, EvalEnvironmentConfig, shared)


def _shared(draft: Draft, at: str, *names: str) -> Table:
    """What a section says for each of its sources."""
    found: Table = {}
    for name in names:
        value = draft.take(f"{at}{name}")
        new = "num_tasks" if "." in name else _SIZES.get(name, name)
        if value not in (None, -1) and found.setdefault(new, value) != value:
            draft.note(f"{at}{name}", f"two values; {found[new]} was taken, not {value}")
    return found


def _learning(draft: Draft, old: str, new: str) -> None:
    """Numbers that gradus derives from two."""
    betas = [draft.take(f"{old}optim.betas{number}") for number in (1, 2)]
    if any(beta is not None for beta in betas):
        by_itself = 0.9, 0.95 if draft.get(f"{old}optim.type") == "muon" else 0.999
        given = [
            usual if beta is None else beta for beta, usual in zip(betas, by_itself, strict=True)
        ]
        draft.put(f"{new}optimizer.betas", given, f"{old}optim.betas1")
    least, lr = draft.get(f"{old}scheduler.min_lr"), draft.get(f"{old}optim.lr")
    if isinstance(least, int | float) and isinstance(lr, int | float) and lr > 0:
        path = f"{old}scheduler.min_lr"
        draft.put(f"{new}optimizer.min_lr_ratio", draft.take(path) / lr, path)


def _batch(draft: Draft, largest: int) -> None:
    """Episodes of a batch become groups: a division."""
    path = "orchestrator.batch_size"
    episodes = draft.get(path)
    if not isinstance(episodes, int | float) or not isinstance(largest, int):
        return
    draft.take(path)
    largest = max(1, largest)  # what is less is refused of the source itself
    draft.put("orchestrator.groups_per_batch", max(1, int(episodes) // largest), path)
    if int(episodes) % largest:
        draft.note(path, f"{episodes} is not a multiple of {largest}; rounded down")


def _fit(draft: Draft, prefix: str) -> None:
    """Numbers that others derive: a micro batch holds the longest sample, ranks share one."""
    usual, length = TrainerConfig().micro_batch_tokens, draft.get("model.max_length_tokens")
    given = draft.get(f"{prefix}micro_batch_tokens") or usual
    if isinstance(length, int) and length > given:
        draft.take(f"{prefix}micro_batch_tokens")
        draft.put(f"{prefix}micro_batch_tokens", length, "model.max_length_tokens")
    path, parallel = f"{prefix}num_processes", f"{prefix}parallel"
    names = {"cp": f"{parallel}.context_parallel_size", "ep": f"{parallel}.expert_parallel_size"}
    sizes = {name: draft.get(key) for name, key in names.items()}
    split = {name: it for name, it in sizes.items() if isinstance(it, int) and it > 1}
    if split and draft.get(path) is None:
        ranks, given = math.lcm(*split.values()), [f"{name} = {it}" for name, it in split.items()]
        draft.put(path, ranks, path)
        draft.note(path, f"not given; {ranks} is the least for {' and '.join(given)}")


def _monitors(draft: Draft) -> None:
    """Trackers; a run has one name, in its folder and at each tracker."""
    found = []
    for path in _MONITORS:
        kind = WandbConfig if path.endswith("wandb") else PrometheusConfig
        if (tracker := draft.inside(path, kind)) is None:
            continue
        if kind is WandbConfig and (name := tracker.take("name")) is not None:
            draft.put("name", draft.take("run.name") or name, "run.name")
            draft.put("name", name, f"{path}.name")
        _finish(tracker, foreign.TRACKER)
        found.append({"type": tag_of(kind), **tracker.values})
        draft.take(path)
    if found:
        draft.put("monitor", found, "monitor")


def _filters(draft: Draft) -> None:
    """The filters before and after a batch is made become one list."""
    found: dict[str, Table] = {}
    for name in ("filters", "pre_batch_filters", "post_batch_filters"):
        for one in _drafts(draft, f"orchestrator.{name}", None):
            new = _plugin(one, FilterConfig, "", foreign.FILTER)
            before = found.setdefault(new["type"], new)
            for key in [key for key in new if before.setdefault(key, new[key]) != new[key]]:
                one.note(f"{key} = {shown_json(new[key])}", f"{before[key]!r} was taken")
    if found:
        draft.put("orchestrator.filters", list(found.values()), "orchestrator.filters")


def _algorithm(draft: Draft) -> Table | None:
    """The algorithm of a run with its teacher; returns the frozen player of all sources."""
    player = None
    for old in ("algo", "algorithms", "advantage", "training_mode"):
        if draft.get(f"orchestrator.{old}") is not None:
            algo, other = _algo(draft, f"orchestrator.{old}")
            draft.put("orchestrator.train.algo", algo, f"orchestrator.{old}")
            player = player or other
    for path in ("orchestrator.teacher", "teacher"):
        if teacher := _frozen(draft, path, ReferenceConfig, foreign.TEACHER):
            if draft.get("orchestrator.train.algo") is None:
                draft.put("orchestrator.train.algo.type", "opd", path)
            draft.put("orchestrator.train.algo.reference", teacher, path)
    return player


def _frozen(draft: Draft, path: str, schema: type[BaseModel], moves: Moves) -> Table | None:
    """A model that another server holds; None where there is no table of one."""
    one = draft.inside(path, schema)
    _finish(one, moves)
    return None if one is None else draft.take(path) or one.values


def _algo(draft: Draft, path: str) -> tuple[Table, Table | None]:
    """An algorithm with its options, and the frozen model that plays for it."""
    value = draft.take(path)
    first, *others = value if isinstance(value, list) and value else [value]
    for spare in others:
        draft.note(path, f"one algorithm here; not {spare!r}")
    table = dict(first) if isinstance(first, dict) else {"type": first}
    one = Draft(table, None, f"{draft.at}{path}.", draft.notes)
    kind = str(table.pop("type", None) or table.pop("id", "grpo"))
    table["type"] = kind = _ALGORITHMS.get(kind, kind)
    player = _frozen(one, "sampling.source", RoleConfig, foreign.FROZEN)
    reference = _frozen(one, "teacher", ReferenceConfig, foreign.TEACHER)
    if kind == "opsd" and "demo_key" not in table:
        table["demo_key"] = "demonstration"
    new = _plugin(one, AlgorithmConfig, "grpo", foreign.ALGORITHM)
    return {**new, **({"reference": reference} if reference else {})}, player


def _plugin(draft: Draft, kind: type[PluginConfig], default: str, moves: Moves) -> Table:
    """A plug-in with the options that it has here; one of the user's own keeps its options."""
    table = draft.values
    name = str(table.pop("type", default))
    name = default if name == "default" else name
    draft.schema = kind.registered().get(name)
    if draft.schema is None:
        given = table.pop("options", {})
        options = {**(given if isinstance(given, dict) else {}), **table}
        table.clear()
        table |= {"options": options} if options else {}
    else:
        _finish(draft, moves)
    kept = dict(table)
    table.clear()
    table |= {"type": name, **kept}
    return table


def _curriculum(draft: Draft, path: str) -> Table:
    """The order of tasks; of a buffer what is known of it."""
    table = draft.get(path)
    if isinstance(table, str):
        return {"type": draft.take(path)}
    keys = _order_of_tasks(draft, path)
    if not keys:
        return {}
    one = Draft({}, None, f"{draft.at}{path}.", draft.notes)
    one.values = {key.rpartition(".")[2]: draft.take(key) for key in keys}
    if one.values.get("type") == "simple":
        one.values["type"] = "uniform"
    return _plugin(one, CurriculumConfig, "difficulty", foreign.CURRICULUM)


def _order_of_tasks(draft: Draft, path: str) -> list[str]:
    """The keys of a table that say in which order tasks come."""
    known = ("type", *foreign.CURRICULUM)
    return [f"{path}.{name}" for name in draft.keys(path) if name in known]


def _sources(
    draft: Draft, lists: tuple[str, ...], schema: type[BaseModel], shared: Table
) -> list[Table]:
    """Every source, each with what its section says for all."""
    found = []
    for path in lists:
        for one in _drafts(draft, path, schema):
            _source(one)
            both = {**shared, **one.values}
            first = [k for k in ("id", "name", "ratio", "group_size", "num_tasks") if k in both]
            found.append({key: both[key] for key in dict.fromkeys((*first, *both))})
    if found:
        draft.put(lists[0], found, lists[0])
    return found


def _source(draft: Draft) -> None:
    """One source, with everything of its environment one table higher."""
    for place in foreign.PLACES:
        _harness(draft, place)
    for place in ("env", "args.config"):
        for role in draft.keys(place):
            keys = set(draft.keys(f"{place}.{role}"))
            has_own = annotation_at(draft.schema, (role,)) is UNKNOWN
            if keys & (
                _ROLE_KEYS if has_own else {"model", "client"} if role == "agent" else set()
            ):
                _role(draft, f"{place}.{role}", role)
    if isinstance(draft.get("curriculum"), dict) and (order := _curriculum(draft, "curriculum")):
        draft.values["curriculum"] = {**(draft.get("curriculum") or {}), **order}
    _credit(draft)
    for key in [key for key in draft.keys("args") if key != "config"]:
        draft.move({f"args.{key}": f"taskset.{key}"})
    draft.move(foreign.SOURCE)
    for place in foreign.PLACES:
        draft.move({f"{place}select.limit": "tasks.limit"})
        if (shuffles := draft.take(f"{place}select.shuffle")) is not None:
            seed = draft.take(f"{place}select.seed") or 0
            if shuffles:
                draft.put("tasks.shuffle", seed, f"{place}select.shuffle")
        draft.move({place.removesuffix("."): ""} if place else {})
    for place in ("env", "args.config"):
        names = [key for key in draft.keys(place) if key != "agent"]
        draft.move({f"{place}.{key}": f"settings.{key}" for key in names})
    _finish(draft, {})
    _taskset(draft)
    if isinstance(runtime := draft.get("agent.runtime"), dict):
        runtime.setdefault("type", "prime")


def _harness(draft: Draft, place: str, at: str = "agent.runtime") -> None:
    """A harness is a table, and its runtime stands beside it."""
    harness, holder = draft.get(f"{place}harness"), draft.get(place)
    if isinstance(harness, str):
        holder["harness"] = {"id": harness}
    elif isinstance(harness, dict) and "runtime" in harness:
        draft.move({f"{place}harness.runtime": at})


def _role(draft: Draft, path: str, role: str) -> None:
    one = Draft(draft.take(path), RoleConfig, f"{draft.at}{path}.", draft.notes)
    _harness(one, "", "runtime")
    _finish(one, foreign.ROLE)
    draft.values.setdefault("agents", {})[role] = one.values


def _credit(draft: Draft) -> None:
    """The algorithm of one source; learning from what tools say is `echo`."""
    if isinstance(draft.get("sft"), dict):
        echo = Draft(draft.take("sft"), UNKNOWN, f"{draft.at}sft.", draft.notes)
        if echo.values.get("on_tool_outputs", True):
            echo.take("on_tool_outputs")
            echo.values["type"] = "echo"
            moves = {"alpha": "roles.tool", **foreign.ALGORITHM}
            algo = _plugin(echo, AlgorithmConfig, "echo", moves)
            draft.put("algo", {**algo, "normalize": "batch"}, "sft")
        else:
            _finish(echo, {}, "on_tool_outputs is false: nothing is learned of what tools say")
    for old in ("algo", "algorithms", "advantage"):
        if draft.get(old) is not None:
            algo, player = _algo(draft, old)
            draft.put("algo", algo, old)
            if player is not None:
                draft.put("agents", {"agent": player}, old)


def _taskset(draft: Draft) -> None:
    """`taskset.id` alone is the id of the source; what is held out is ours to choose."""
    source = draft.values
    taskset = source.get("taskset")
    if isinstance(taskset, dict):
        if "id" in taskset and "id" not in source:
            source["id"] = taskset.pop("id")
        is_split = any(name in taskset for name in _HELD_OUT["holdout_fraction"])
        for new, olds in _HELD_OUT.items() if is_split else ():
            for old in [old for old in olds if old in taskset]:
                value = taskset.pop(old)
                value = _SIDES.get(value, value) if new == "side" else value
                draft.put(f"tasks.{new}", value, f"taskset.{old}")
        if is_split:
            draft.note("taskset", "gradus holds tasks out by its own hash: other ones than there")
        if not taskset:
            del source["taskset"]
    if str(source.get("id")).replace("_", "-").endswith(("kuhn-poker", "kuhn-poker-v1", "games")):
        agents = source.get("agents", {})
        for old in [old for old, ours in _SEATS.items() if old in agents and ours not in agents]:
            agents[_SEATS[old]] = agents.pop(old)
