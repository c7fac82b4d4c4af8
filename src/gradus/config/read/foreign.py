"""What prime-rl, verl and TRL call the keys of gradus: one table for hints and for conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.config.keys import KeyPath
from gradus.config.read.renames import pool_of


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class To:
    """Where a value of prime-rl goes, and what becomes of it."""

    key: str
    """The key of gradus; empty for the table at hand, into which a made table is merged."""
    make: Callable[[Any], Any] = _same
    """Makes the new value; None for none. Raises where the old value has no equivalent."""
    is_whole: bool = True
    """Whether it reads every key of a table; otherwise lines for its keys follow."""


Moves = Mapping[str, str | To]
"""Key of prime-rl → key of gradus; an earlier line wins over a later one. A line between two tables
moves what the other has of the first."""


def _only(*values: Any) -> To:
    """A value that means nothing more: it is the only one here, or a line before has read it."""

    def nothing(value: Any) -> None:
        if values and value not in values:
            raise ValueError(value)

    return To("", nothing)


def _number(value: Any) -> float:
    if isinstance(value, dict):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _length_penalty(table: Any) -> dict[str, Any]:
    """The penalty with the weights that prime-rl takes where it says none."""
    usual = {"output": 0.25, "input": 0.1, "turns": 0.1}
    names = {"output": "num_output_tokens_weight", "input": "num_input_tokens_weight"}
    names["turns"] = "num_turns_weight"
    weights = {part: table.get(name, usual[part]) for part, name in names.items()}
    return {"length_penalty": True, "length_weights": weights}


def _learned_roles(mask: Mapping[str, bool]) -> list[str]:
    return [role for role, is_on in {"assistant": True, **mask}.items() if is_on]


def _without_version(url: str) -> str:
    return url.removesuffix("/").removesuffix("/v1")


_EXTRA_SAMPLING = (
    *("top_k", "min_p", "min_tokens", "seed", "stop", "reasoning_effort"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def _sampling(old: str, new: str) -> Moves:
    """A table of sampling values; what only the engine knows goes to `extra_body`."""
    return {
        f"{old}.max_tokens": f"{new}.max_completion_tokens",
        **{f"{old}.{key}": f"{new}.extra_body.{key}" for key in _EXTRA_SAMPLING},
        old: new,
    }


def _learning(old: str, new: str) -> Moves:
    """What trains; `old` and `new` are the prefixes of the trainer."""
    model, parallel = f"{old}model", f"{new}parallel"
    checkpointing = f"{parallel}.activation_checkpointing"
    offloading = {"offload_activations": True, "activation_checkpointing": "full"}
    return {
        f"{old}optim.max_norm": f"{new}optimizer.max_grad_norm",
        f"{old}optim.mu": f"{new}optimizer.momentum",
        f"{old}optim": f"{new}optimizer",
        f"{old}scheduler.type": f"{new}optimizer.schedule",
        f"{old}scheduler": f"{new}optimizer",
        f"{model}.lora": f"{new}lora",
        f"{model}.cp": f"{parallel}.context_parallel_size",
        f"{model}.dp_replicate": f"{parallel}.replicate_size",
        f"{model}.reshard_after_forward": f"{parallel}.reshard_after_forward",
        f"{model}.optim_cpu_offload": f"{parallel}.offload_optimizer",
        f"{model}.fsdp_cpu_offload": f"{parallel}.offload_optimizer",
        f"{model}.fp8": f"{parallel}.float8",
        f"{model}.ac": To(checkpointing, lambda it: it.get("mode", "full"), is_whole=False),
        f"{model}.ac.mode": _only(),
        f"{model}.ac.freq": _only(1),
        f"{model}.ac_offloading": To(parallel, lambda _: dict(offloading), is_whole=False),
        f"{model}.compile": To(f"{parallel}.compile", lambda it: it is not False, is_whole=False),
        "deployment.num_train_gpus": f"{new}num_processes",
        "deployment.num_gpus": f"{new}num_processes",
        "deployment.type": _only("single_node"),
    }


def _evaluation(old: str) -> Moves:
    return {
        f"{old}.interval": f"{old}.interval_steps",
        f"{old}.eval_base_model": f"{old}.base_model_first",
        f"{old}.skip_first_step": To(f"{old}.base_model_first", lambda skips: not skips),
        f"{old}.concurrency.max_inflight": f"{old}.max_in_flight_episodes",
        **_sampling(f"{old}.sampling", f"{old}.sampling"),
    }


_ENGINE = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager", "dtype")
_RUN: Moves = {
    "run.name": "name",
    "tokenizer.name": "model.tokenizer",
    "ckpt.interval": "checkpoint.interval_steps",
    "ckpt.keep_last": To("checkpoint.keep_last", lambda kept: max(2, int(kept))),
    "ckpt.keep_interval": "checkpoint.keep_interval_steps",
    "log.json_logging": To("log.format", lambda is_json: "json" if is_json else "text"),
    "metrics_server": To("monitor", lambda page: [{"type": "prometheus", **page}]),
    "trainer.metrics_server": To("monitor", lambda page: [{"type": "prometheus", **page}]),
    "inference.vllm.max_model_len": "model.max_length_tokens",
    "inference.model.max_model_len": "model.max_length_tokens",
    "inference.vllm.model": "model.name",
    "inference.model.name": "model.name",
    **{f"inference.{at}.{key}": f"inference.{key}" for at in ("vllm", "model") for key in _ENGINE},
    "inference.vllm.tensor_parallel_size": "inference.tensor_parallel_size",
    "inference.parallel.tp": "inference.tensor_parallel_size",
    "inference.parallel.dp": "inference.extra_args.data_parallel_size",
    "inference.server.port": "inference.port",
    "inference.server.host": "inference.host",
    "inference.vllm_extra": "inference.extra_args",
    "inference.vllm": "inference.extra_args",
}
MOVES: Mapping[str, Moves] = {
    "rl": {
        "seq_len": "model.max_length_tokens",
        "orchestrator.seq_len": "model.max_length_tokens",
        **_RUN,
        "orchestrator.renderer": "model.renderer",
        "orchestrator.tokenizer.name": "model.tokenizer",
        "trainer.tokenizer.name": "model.tokenizer",
        "orchestrator.model.name": "model.name",
        "trainer.model.name": "model.name",
        "trainer.model.trust_remote_code": "model.trust_remote_code",
        **_learning("trainer.", "trainer."),
        "trainer.model.seq_len": "trainer.micro_batch_tokens",
        "orchestrator.max_off_policy_steps": "orchestrator.max_staleness",
        "orchestrator.max_async_level": "orchestrator.max_lag",
        "max_async_level": "orchestrator.max_lag",
        "orchestrator.max_inflight_rollouts": "orchestrator.max_in_flight_episodes",
        "orchestrator.concurrency.max_inflight": "orchestrator.max_in_flight_episodes",
        "orchestrator.concurrency.min_inflight": "orchestrator.min_in_flight_episodes",
        "orchestrator.concurrency.initial_inflight": "orchestrator.initial_in_flight_episodes",
        "orchestrator.tasks_per_minute": "orchestrator.max_episodes_per_minute",
        **_sampling("orchestrator.sampling", "orchestrator.train.sampling"),
        **_sampling("orchestrator.train.sampling", "orchestrator.train.sampling"),
        **_evaluation("orchestrator.eval"),
    },
    "sft": {
        "renderer": "model.renderer",
        "data.seq_len": "model.max_length_tokens",
        **_RUN,
        "data.type": _only("sft"),
        "data.name": "data.path",
        "data.batch_size": "batch_conversations",
        "data.seed": "seed",
        "data.loss_mask": To("data.train_roles", _learned_roles),
        "val.interval": "validation.interval_steps",
        "val.data.name": "validation.path",
        **_learning("", ""),
        **_evaluation("eval"),
    },
    "eval": {
        "run.name": "name",
        "model": To("model.name", _text),
        "max_concurrent": "max_in_flight_episodes",
        "concurrency.max_inflight": "max_in_flight_episodes",
        "client.base_url": "base_url",
        "client.api_key_var": "api_key_var",
        "log.json_logging": _RUN["log.json_logging"],
        **_sampling("sampling", "sampling"),
    },
}
"""By command: keys of a whole file."""

_STAGES: Moves = {
    "timeout": To("timeout.agent_seconds", _number),
    "timeout.rollout": "timeout.agent_seconds",
    **{
        f"timeout.{stage}": f"timeout.{stage}_seconds"
        for stage in ("setup", "agent", "finalize", "scoring", "episode")
    },
}
PLACES = ("", "env.", "agent.", "env.agent.", "args.config.", "args.config.agent.")
"""Where a source of prime-rl may hold what a source of gradus holds itself."""
_SOURCE: Moves = {
    "rollouts_per_example": "group_size",
    "num_examples": To("num_tasks", lambda number: None if number == -1 else number),
    "select.limit": "num_tasks",
    "env": To("id", _text),
    "weight": "ratio",
    "max_retries": "errors.retries",
    "retries.max_retries": "errors.retries",
    "num_workers": To("pool", pool_of),
    "curriculum": To("curriculum.type", _text),
    "serve.address": "address",
    "serve.pool": "pool",
    **_STAGES,
    **_sampling("sampling", "sampling"),
}
SOURCE: Moves = {f"{place}{old}": new for place in PLACES for old, new in _SOURCE.items()}
"""Keys of one source."""
FROZEN: Moves = {
    "client.base_url": "base_url",
    "client.api_key_var": "api_key_var",
    "model.name": "model",
    "name": "model",
}
"""Keys of a model that another server holds."""
ROLE: Moves = {"trainable": "train", **FROZEN, **_STAGES, **_sampling("sampling", "sampling")}
"""Keys of one agent of a source."""
TEACHER: Moves = {
    **FROZEN,
    "base_url": To("base_url", _without_version),
    "client.base_url": To("base_url", _without_version),
}
_WEIGHTS = ("num_output_tokens_weight", "num_input_tokens_weight", "num_turns_weight")
ALGORITHM: Moves = {
    "length_penalty": To("", _length_penalty, is_whole=False),
    **{f"length_penalty.{key}": _only() for key in _WEIGHTS},
    "length_penalty.type": _only("linear"),
    **{f"roles.{role}.alpha": f"roles.{role}" for role in ("system", "user", "assistant", "tool")},
    "filter.import_path": To("filter", lambda name: ":".join(_text(name).rsplit(".", 1))),
    "sampling.source": _only("policy"),
    "decay": "momentum",
    "demo_key": "demonstration",
    "template": "hint",
}
CURRICULUM: Moves = {
    "easy_threshold": "easy_above",
    "hard_threshold": "hard_below",
    "easy_fraction": "easy_share",
    "hard_fraction": "hard_share",
}
FILTER: Moves = {
    "token_id_threshold": "token_id",
    "window": "tokens",
    "prob_threshold": "probability",
}
BROADCAST = To(
    "trainer.weight_transfer",
    lambda kind: {"filesystem": "filesystem", "nccl": "broadcast"}[_text(kind)],
)
TRACKER: Moves = {"offline": To("mode", lambda is_off: "offline" if is_off else "online")}

_TRACKER = (
    'write [[monitor]] with type = "wandb", "mlflow", "trackio", "tensorboard" or "prometheus"; '
    "metrics.jsonl is written anyway"
)
WORDS: Mapping[str, str] = {
    **dict.fromkeys(("wandb", "monitors", "report_to"), _TRACKER),
    "weight_broadcast.type": "adapters reach vLLM as files; else trainer.weight_transfer",
    "slurm": "gradus runs on one machine; take it away",
    "deployment": "gradus runs on one machine; write trainer.num_processes and inference.gpus",
    "resume": "write `gradus rl --resume` (or sft, eval)",
    "ckpt.resume_step": "write `gradus rl --resume` (or sft)",
    "clean_output_dir": "write `gradus rl --clean` (or sft)",
    "clean": "write `gradus eval --clean`",
    "dry_run": "write --dry-run behind the command",
    "bench": "write `gradus bench-trainer @ FILE`",
    "ckpt": "write checkpoint.interval_steps or interval_minutes; the last step is saved anyway",
    "env_vars": "write trainer.env_vars, inference.env_vars or env_vars of a source",
    "tool_call_parser": "the renderer reads tool calls; see model.renderer",
    "reasoning_parser": "the renderer reads reasoning; see model.renderer",
    "oversampling_factor": "write orchestrator.max_in_flight_episodes",
    "token_batch_size": "gradus counts groups: orchestrator.groups_per_batch",
    "dropout": "adapters are trained without dropout; take it away",
    "modules_to_save": "an adapter is low-rank factors alone; take it away, or train without lora",
    "num_train_epochs": "gradus counts steps; write max_steps",
    "critic": "gradus trains no critic; take it away",
    "errors.type": "which errors are tried again is set by retry_on; take it away",
    "errors.options": "which errors are tried again is set by retry_on; take it away",
}
"""Key without an equivalent, with as many parts as it takes to know it → what to do."""

HINTS: Mapping[str, tuple[str, ...]] = {
    # prime-rl: what a rule converts, or means several keys
    "batch_size": ("orchestrator.groups_per_batch", "batch_conversations"),
    "rollouts_per_example": ("orchestrator.train.env.N.group_size", "env.N.group_size"),
    "group_size": ("orchestrator.train.env.N.group_size", "env.N.group_size"),
    "ckpt": ("checkpoint",),
    "interval": ("orchestrator.eval.interval_steps", "eval.interval_steps"),
    "optim": ("trainer.optimizer", "optimizer"),
    "scheduler": ("trainer.optimizer.schedule", "optimizer.schedule"),
    "args": ("taskset",),
    "async_level": ("orchestrator.max_lag",),
    "max_concurrent": ("orchestrator.max_in_flight_episodes", "max_in_flight_episodes"),
    "trainer.model": ("trainer.parallel",),
    "weight_broadcast": ("trainer.weight_transfer",),
    "orchestrator.algo": ("orchestrator.train.algo",),
    "advantage": ("orchestrator.train.algo",),
    "training_mode": ("orchestrator.train.algo.type",),
    "teacher": ("orchestrator.train.algo.reference",),
    "inference.parallel": ("inference.tensor_parallel_size",),
    "source": ("orchestrator.train.env", "env"),
    "buffer": ("orchestrator.train.env.N.curriculum",),
    "ac_offloading": ("trainer.parallel.offload_activations", "parallel.offload_activations"),
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
"""Key, with as many parts as it takes to know it → what gradus calls it, in an RL run, in a
supervised run or in an evaluation; first looked for in the key's own table."""

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
        if key in WORDS and key not in HINTS:
            return WORDS[key]
        known = _named(key)
        beside = [".".join([*map(str, path[:-1]), own.rpartition(".")[2]]) for own in known]
        for own in (*beside, *known):
            if is_known(own):
                unit = _UNITS.get(key, "") if own.endswith("groups_per_batch") else ""
                return f"gradus calls it {own}{unit}"
    return None


def _named(key: str) -> tuple[str, ...]:
    """What gradus may call a key: by HINTS, or by the moves whose keys end with it.

    A last part that means several things, such as `name`, means none of them alone.
    """
    if key in HINTS:
        return HINTS[key]
    rows = [
        row for table in (_SOURCE, *MOVES.values(), CURRICULUM, FILTER) for row in table.items()
    ]
    named = [(old, to.key if isinstance(to, To) else to) for old, to in rows]
    whole = [new for old, new in named if old == key]
    found = whole or [new for old, new in named if f".{old}".endswith(f".{key}")]
    is_one = len({new.rpartition(".")[2] for new in found}) == 1
    return tuple(dict.fromkeys(found)) if is_one else ()
