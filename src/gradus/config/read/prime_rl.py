"""A config of prime-rl as one of gradus: keys renamed, sources flattened, the rest listed.

The result is what a person would write by hand; `gradus check --from prime-rl FILE` prints it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradus.config.keys import UNKNOWN, KeyPath, annotation_at
from gradus.config.read.renames import translate
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.config.schema.base import PluginConfig
from gradus.config.schema.environment import EvalEnvironmentConfig, TrainEnvironmentConfig
from gradus.config.schema.learning import LossConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.trainer import TrainerConfig

Table = dict[str, Any]

MOVES: Mapping[str, str] = {
    "run.name": "name",
    "seq_len": "model.max_length_tokens",
    "inference.vllm.max_model_len": "model.max_length_tokens",
    "inference.model.max_model_len": "model.max_length_tokens",
    "orchestrator.seq_len": "model.max_length_tokens",
    "orchestrator.renderer": "model.renderer",
    "ckpt.interval": "checkpoint.interval_steps",
    "ckpt.keep_last": "checkpoint.keep_last",
    "ckpt.keep_interval": "checkpoint.keep_interval_steps",
    "trainer.optim.max_norm": "trainer.optimizer.max_grad_norm",
    "trainer.optim": "trainer.optimizer",
    "trainer.scheduler.type": "trainer.optimizer.schedule",
    "trainer.scheduler.warmup_steps": "trainer.optimizer.warmup_steps",
    "trainer.model.seq_len": "trainer.micro_batch_tokens",
    "trainer.model.lora": "trainer.lora",
    "trainer.model.cp": "trainer.parallel.context_parallel_size",
    "trainer.model.dp_replicate": "trainer.parallel.replicate_size",
    "trainer.model.optim_cpu_offload": "trainer.parallel.offload_optimizer",
    "deployment.num_train_gpus": "trainer.num_processes",
    "orchestrator.max_off_policy_steps": "orchestrator.max_staleness",
    "orchestrator.max_async_level": "orchestrator.max_lag",
    "orchestrator.max_inflight_rollouts": "orchestrator.max_in_flight_episodes",
    "orchestrator.concurrency.max_inflight": "orchestrator.max_in_flight_episodes",
    "orchestrator.train.source": "orchestrator.train.env",
    "orchestrator.env": "orchestrator.train.env",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "orchestrator.eval.source": "orchestrator.eval.env",
    "orchestrator.eval.interval": "orchestrator.eval.interval_steps",
    "orchestrator.eval.eval_base_model": "orchestrator.eval.base_model_first",
    "inference.parallel.tp": "inference.tensor_parallel_size",
    "inference.vllm.tensor_parallel_size": "inference.tensor_parallel_size",
    "inference.vllm.gpu_memory_utilization": "inference.gpu_memory_utilization",
    "inference.vllm.max_num_seqs": "inference.max_num_seqs",
    "inference.vllm.enforce_eager": "inference.enforce_eager",
    "inference.vllm.dtype": "inference.dtype",
    "inference.model.enforce_eager": "inference.enforce_eager",
    "inference.model.dtype": "inference.dtype",
    "inference.server.port": "inference.port",
    "inference.server.host": "inference.host",
    "inference.vllm_extra": "inference.extra_args",
    "inference.vllm": "inference.extra_args",
}
"""Key of prime-rl → key of gradus, where the value stays; an earlier line wins."""

STAGES = {
    "setup": "setup_seconds",
    "rollout": "agent_seconds",
    "agent": "agent_seconds",
    "finalize": "finalize_seconds",
    "scoring": "scoring_seconds",
    "episode": "episode_seconds",
}
"""Deadline of prime-rl and verifiers → ours."""

_ALGORITHMS = {"rl": "grpo", "ema_per_member": "rae", "sft_distill": "sft", "opd": "opd"}
_ROLE_KEYS = {"harness", "runtime", "model", "client", "sampling", "trainable"}
_MICRO_BATCH: int = TrainerConfig().micro_batch_tokens
_EXTRA_SAMPLING = ("top_k", "min_p", "repetition_penalty", "seed", "stop")


@dataclass(frozen=True)
class Conversion:
    """A converted config."""

    values: Table
    """What a file for gradus holds."""
    left_out: tuple[str, ...]
    """Keys of the old file without an equivalent, each with a word about it."""

    def toml(self) -> str:
        """The file, with what was left out as comments at its end."""
        lines = _toml(self.values)
        if self.left_out:
            lines += ["", "# Without an equivalent:", *(f"# {note}" for note in self.left_out)]
        return "\n".join(lines).strip() + "\n"


def from_prime_rl(values: Mapping[str, Any]) -> Conversion:
    """The config of gradus for one of prime-rl."""
    work = _Work(copy.deepcopy(dict(values)))
    _batch(work)
    _trainer(work)
    _algorithm(work)
    for old, new in MOVES.items():
        if (value := work.take(old)) is not None:
            work.put(new, value)
    _fit(work)
    _sources(work, "orchestrator.train.env", TrainEnvironmentConfig)
    _evaluation(work)
    _sampling(work.get("orchestrator.train.sampling"), work)
    result = translate(work.values).values
    _drop_unknown(result, (), work)
    return Conversion(result, tuple(work.left_out))


@dataclass
class _Work:
    """The table while it is converted."""

    values: Table
    left_out: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """The value at a dotted path; None when there is none."""
        table: Any = self.values
        for part in path.split("."):
            table = table.get(part) if isinstance(table, dict) else None
        return table

    def take(self, path: str) -> Any:
        """The value at a dotted path, removed with the tables that it leaves empty."""
        value = self.get(path)
        if value is None:
            return None
        parts = path.split(".")
        del (self.get(".".join(parts[:-1])) if len(parts) > 1 else self.values)[parts[-1]]
        for length in range(len(parts) - 1, 0, -1):
            above = ".".join(parts[:length])
            if self.get(above) == {}:
                self.take(above)
        return value

    def put(self, path: str, value: Any) -> None:
        """Set a value; one that is there stays, and the other is listed."""
        *above, last = path.split(".")
        table = self.values
        for part in above:
            table = table.setdefault(part, {})
        present = table.get(last)
        if present is None:
            table[last] = value
        elif isinstance(present, dict) and isinstance(value, dict):
            table[last] = {**value, **present}
        elif isinstance(present, list) and isinstance(value, list):
            table[last] = present + value
        elif present != value:
            self.note(path, f"two values; {json.dumps(present)} was taken, not {json.dumps(value)}")

    def note(self, path: str, why: str) -> None:
        """List what has no equivalent."""
        self.left_out.append(f"{path}: {why}")


def _batch(work: _Work) -> None:
    """Episodes of a batch become groups: a division."""
    size = work.take("orchestrator.group_size") or work.take("orchestrator.rollouts_per_example")
    for source in _entries(work, "orchestrator.train.env", "orchestrator.train.source"):
        old = source.pop("rollouts_per_example", None)
        source.setdefault("group_size", old or size or 1)
    for source in _entries(work, "orchestrator.env"):
        source.setdefault("group_size", source.pop("rollouts_per_example", None) or size or 1)
    episodes = work.take("orchestrator.batch_size")
    if episodes is None:
        return
    sources = _entries(
        work, "orchestrator.train.env", "orchestrator.train.source", "orchestrator.env"
    )
    per_group = max([int(source["group_size"]) for source in sources] or [size or 1])
    work.put("orchestrator.groups_per_batch", max(1, int(episodes) // per_group))
    if int(episodes) % per_group:
        work.note(
            "orchestrator.batch_size", f"{episodes} is no multiple of {per_group}; rounded down"
        )


def _entries(work: _Work, *paths: str) -> list[Table]:
    return [entry for path in paths for entry in work.get(path) or [] if isinstance(entry, dict)]


def _trainer(work: _Work) -> None:
    """Switches that are tables in prime-rl, and words that differ."""
    if work.take("trainer.model.ac") is not None:
        work.put("trainer.parallel.activation_checkpointing", "full")
    if work.take("trainer.model.compile") is not None:
        work.put("trainer.parallel.compile", True)
    kind = work.take("weight_broadcast.type")
    if kind is not None and kind != "filesystem" and work.get("trainer.model.lora") is not None:
        work.note("weight_broadcast.type", "adapters reach vLLM as files")
    elif kind is not None:
        name = "filesystem" if kind == "filesystem" else "broadcast"
        work.put("trainer.weight_transfer", name)
    keep = work.get("ckpt.keep_last")
    if keep is not None:
        work.get("ckpt")["keep_last"] = max(2, int(keep))
    first, second = work.take("trainer.optim.betas1"), work.take("trainer.optim.betas2")
    if first is not None or second is not None:
        work.put("trainer.optimizer.betas", [first or 0.9, second or 0.95])
    loss = work.take("trainer.loss")
    if isinstance(loss, dict):
        work.put("trainer.loss", _with_options(loss, "trainer.loss", LossConfig, "dppo", work))


def _fit(work: _Work) -> None:
    """Numbers that prime-rl derives: a micro batch holds the longest sample, ranks share one."""
    length = work.get("model.max_length_tokens")
    if isinstance(length, int) and length > (
        work.get("trainer.micro_batch_tokens") or _MICRO_BATCH
    ):
        work.take("trainer.micro_batch_tokens")
        work.put("trainer.micro_batch_tokens", length)
    ranks = work.get("trainer.parallel.context_parallel_size")
    if isinstance(ranks, int) and ranks > 1 and work.get("trainer.num_processes") is None:
        work.put("trainer.num_processes", ranks)
        work.note("trainer.num_processes", f"not given; {ranks} is the least for cp = {ranks}")


def _algorithm(work: _Work) -> None:
    """`algo`, `advantage`, `training_mode` and the teacher become one table."""
    chosen = work.take("orchestrator.algo")
    for old in ("orchestrator.advantage", "orchestrator.training_mode"):
        value = work.take(old)
        chosen = chosen or ({"type": value} if isinstance(value, str) else value)
    algo = _algo(chosen, "orchestrator.algo", work) if chosen else None
    teacher = work.take("orchestrator.teacher") or work.take("teacher")
    if isinstance(teacher, dict) and (reference := _reference(teacher)):
        algo = {**(algo or {"type": "opd"}), "reference": reference}
    if algo is not None:
        work.put("orchestrator.train.algo", algo)


def _algo(value: Any, path: str, work: _Work) -> Table:
    table = {"type": value} if isinstance(value, str) else dict(value)
    table["type"] = _ALGORITHMS.get(str(table.get("type", "grpo")), table.get("type", "grpo"))
    penalty = table.get("length_penalty")
    if isinstance(penalty, dict):
        table["length_penalty"] = True
        table["length_weights"] = {
            part: penalty[key]
            for part, key in (
                ("output", "num_output_tokens_weight"),
                ("input", "num_input_tokens_weight"),
                ("turns", "num_turns_weight"),
            )
            if key in penalty
        }
        if not table["length_weights"]:
            del table["length_weights"]
    return _with_options(table, path, AlgorithmConfig, "grpo", work)


def _reference(teacher: Table) -> Table | None:
    """Where a teacher is served, if the old file says it."""
    model, client = teacher.get("model") or {}, teacher.get("client") or {}
    name = model.get("name") if isinstance(model, dict) else model
    url = client.get("base_url") or teacher.get("base_url")
    if isinstance(url, list):
        url = url[0] if url else None
    return {"base_url": str(url).removesuffix("/v1"), "model": name} if name and url else None


def _with_options(
    table: Table, path: str, known: type[PluginConfig], default: str, work: _Work
) -> Table:
    """A table with the options that the plug-in has here; a class of the user's own has a table."""
    kind = str(table.pop("type", default))
    kind = default if kind == "default" else kind
    options = {**table.pop("options", {}), **{k: v for k, v in table.items() if k != "reference"}}
    declared = known.registered().get(kind)
    if declared is None:
        return {"type": kind, "options": options} if options else {"type": kind}
    for name in [name for name in options if name not in declared.model_fields]:
        del options[name]
        work.note(f"{path}.{name}", f"{kind} of gradus has no such option")
    return {"type": kind, **options}


def _sources(
    work: _Work, path: str, model: type[TrainEnvironmentConfig | EvalEnvironmentConfig]
) -> None:
    for number, source in enumerate(_entries(work, path)):
        place = f"{path}.{number}"
        converted = _source(dict(source), place, set(model.model_fields), work)
        source.clear()
        source.update(converted)


def _source(source: Table, path: str, known: set[str], work: _Work) -> Table:
    """One source, with everything of its environment one table higher."""
    inner = source.pop("env", None)
    settings: Table = {}
    if isinstance(inner, dict):
        settings = {key: it for key, it in inner.items() if key not in known | {"agent", "harness"}}
        source = {**{key: it for key, it in inner.items() if key not in settings}, **source}
    arguments = source.pop("args", None)
    if isinstance(arguments, dict):
        config = arguments.pop("config", None)
        if isinstance(config, dict) and "harness" in config:
            source.setdefault("harness", config["harness"])
        source["taskset"] = {**arguments, **source.get("taskset", {})}
    _seat(source, source.pop("agent", None) or {})
    for role in [key for key, it in settings.items() if _is_role(it)]:
        source.setdefault("agents", {})[role] = _role(settings.pop(role), f"{path}.{role}", work)
    if settings:
        source["settings"] = {**settings, **source.get("settings", {})}
    _identify(source)
    _harness(source, path, work)
    if isinstance(source.get("runtime"), dict):
        source["runtime"].setdefault("type", "prime")
    if "timeout" in source:
        source["timeout"] = _timeout(source["timeout"])
    if "sft" in source:
        sft = source.pop("sft")
        roles = sft.get("roles") if isinstance(sft, dict) else None
        options = {"normalize": "batch", **({"roles": roles} if isinstance(roles, dict) else {})}
        source["algo"] = {"type": "echo", **options}
    for old in ("algo", "advantage"):
        if old in source:
            source["algo"] = _algo(source.pop(old), f"{path}.{old}", work)
    for old, new in (
        ("num_examples", "num_tasks"),
        ("rollouts_per_example", "group_size"),
        ("weight", "ratio"),
    ):
        if old in source:
            source.setdefault(new, source.pop(old))
    _sampling(source.get("sampling"), work)
    first = [key for key in ("id", "name", "ratio", "group_size", "num_tasks") if key in source]
    return {key: source[key] for key in dict.fromkeys((*first, *source))}


def _identify(source: Table) -> None:
    """`taskset.id` alone is the id of the source."""
    taskset = source.get("taskset")
    if isinstance(taskset, dict) and "id" in taskset and "id" not in source:
        source["id"] = taskset.pop("id")
    if taskset == {}:
        del source["taskset"]


def _seat(source: Table, agent: Table) -> None:
    """The one agent of an environment is the source itself."""
    for key in (
        "harness",
        "runtime",
        "timeout",
        "max_turns",
        "max_input_tokens",
        "max_output_tokens",
        "max_total_tokens",
        "sampling",
    ):
        if key in agent:
            source.setdefault(key, agent[key])


def _is_role(value: Any) -> bool:
    return isinstance(value, dict) and bool(_ROLE_KEYS & set(value))


def _role(seat: Table, path: str, work: _Work) -> Table:
    """One named role."""
    role: Table = {key: seat[key] for key in ("model", "max_turns", "sampling") if key in seat}
    client = seat.get("client") or {}
    role.update({key: client[key] for key in ("base_url", "api_key_var") if key in client})
    if "trainable" in seat:
        role["train"] = seat["trainable"]
    if "harness" in seat:
        role["harness"] = seat["harness"]
        _harness(role, path, work)
    for key in sorted(set(seat) - {*role, "client", "trainable", "harness"}):
        work.note(f"{path}.{key}", "a role takes this from its source")
    return role


def _harness(source: Table, path: str, work: _Work) -> None:
    """`harness = {id, runtime, ...}` becomes id and config; the runtime is the source's."""
    harness = source.get("harness")
    if not isinstance(harness, dict) or "config" in harness:
        return
    harness = dict(harness)
    runtime = harness.pop("runtime", None)
    if runtime is not None and "ratio" not in source and path.count(".") > 3:
        work.note(f"{path}.harness.runtime", "a role takes this from its source")
    elif runtime is not None:
        source.setdefault("runtime", runtime)
    chosen = {"id": harness.pop("id")} if "id" in harness else {}
    source["harness"] = {**chosen, "config": harness} if harness else chosen
    if not source["harness"]:
        del source["harness"]


def _timeout(timeout: Any) -> Any:
    if not isinstance(timeout, dict):
        return {"episode_seconds": timeout}
    return {STAGES.get(stage, stage): seconds for stage, seconds in timeout.items()}


def _sampling(sampling: Any, work: _Work) -> None:
    """Values that only the engine knows go to extra_body."""
    if not isinstance(sampling, dict):
        return
    if "max_tokens" in sampling:
        sampling.setdefault("max_completion_tokens", sampling.pop("max_tokens"))
    extra = {key: sampling.pop(key) for key in _EXTRA_SAMPLING if key in sampling}
    if extra:
        sampling["extra_body"] = {**extra, **sampling.get("extra_body", {})}
        work.note("sampling", f"{', '.join(extra)} are in extra_body; the trainer ignores them")


def _evaluation(work: _Work) -> None:
    """The sizes of an evaluation go to each of its environments."""
    evaluation = work.get("orchestrator.eval")
    if not isinstance(evaluation, dict):
        return
    shared: Table = {}
    for new, olds in (
        ("num_tasks", ("num_examples",)),
        ("group_size", ("group_size", "rollouts_per_example")),
    ):
        for old in olds:
            if old in evaluation:
                shared.setdefault(new, evaluation.pop(old))
    for source in _entries(work, "orchestrator.eval.env"):
        if "interval" in source:
            work.put("orchestrator.eval.interval_steps", source.pop("interval"))
        for key, value in shared.items():
            source.setdefault(key, value)
    _sampling(evaluation.get("sampling"), work)
    _sources(work, "orchestrator.eval.env", EvalEnvironmentConfig)


_WORDS = {
    "wandb": "metrics go to metrics.jsonl in the run directory",
    "monitors": "metrics go to metrics.jsonl in the run directory",
    "slurm": "gradus runs on one machine",
    "deployment": "gradus runs on one machine",
    "resume": "write gradus rl --resume",
    "ckpt": "write checkpoint.interval_steps for checkpoints",
    "env_vars": "write trainer.env_vars, inference.env_vars or env_vars of a source",
}
"""First part of a key without an equivalent → what to know about it."""


def _drop_unknown(table: Table, path: KeyPath, work: _Work) -> None:
    """Take out what no key of gradus can hold, and list it."""
    for key in list(table):
        at = (*path, key)
        value = table[key]
        if annotation_at(RunConfig, at) is UNKNOWN:
            del table[key]
            words = _WORDS.get(str(at[0]))
            for name in [".".join(map(str, at))] if words else _leaves(value, at):
                work.note(name, words or "gradus has no such setting")
        elif isinstance(value, dict):
            _drop_unknown(value, at, work)
            if not value and key not in ("eval",):
                del table[key]
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                if isinstance(entry, dict):
                    _drop_unknown(entry, (*at, number), work)


def _leaves(value: Any, path: KeyPath) -> list[str]:
    """The keys below a table; the key itself for anything else."""
    if not isinstance(value, dict) or not value:
        return [".".join(map(str, path))]
    return [name for key, child in value.items() for name in _leaves(child, (*path, key))]


def _toml(values: Table, path: tuple[str, ...] = ()) -> list[str]:
    """Lines of TOML: plain values first, then tables and lists of tables."""
    plain = {key: value for key, value in values.items() if not _is_table(value, path)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if key in plain:
            continue
        name = (*path, _key(key))
        for entry in value if isinstance(value, list) else [value]:
            brackets = ("[[", "]]") if isinstance(value, list) else ("[", "]")
            inner = _toml(entry, name)
            has_own = any(not _is_table(it, name) for it in entry.values()) or not entry
            head = ["", f"{brackets[0]}{'.'.join(name)}{brackets[1]}"]
            lines += (head if has_own or isinstance(value, list) else []) + inner
    return lines


def _is_table(value: Any, path: tuple[str, ...]) -> bool:
    """Whether a value gets a header; inside an entry of a list, tables are inline."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, dict) and "env" not in path


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(it)}" for key, it in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return (
        key
        if key.replace("_", "").replace("-", "").isalnum() and key.isascii()
        else json.dumps(key)
    )
