"""Deprecated keys, and the keys that replace them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.config.keys import KeyPath, dotted

ANY = "*"
"""In a pattern: every entry of a list, or every role of `agents`."""


def pool_of(num_workers: Any) -> Any:
    """The worker pool that `num_workers` used to mean.

    >>> pool_of("auto")
    {'type': 'elastic'}
    """
    if num_workers == "auto":
        return {"type": "elastic"}
    return {"type": "static", "num_workers": num_workers}


def filters_of(drop_zero_advantage: Any) -> Any:
    """The filters that `drop_zero_advantage` used to mean.

    >>> filters_of(False)
    []
    """
    return [{"type": "zero_advantage"}] if drop_zero_advantage else []


@dataclass(frozen=True)
class Rename:
    """One deprecated key, as a dotted pattern, and its successor in the same entry."""

    old: str
    """The deprecated key; `*` matches every entry of a list."""
    new: str
    """The key to write now, with as many `*`."""
    convert: Callable[[Any], Any] | None = None
    """Makes the new value from the old one. None means that the value stays."""


_ENV = "orchestrator.train.env.*"
_ENVS = (_ENV, "orchestrator.eval.env.*", "eval.env.*", "env.*")
"""Where sources are written: those that train and that measure in an RL run, in sft, in eval."""
RENAMES: tuple[Rename, ...] = (
    Rename("orchestrator.sampling", "orchestrator.train.sampling"),
    Rename("orchestrator.env", "orchestrator.train.env"),
    *(
        Rename(f"{sampling}.max_tokens", f"{sampling}.max_completion_tokens")
        for sampling in (
            "orchestrator.train.sampling",
            "orchestrator.eval.sampling",
            "eval.sampling",
            "sampling",
            *(f"{env}.sampling" for env in _ENVS),
            *(f"{env}.agents.*.sampling" for env in _ENVS),
        )
    ),
    *(Rename(f"{env}.num_workers", f"{env}.pool", pool_of) for env in _ENVS),
    Rename("orchestrator.drop_zero_advantage", "orchestrator.filters", filters_of),
)
"""Applied from top to bottom: a later line sees what the earlier ones moved."""


FIELD_KEYS: Mapping[str, tuple[str, ...]] = {
    # prime-rl
    "seq_len": ("model.max_length_tokens",),
    "max_model_len": ("model.max_length_tokens",),
    "batch_size": ("orchestrator.groups_per_batch", "batch_conversations"),
    "rollouts_per_example": ("orchestrator.train.env.N.group_size", "env.N.group_size"),
    "group_size": ("orchestrator.train.env.N.group_size", "env.N.group_size"),
    "ckpt": ("checkpoint",),
    "ckpt.interval": ("checkpoint.interval_steps",),
    "interval": ("orchestrator.eval.interval_steps", "eval.interval_steps"),
    "optim": ("trainer.optimizer", "optimizer"),
    "max_norm": ("trainer.optimizer.max_grad_norm", "optimizer.max_grad_norm"),
    "scheduler": ("trainer.optimizer.schedule", "optimizer.schedule"),
    "args": ("taskset",),
    "num_examples": ("num_tasks",),
    "max_off_policy_steps": ("orchestrator.max_staleness",),
    "max_async_level": ("orchestrator.max_lag",),
    "async_level": ("orchestrator.max_lag",),
    "max_inflight_rollouts": ("orchestrator.max_in_flight_episodes",),
    "max_inflight": ("orchestrator.max_in_flight_episodes",),
    "max_concurrent": ("orchestrator.max_in_flight_episodes", "max_in_flight_episodes"),
    "trainer.model": ("trainer.parallel",),
    "trainer.model.ac": ("trainer.parallel.activation_checkpointing",),
    "trainer.model.compile": ("trainer.parallel.compile",),
    "trainer.model.cp": ("trainer.parallel.context_parallel_size",),
    "trainer.model.optim_cpu_offload": ("trainer.parallel.offload_optimizer",),
    "trainer.model.lora": ("trainer.lora",),
    "weight_broadcast": ("trainer.weight_transfer",),
    "orchestrator.algo": ("orchestrator.train.algo",),
    "orchestrator.advantage": ("orchestrator.train.algo",),
    "advantage": ("orchestrator.train.algo",),
    "training_mode": ("orchestrator.train.algo.type",),
    "teacher": ("orchestrator.train.algo.reference",),
    "inference.parallel": ("inference.tensor_parallel_size",),
    "tp": ("inference.tensor_parallel_size",),
    "vllm_extra": ("inference.extra_args",),
    "inference.vllm": ("inference.extra_args",),
    "source": ("orchestrator.train.env", "env"),
    "deployment": ("trainer.num_processes", "num_processes"),
    # verl
    "train_batch_size": ("orchestrator.groups_per_batch",),
    "ppo_mini_batch_size": ("orchestrator.groups_per_batch",),
    "max_prompt_length": ("model.max_length_tokens",),
    "max_response_length": ("orchestrator.train.sampling.max_completion_tokens",),
    "clip_ratio": ("trainer.loss.clip_low",),
    "kl_loss_coef": ("trainer.loss.reference_kl_coefficient",),
    "kl_loss_type": ("trainer.loss.reference_kl_estimator",),
    "adv_estimator": ("orchestrator.train.algo.type",),
    "ppo_max_token_len_per_gpu": ("trainer.micro_batch_tokens",),
    "rollout": ("inference",),
    "actor": ("trainer",),
    "total_epochs": ("max_steps",),
    "total_training_steps": ("max_steps",),
    "save_freq": ("checkpoint.interval_steps",),
    "test_freq": ("orchestrator.eval.interval_steps",),
    # TRL
    "learning_rate": ("trainer.optimizer.lr", "optimizer.lr"),
    "num_generations": ("orchestrator.train.env.N.group_size",),
    "per_device_train_batch_size": ("orchestrator.groups_per_batch", "batch_conversations"),
    "gradient_accumulation_steps": ("trainer.micro_batch_tokens", "micro_batch_tokens"),
    "gradient_checkpointing": (
        "trainer.parallel.activation_checkpointing",
        "parallel.activation_checkpointing",
    ),
    "max_completion_length": ("orchestrator.train.sampling.max_completion_tokens",),
    "max_seq_length": ("model.max_length_tokens",),
    "max_length": ("model.max_length_tokens",),
    "beta": ("trainer.loss.reference_kl_coefficient",),
    "epsilon": ("trainer.loss.clip_low",),
    "save_steps": ("checkpoint.interval_steps",),
    "eval_steps": ("orchestrator.eval.interval_steps", "eval.interval_steps"),
    "warmup_ratio": ("trainer.optimizer.warmup_steps", "optimizer.warmup_steps"),
    "lr_scheduler_type": ("trainer.optimizer.schedule", "optimizer.schedule"),
    "max_grad_norm": ("trainer.optimizer.max_grad_norm", "optimizer.max_grad_norm"),
    "model_name_or_path": ("model.name",),
    "peft_config": ("trainer.lora", "lora"),
    "use_vllm": ("inference",),
    "dataset_name": ("data.path",),
    "bf16": ("trainer.compute_dtype", "compute_dtype"),
}
"""Key of prime-rl, verl or TRL, with as many parts as it takes to know it → what gradus calls it,
in an RL run, in a supervised run or in an evaluation; first looked for in the key's own table."""

FIELD_WORDS: Mapping[str, str] = {
    "wandb": "gradus writes metrics.jsonl into the run directory; take it away",
    "monitors": "gradus writes metrics.jsonl into the run directory; take it away",
    "report_to": "gradus writes metrics.jsonl into the run directory; take it away",
    "slurm": "gradus runs on one machine; take it away",
    "num_train_epochs": "gradus counts steps; write max_steps",
    "critic": "gradus trains no critic; take it away",
    # earlier builds of gradus
    "errors.type": "which errors are tried again is set by retry_on; take it away",
    "errors.options": "which errors are tried again is set by retry_on; take it away",
}
"""Key without an equivalent, with as many parts as it takes to know it → what to do."""

_UNITS = {
    "batch_size": "; it counts groups: batch_size / group_size",
    "train_batch_size": "; it counts groups, one per prompt",
    "per_device_train_batch_size": "; it counts groups over all devices",
}


def field_hint(path: KeyPath, is_known: Callable[[str], bool]) -> str | None:
    """What gradus calls a key of prime-rl, verl or TRL; None when the key is none of them.

    `is_known` says whether a dotted key exists in the config at hand; `N` is a place in a list.
    """
    names = [str(part) for part in path if isinstance(part, str)]
    for length in range(len(names), 0, -1):
        key = ".".join(names[-length:])
        if key in FIELD_WORDS:
            return FIELD_WORDS[key]
        known = FIELD_KEYS.get(key, ())
        beside = [".".join([*map(str, path[:-1]), own.rpartition(".")[2]]) for own in known]
        for own in (*beside, *known):
            if is_known(own):
                unit = _UNITS.get(key, "") if own.endswith("groups_per_batch") else ""
                return f"gradus calls it {own}{unit}"
    return None


@dataclass(frozen=True)
class Translation:
    """A table without deprecated keys, and what was done to it."""

    values: dict[Any, Any]
    """The translated table."""
    moves: tuple[tuple[KeyPath, KeyPath], ...]
    """Old place and new place of every moved value, in order."""
    warnings: tuple[str, ...]
    """One sentence for each deprecated key that was met."""

    def place_before(self, path: KeyPath) -> KeyPath:
        """Where the value that is now at `path` was written."""
        for old, new in reversed(self.moves):
            if path[: len(new)] == new:
                path = (*old, *path[len(new) :])
        return path


def translate(values: dict[Any, Any]) -> Translation:
    """Replace every deprecated key; translating twice changes nothing.

    A value under the new key wins over one under the old key.
    """
    result = copy.deepcopy(values)
    moves: list[tuple[KeyPath, KeyPath]] = []
    warnings: list[str] = []
    for rename in RENAMES:
        found = list(_matches(result, tuple(rename.old.split("."))))
        moved = [(old, new) for old in found if (new := _move(result, rename, old)) is not None]
        moves.extend(moved)
        if moved:
            warnings.append(_warning(rename, [old for old, _ in moved]))
    return Translation(values=result, moves=tuple(moves), warnings=tuple(warnings))


def complete_ids(values: dict[Any, Any]) -> dict[Any, Any]:
    """A source without `id` is the task set that its `taskset.id` names; returns a copy."""
    result = copy.deepcopy(values)
    for env in _ENVS:
        for place in _matches(result, tuple(env.split("."))):
            source = _table_for(result, (*place, "id"))
            taskset = source.get("taskset") if source else None
            if not source or "id" in source or not isinstance(taskset, dict):
                continue
            if "id" in taskset:
                source["id"] = taskset.pop("id")
    return result


def _warning(rename: Rename, found: list[KeyPath]) -> str:
    """What to write instead, once for all places."""
    sentence = f"{dotted(found[0])} is deprecated; write {rename.new}"
    if rename.convert is pool_of:
        sentence += ' = {type = "static", num_workers = n} or {type = "elastic"}'
    if rename.convert is filters_of:
        sentence += ' = [{type = "zero_advantage"}], or [] for no filter'
    return f"{sentence} ({len(found)} places)" if len(found) > 1 else sentence


def _matches(value: Any, pattern: tuple[str, ...], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """The places in `value` that a pattern names."""
    if not pattern:
        yield prefix
        return
    for key, child in _entries(value):
        if pattern[0] == ANY or key == pattern[0]:
            yield from _matches(child, pattern[1:], (*prefix, key))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a table, or places and values of a list."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _successor(rename: Rename, old: KeyPath) -> KeyPath:
    """The new place of what is at `old`: the same entries, under the new names."""
    pattern = rename.old.split(".")
    entries = iter(part for part, name in zip(old, pattern, strict=True) if name == ANY)
    return tuple(next(entries) if name == ANY else name for name in rename.new.split("."))


def _move(root: dict[Any, Any], rename: Rename, old: KeyPath) -> KeyPath | None:
    """Move one value and return its new place; None when something there is in the way.

    A key that is left behind is refused later as unknown, with its successor as suggestion.
    """
    new = _successor(rename, old)
    table = _table_for(root, new)
    if table is None or isinstance(table.get(new[-1]), list):
        return None
    value = _table_for(root, old).pop(old[-1])  # type: ignore[union-attr]
    if rename.convert is not None:
        value = rename.convert(value)
    table[new[-1]] = _joined(table.get(new[-1]), value)
    return new


def _table_for(root: Any, path: KeyPath) -> dict[Any, Any] | None:
    """The table that holds the last part of `path`, made where missing; None if it is none."""
    for part in path[:-1]:
        if isinstance(root, dict):
            root = root.setdefault(part, {})
        elif isinstance(root, list) and isinstance(part, int):
            root = root[part]
        else:
            return None
    return root if isinstance(root, dict) else None


def _joined(present: Any, value: Any) -> Any:
    """`value` merged with what is `present`: the explicit value wins, key by key."""
    if present is None:
        return value
    if not (isinstance(present, dict) and isinstance(value, dict)) or "type" in value:
        return present
    both = {**value, **present}
    return {key: _joined(present.get(key), value.get(key, both[key])) for key in both}
