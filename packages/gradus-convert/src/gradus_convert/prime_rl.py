"""A file of prime-rl as one of gradus: every key of it is carried, translated or listed.

A key moves by a line of `foreign` or a rule here; what the schema then has no place for is taken
out and listed. The result is what a person would write; `gradus convert FILE` prints it.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from gradus.config.check import contradictions
from gradus.config.keys import UNKNOWN, annotation_at
from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.problems import validation_problems
from gradus.config.schema.algorithms import ReferenceConfig
from gradus.config.schema.base import tag_of
from gradus.config.schema.environment import (
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
from gradus.errors import ConfigError
from gradus.run.settings import OPEN_ENDED_STEPS
from gradus_convert import foreign
from gradus_convert.draft import Draft, Table, shown_json
from gradus_convert.parts import (
    algorithm_of,
    curriculum_of,
    drafts,
    finish,
    frozen,
    order_of_tasks,
    plugin,
)
from gradus_convert.sources import sources_of

SCHEMAS: Mapping[str, type[LaunchedConfig]] = {
    "rl": RunConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
}
_ONLY = {
    "rl": {"orchestrator", "trainer"},
    "sft": {"data", "val"},
    "inference": {"vllm", "server", "parallel"},
    "trainer": {"optim", "scheduler", "loss", "rollout_transport"},
    "orchestrator": {
        *("train", "batch_size", "token_batch_size", "buffer", "advantage", "algo", "eval"),
        *(
            "max_async_level",
            "max_off_policy_steps",
            "max_inflight_rollouts",
            "oversampling_factor",
        ),
    },
    "eval": {"env", "source", "client", "num_examples"},
}
"""Keys at the top that tell the files of one command, in the order in which they are asked."""
_SIZES = {"num_examples": "num_tasks", "rollouts_per_example": "group_size"}
_MONITORS = (
    *("wandb", "monitors.wandb", "orchestrator.wandb", "trainer.wandb"),
    *("metrics_server", "trainer.metrics_server"),
)
_ENGINE_SIZES = (
    *("parallel.tp", "parallel.dp", "vllm.tensor_parallel_size", "tensor_parallel_size"),
    *("vllm.data_parallel_size", "data_parallel_size"),
)


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
    finish(draft, foreign.MOVES[command])
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


def _rl(draft: Draft) -> None:
    _learning(draft, "trainer.", "trainer.")
    if draft.get("trainer.model.lora") is None:  # adapters reach vLLM as files
        draft.move({"weight_broadcast.type": foreign.BROADCAST})
    if (loss := draft.inside("trainer.loss")) is not None:
        plugin(loss, LossConfig, "dppo", {})
    _filters(draft)
    player = _algorithm(draft)
    sizes = _shared(draft, "orchestrator.", "group_size", "rollouts_per_example")
    shared = {"group_size": 1, **sizes}
    if (retries := draft.take("orchestrator.train.max_retries")) is not None:
        shared["errors"] = {"retries": retries}
    for path in ("orchestrator.curriculum", "orchestrator.train.curriculum", "orchestrator.buffer"):
        if "curriculum" in shared:
            for key in order_of_tasks(draft, path) if draft.keys(path) else [path]:
                value = draft.take(key)
                if value is not None:
                    said = f"{key} = {shown_json(value)}"
                    draft.note(said, "tasks have one order, and a curriculum above says which")
        elif curriculum := curriculum_of(draft, path):
            shared["curriculum"] = curriculum
    ratios = draft.take("orchestrator.buffer.env_ratios")
    lists = ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env")
    sources = sources_of(draft, lists, TrainEnvironmentConfig, shared)
    for number, source in enumerate(sources):
        if isinstance(ratios, list) and number < len(ratios):
            source.setdefault("ratio", ratios[number])
        if player and "algo" not in source:
            source.setdefault("agents", {}).setdefault("agent", player)
    _batch(draft, max([source["group_size"] for source in sources] or [shared["group_size"]]))
    _evaluations(draft, "orchestrator.eval.")
    _place(draft)
    for key in filter(_is_engine_argument, draft.keys("inference")):
        if annotation_at(draft.schema, ("inference", key)) is UNKNOWN:
            draft.move({f"inference.{key}": f"inference.extra_args.{key}"})


@cache
def _is_engine_argument(name: str) -> bool:
    """Whether the installed vLLM takes an argument of this name; it is read, not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or name in OWNED_ENGINE_ARGS:
        return False
    arguments = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return re.search(rf"^    {re.escape(name)}: ", arguments, re.M) is not None


def _sft(draft: Draft) -> None:
    _learning(draft, "", "")
    mixed = []
    kinds = ("data", "data", SftMixedDataConfig), ("val.data", "validation", SftValidationConfig)
    for old, new, schema in kinds:
        for number, one in enumerate(drafts(draft, f"{old}.source", schema)):
            if number and new == "validation":
                one.schema = UNKNOWN
                finish(one, {}, "one data set is validated on")
            finish(one, {"dataset": "path", "name": "path"})
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
    if draft.get("deployment.type") == "multi_node":
        nodes, per_node = _counted(draft, "num_nodes", 1), _counted(draft, "gpus_per_node", 8)
        _on_nodes(draft, nodes, per_node)
        draft.put("num_processes", nodes * per_node, "deployment.num_nodes")
    draft.move({f"deployment.num{kind}_gpus": "num_processes" for kind in ("", "_train")})
    draft.move({"deployment.type": foreign.SINGLE_NODE})
    if draft.get("max_steps") is None:
        draft.put("max_steps", OPEN_ENDED_STEPS, "max_steps")


def _counted(draft: Draft, name: str, usual: int) -> int:
    """A number of `deployment`, or what prime-rl takes where a file says none."""
    value = draft.get(f"deployment.{name}")
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return int(draft.take(f"deployment.{name}")) if is_count else usual


def _on_nodes(draft: Draft, nodes: int, per_node: int) -> None:
    draft.take("deployment.type")
    draft.put("launch.nodes", {"number": nodes, "gpus": per_node}, "deployment.type")


def _place(draft: Draft) -> None:
    """GPUs of the trainer are its processes, those of the engine servers of so many GPUs each."""
    if draft.get("deployment.type") == "multi_node":
        per_node = _counted(draft, "gpus_per_node", 8)
        trainer, engines = (_counted(draft, f"num_{it}_nodes", 1) for it in ("train", "infer"))
        engines *= _counted(draft, "num_infer_replicas", 1)
        _on_nodes(draft, trainer + engines, per_node)
        draft.put("trainer.num_processes", trainer * per_node, "deployment.num_train_nodes")
        gpus = engines * per_node
    else:
        draft.move({"deployment.num_train_gpus": "trainer.num_processes"})
        gpus = _counted(draft, "num_infer_gpus", 0)
    draft.move({"deployment.type": foreign.SINGLE_NODE})
    if gpus:
        sizes = [draft.get(f"inference.{key}") for key in _ENGINE_SIZES]
        each = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
        draft.put("inference.replicas", max(1, gpus // each), "deployment.num_infer_gpus")
        if gpus % each:
            why = f"{gpus} is not a multiple of the {each} of a server; rounded down"
            draft.note("deployment.num_infer_gpus", why)


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
    sources_of(draft, lists, EvalEnvironmentConfig, shared)


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
        finish(tracker, foreign.TRACKER)
        found.append({"type": tag_of(kind), **tracker.values})
        draft.take(path)
    if found:
        draft.put("monitor", found, "monitor")


def _filters(draft: Draft) -> None:
    """The filters before and after a batch is made become one list."""
    found: dict[str, Table] = {}
    for name in ("filters", "pre_batch_filters", "post_batch_filters"):
        for one in drafts(draft, f"orchestrator.{name}", None):
            new = plugin(one, FilterConfig, "", foreign.FILTER)
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
            algo, other = algorithm_of(draft, f"orchestrator.{old}")
            draft.put("orchestrator.train.algo", algo, f"orchestrator.{old}")
            player = player or other
    for path in ("orchestrator.teacher_rollout_model", "teacher_rollout_model"):
        if other := frozen(draft, path, RoleConfig, foreign.FROZEN):
            player = player or other
            if draft.get("orchestrator.train.algo") is None:
                draft.put("orchestrator.train.algo.type", "sft", path)
    for path in ("orchestrator.teacher", "teacher"):
        if teacher := frozen(draft, path, ReferenceConfig, foreign.TEACHER):
            if draft.get("orchestrator.train.algo") is None:
                draft.put("orchestrator.train.algo.type", "opd", path)
            draft.put("orchestrator.train.algo.reference", teacher, path)
    return player
