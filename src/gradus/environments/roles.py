"""The seats of an environment: what its author set, what the source says, what the config names.

Only the environment's code knows its roles, so its process puts the seats together. What the config
writes for a role goes first, then what the author pinned, then the source's own values. Where there
is one role, what is written for the source is written for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import runtime_is_local
from verifiers.v1.utils.loaders import default_harness_id, harness_class, taskset_class

from gradus.config import EVERY_ROLE
from gradus.environments.containers import answering_engine
from gradus.environments.load_errors import declared_roles, explained, hint, source_name
from gradus.environments.verifiers.nested_plugins import import_nested_plugins
from gradus.errors import ConfigError
from gradus.installed import CHAT_HARNESS_MODULE
from gradus.log import get_logger

log = get_logger(__name__)

_LOCAL = "subprocess"
_PLAIN_CHAT = "null"
"""The harness of verifiers that only chats; ours does the same without a program per episode."""


def complete_roles(source: str, verifiers_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a seat for every role of the environment's class, named or not.

    Refuses a role that the class lacks, a role among the settings, a key of the source that
    reaches no role, and a remote runtime that only the author chose. What the author pinned
    is left out of a seat: verifiers merges it in. What needs a container and names no runtime gets
    the engine that answers here.
    """
    result = {key: value for key, value in verifiers_config.items() if key != EVERY_ROLE}
    given = verifiers_config.get(EVERY_ROLE)
    if given is None:
        return result
    import_nested_plugins()
    name = source_name(source, verifiers_config)
    taskset_id = str(verifiers_config["taskset"].get("id") or "")
    with explained(name, verifiers_config):
        roles = declared_roles(verifiers_config)
        has_harness = bool(taskset_id) and default_harness_id(taskset_id) == taskset_id
    for role in given["roles"]:
        if role not in roles:
            text = hint(role, list(roles), "its roles")
            raise ConfigError(f"{name}: agents.{role} is not a role of this environment; {text}")
    if len(roles) > 1:
        _refuse_unused(name, given, roles, has_harness=has_harness)
    for role, declared in roles.items():
        if role in result:
            raise ConfigError(f"{name}: settings.{role} is a role; write agents.{role}")
        written = given["written"] if len(roles) == 1 else {}
        written = _joined(written, given["roles"].get(role, {}))
        default = dict(given["seat"])
        if has_harness and declared.harness is None:
            del default["harness"]
        pinned = _pins(declared, given["written"].get("harness"))
        result[role] = _joined(_without(default, declared), _joined(pinned, written))
        _refuse_remote(name, role, declared, result[role])
        if "runtime" not in {**given["written"], **given["roles"].get(role, {})}:
            with explained(name, verifiers_config):
                task_set = taskset_id if len(roles) == 1 else ""
                _choose_engine(f"{name}: role {role!r}", result[role], task_set)
    return result


def _choose_engine(where: str, seat: dict[str, Any], taskset_id: str) -> None:
    """The container engine that answers here, for a seat that needs one and names none."""
    harness_id = seat.get("harness", {}).get("id")
    needs_box = bool(taskset_id) and taskset_class(taskset_id).task_type().NEEDS_CONTAINER
    needs_box = needs_box or (harness_id and harness_class(harness_id).NEEDS_CONTAINER)
    if needs_box and seat.get("runtime", {}).get("type") == _LOCAL:
        engine = answering_engine()
        if engine is not None:
            log.info("%s needs a container, and %s is here", where, engine)
            seat["runtime"] = {"type": engine}


def _without(seat: dict[str, Any], declared: AgentConfig) -> dict[str, Any]:
    """The source's values for what the author did not set."""
    pinned = declared.model_fields_set
    kept = {key: value for key, value in seat.items() if key not in pinned or key == "timeout"}
    if "timeout" in pinned:
        own = declared.timeout.model_fields_set
        kept["timeout"] = {key: it for key, it in seat["timeout"].items() if key not in own}
    return kept


def _pins(declared: AgentConfig, written_harness: Mapping[str, Any] | None) -> dict[str, Any]:
    """The one pin that is not taken as it is: a plain chat is played by our own.

    It keeps the other keys of the pin. A source that asks for `null` by name gets it.
    """
    harness = declared.harness
    if harness is None or harness.id != _PLAIN_CHAT or "harness" not in declared.model_fields_set:
        return {}
    if written_harness is not None and written_harness["id"] == _PLAIN_CHAT:
        return {}
    return {"harness": {**harness.model_dump(exclude_unset=True), "id": CHAT_HARNESS_MODULE}}


def _refuse_unused(
    name: str, given: Mapping[str, Any], roles: Mapping[str, AgentConfig], *, has_harness: bool
) -> None:
    """A key of the source that reaches no role, as the author set it for those that are left."""
    for key, value in given["written"].items():
        if key == "timeout" or (key == "harness" and value["id"] == _PLAIN_CHAT):
            continue
        left = {role: it for role, it in roles.items() if key not in given["roles"].get(role, {})}
        pinned = [
            role
            for role, declared in left.items()
            if key in declared.model_fields_set
            or (key == "harness" and has_harness and declared.harness is None)
        ]
        if pinned and len(pinned) == len(left):
            raise ConfigError(
                f"{name}: `agent.{key}` has no effect, because the author of the "
                f"environment set it for {', '.join(pinned)}; write agents.{pinned[0]}.{key}"
            )


def _joined(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` over `lower`; deadlines are joined one by one."""
    joined = {**lower, **upper}
    if "timeout" in lower and "timeout" in upper:
        joined["timeout"] = {**lower["timeout"], **upper["timeout"]}
    return joined


def _refuse_remote(name: str, role: str, declared: AgentConfig, seat: Mapping[str, Any]) -> None:
    """A sandbox that somebody bills is never the default, not even the author's."""
    if "runtime" in seat or runtime_is_local(declared.runtime):
        return
    kind = declared.runtime.type
    raise ConfigError(
        f"{name}: its author runs role {role!r} in {kind!r}, a remote sandbox that may cost money; "
        f'write agents.{role}.runtime = {{type = "{kind}"}} if you want that, or a local one: '
        '"docker", "podman", "subprocess"'
    )
