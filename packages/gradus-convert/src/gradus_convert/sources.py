"""A source of prime-rl as one of gradus."""

from __future__ import annotations

from pydantic import BaseModel

from gradus.config.keys import UNKNOWN, annotation_at, entries_of
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.config.schema.environment import RoleConfig
from gradus.installed import plugin_module
from gradus_convert import foreign
from gradus_convert.draft import Draft, Table
from gradus_convert.parts import algorithm_of, curriculum_of, drafts, finish, plugin

_ROLE_KEYS = {"harness", "runtime", "model", "client", "sampling", "trainable"}
_HELD_OUT = {
    "holdout_fraction": ("holdout_fraction", "held_out_fraction", "heldout_fraction"),
    "holdout_seed": ("holdout_seed", "held_out_seed", "heldout_seed", "split_seed"),
    "side": ("side", "holdout_side", "held_out_side", "heldout_side"),
}
_SIDES = dict.fromkeys(("test", "eval", "holdout", "heldout"), "held_out")
_SEATS = {"player0": "first", "player1": "second"}  # of our games of two


def sources_of(
    draft: Draft, lists: tuple[str, ...], schema: type[BaseModel], shared: Table
) -> list[Table]:
    """Every source, each with what its section says for all."""
    found = []
    for path in lists:
        for one in drafts(draft, path, schema):
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
    if isinstance(draft.get("curriculum"), dict) and (order := curriculum_of(draft, "curriculum")):
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
    finish(draft, {})
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
    finish(one, foreign.ROLE)
    draft.values.setdefault("agents", {})[role] = one.values


def _credit(draft: Draft) -> None:
    """The algorithm of one source; learning from what tools say is `echo`."""
    if isinstance(draft.get("sft"), dict):
        echo = Draft(draft.take("sft"), UNKNOWN, f"{draft.at}sft.", draft.notes)
        if echo.values.get("on_tool_outputs", True):
            echo.take("on_tool_outputs")
            echo.values["type"] = "echo"
            moves = {"alpha": "roles.tool", **foreign.ALGORITHM}
            algo = plugin(echo, AlgorithmConfig, "echo", moves)
            draft.put("algo", {**algo, "normalize": algo.get("normalize", "batch")}, "sft")
        else:
            finish(echo, {}, "on_tool_outputs is false: nothing is learned of what tools say")
    for old in ("algo", "algorithms", "advantage"):
        if draft.get(old) is not None:
            algo, player = algorithm_of(draft, old)
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
        is_split = any(
            name in taskset for olds in _HELD_OUT.values() for name in olds if name != "side"
        )
        for new, olds in _HELD_OUT.items() if is_split else ():
            for old in [old for old in olds if old in taskset]:
                value = taskset.pop(old)
                value = _SIDES.get(value, value) if new == "side" else value
                draft.put(f"tasks.{new}", value, f"taskset.{old}")
        if is_split:
            draft.note("taskset", "gradus holds tasks out by its own hash: other ones than there")
        if not taskset:
            del source["taskset"]
    _own_names(draft)
    if str(source.get("id")).replace("_", "-").endswith(("kuhn-poker", "kuhn-poker-v1", "games")):
        agents = source.get("agents", {})
        for old in [old for old, ours in _SEATS.items() if old in agents and ours not in agents]:
            agents[_SEATS[old]] = agents.pop(old)


def _own_names(draft: Draft) -> None:
    """Task sets and harnesses that gradus has under another name."""
    source = draft.values
    plain = plugin_module(str(source.get("id", ""))).replace("_", "-").removesuffix("-v1")
    if plain in foreign.IDS:
        source["id"], settings = foreign.IDS[plain]
        given = source.get("taskset")
        source["taskset"] = {**settings, **(given if isinstance(given, dict) else {})}
        draft.note("id", f"{plain} is read as {source['id']}, with its settings and its reward")
    seats = [source.get("agent"), *entries_of(source.get("agents")).values()]
    for seat in seats:
        harness = seat.get("harness") if isinstance(seat, dict) else None
        if isinstance(harness, dict) and ".harnesses." in str(harness.get("id")):
            harness["id"] = str(harness["id"]).rpartition(".")[2]
