"""What prime-rl calls the keys of gradus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.schema.environment import SeatConfig, SeatTimeoutConfig
from gradus_convert.draft import Moves, Table, To


def _number_of(pool: Any) -> Any:
    """How many processes a `pool` is; one that grew is the usual number."""
    kind, keys = pool.get("type", "elastic"), {"type", "num_workers", "max_workers", "multiplex"}
    if kind not in ("static", "elastic") or pool.keys() - keys:
        raise ValueError(pool)
    return pool.get("num_workers", 4 if kind == "static" else 1)


def _only(*values: Any) -> To:
    """A value that means nothing more: it is the only one here, or a line before has read it."""

    def nothing(value: Any) -> Table:
        if values and value not in values:
            raise ValueError(value)
        return {}

    return To("", nothing)


def _inverse(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return not value


def _number(value: Any) -> float:
    if isinstance(value, dict):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    """A number of processes; "auto", one that grew, is the usual one."""
    return 1 if value == "auto" else int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _length_penalty(table: Any) -> Table:
    """The penalty with the weights that prime-rl takes where it says none; the rest is unknown."""
    usual = {
        "num_output_tokens_weight": ("output", 0.25),
        "num_input_tokens_weight": ("input", 0.1),
        "num_turns_weight": ("turns", 0.1),
    }
    known = {"type"} if table.get("type") == "linear" else set()
    weights = {ours: table.get(key, weight) for key, (ours, weight) in usual.items()}
    rest = {f"length_penalty.{key}": table[key] for key in table.keys() - usual.keys() - known}
    return {"length_penalty": True, "length_weights": weights, **rest}


def _filter(table: Any) -> Table:
    """The function of a filter; its arguments are unknown."""
    rest = {f"filter.{key}": table[key] for key in table if key != "import_path"}
    return {"filter": ":".join(_text(table["import_path"]).rsplit(".", 1)), **rest}


def _learned_roles(mask: Mapping[str, bool]) -> list[str]:
    return [role for role, is_on in {"assistant": True, **mask}.items() if is_on]


def _without_version(url: str) -> str:
    return url.removesuffix("/").removesuffix("/v1")


_CONTEXT_STYLES = {"ring": "ring", "ulysses": "heads"}
_EXTRA_SAMPLING = (
    *("top_k", "min_p", "min_tokens", "stop", "reasoning_effort"),
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
        f"{model}.ep": f"{parallel}.expert_parallel_size",
        f"{model}.cp_style": To(f"{parallel}.context_parallel_style", _CONTEXT_STYLES.__getitem__),
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
        f"{model}.vlm.freeze_vision_encoder": To(f"{new}train_vision", _inverse),
    }


def _evaluation(old: str) -> Moves:
    return {
        f"{old}.interval": f"{old}.interval_steps",
        f"{old}.eval_base_model": f"{old}.base_model_first",
        f"{old}.skip_first_step": To(f"{old}.base_model_first", lambda skips: not skips),
        f"{old}.concurrency.max_inflight": f"{old}.max_in_flight_episodes",
        **_sampling(f"{old}.sampling", f"{old}.sampling"),
    }


def _kept_if_flat(is_dropped: Any) -> Any:
    """Groups with equal rewards are dropped anyway."""
    filters = [] if is_dropped else [{"type": "zero_advantage", "enforce": False}]
    return {"orchestrator": {"filters": filters}} if filters else {}


_ENGINE = ("gpu_memory_utilization", "max_num_seqs", "enforce_eager", "dtype")
_RUN: Moves = {
    "run.name": "name",
    "tokenizer.name": "model.tokenizer",
    "ckpt.interval": "checkpoint.interval_steps",
    "ckpt.keep_last": To("checkpoint.keep_last", lambda kept: max(2, int(kept))),
    "ckpt.keep_interval": "checkpoint.keep_interval_steps",
    "log.json_logging": To("log.format", lambda is_json: "json" if is_json else "text"),
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
    "inference.vllm_extra": To("inference.extra_args", leaves=OWNED_ENGINE_ARGS),
    "inference.vllm": To("inference.extra_args", leaves=OWNED_ENGINE_ARGS),
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
        "trainer.enable_router_replay": To(
            "trainer.router_replay", lambda is_on: "engine" if is_on else "off"
        ),
        "orchestrator.max_off_policy_steps": "orchestrator.max_staleness",
        "orchestrator.max_async_level": "orchestrator.max_lag",
        "max_async_level": "orchestrator.max_lag",
        "orchestrator.max_inflight_rollouts": "orchestrator.max_in_flight_episodes",
        "orchestrator.concurrency.max_inflight": "orchestrator.max_in_flight_episodes",
        "orchestrator.concurrency.min_inflight": "orchestrator.min_in_flight_episodes",
        "orchestrator.tasks_per_minute": "orchestrator.max_episodes_per_minute",
        **_sampling("orchestrator.sampling", "orchestrator.train.sampling"),
        **_sampling("orchestrator.train.sampling", "orchestrator.train.sampling"),
        **_evaluation("orchestrator.eval"),
        "orchestrator.multi_agent.drop_judge": _only(True),
        "orchestrator.multi_agent.filter_by_learner_seat": _only(True),
        "orchestrator.filter_by_learner_seat": _only(True),
        **{
            f"orchestrator.{key}": To("", _kept_if_flat)
            for key in ("buffer.online_difficulty_filtering", "curriculum.gates.zero_advantage")
        },
        "model.vlm.freeze_vision_encoder": To("trainer.train_vision", _inverse),
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

_STAGES: Moves = {"timeout": To("timeout.rollout", _number), "timeout.agent": "timeout.rollout"}
_SEAT: Moves = {
    "timeout": To("agent.timeout.rollout", _number),
    "timeout.agent": "agent.timeout.rollout",
    "timeout.episode": "timeout.episode_seconds",
    **{f"timeout.{stage}": f"agent.timeout.{stage}" for stage in SeatTimeoutConfig.model_fields},
    **{key: f"agent.{key}" for key in SeatConfig.model_fields if key != "timeout"},
}
PLACES = ("", "env.", "agent.", "env.agent.", "args.config.", "args.config.agent.")
"""Where a source of prime-rl may hold what a source of gradus holds itself."""
_SOURCE: Moves = {
    "rollouts_per_example": "group_size",
    "num_examples": To("", lambda number: {} if number == -1 else {"num_tasks": number}),
    "select.limit": "num_tasks",
    "env": To("id", _text),
    "weight": "ratio",
    "max_retries": "errors.retries",
    "retries.max_retries": "errors.retries",
    "num_workers": To("num_workers", _whole),
    "curriculum": To("curriculum.type", _text),
    "serve.address": "address",
    "serve.pool": To("num_workers", _number_of),
    **_SEAT,
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
ALGORITHM: Moves = {
    "length_penalty": To("", _length_penalty),
    **{f"roles.{role}.alpha": f"roles.{role}" for role in ("system", "user", "assistant", "tool")},
    "filter": To("", _filter),
    "normalization": "normalize",
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
SINGLE_NODE = _only("single_node")
TRACKER: Moves = {"offline": To("mode", lambda is_off: "offline" if is_off else "online")}

_TRACKER = (
    'write [[monitor]] with type = "wandb", "mlflow", "trackio", "tensorboard" or "prometheus"; '
    "metrics.jsonl is written anyway"
)
WORDS: Mapping[str, str] = {
    **dict.fromkeys(("wandb", "monitors"), _TRACKER),
    "weight_broadcast.type": "adapters reach vLLM as files; else trainer.weight_transfer",
    "slurm": "write [slurm] and [launch.nodes], and start with --slurm",
    "deployment": "write trainer.num_processes, inference.replicas and [launch.nodes]",
    "client.elastic": "write inference.addresses, a file with one address a line that may change",
    "client.base_url": "write inference.addresses, a file with one address a line",
    "orchestrator.val": "write [[orchestrator.eval.env]], and tasks.holdout_fraction on both sides",
    "save_adapter_separately": "gradus keeps adapters apart anyway; gradus export adds them",
    "multi_agent.drop_judge": "write agents.judge.train = true in the source",
    "filter_by_learner_seat": "a task that names learner_seat trains that agent alone",
    "resume": "write `gradus rl --resume` (or sft, eval)",
    "ckpt.resume_step": "write `gradus rl --resume` (or sft)",
    "clean_output_dir": "write `gradus rl --clean` (or sft)",
    "clean": "write `gradus eval --clean`",
    "dry_run": "write gradus check in the place of the command",
    "bench": "write `gradus bench-trainer @ FILE`",
    "ckpt": "write checkpoint.interval_steps or interval_minutes; the last step is saved anyway",
    "env_vars": "write trainer.env_vars, inference.env_vars or env_vars of a source",
    "tool_call_parser": "the renderer reads tool calls; see model.renderer",
    "reasoning_parser": "the renderer reads reasoning; see model.renderer",
    "oversampling_factor": "write orchestrator.max_in_flight_episodes",
    "initial_inflight": "the run begins with what the KV cache holds; remove it",
    "token_batch_size": "gradus counts groups: orchestrator.groups_per_batch",
    "dropout": "adapters are trained without dropout; remove it",
    "modules_to_save": "an adapter is low-rank factors alone; remove it, or train without lora",
    "epochs": "gradus counts steps; write max_steps",
    "system_prompt": "the task set writes the prompts, some by a key of taskset; see docs/roles.md",
    "errors.type": "which errors are tried again is set by retry_on; remove it",
    "errors.options": "which errors are tried again is set by retry_on; remove it",
}
"""Key without an equivalent, with as many parts as it takes to know it → what to do."""

_AIME = "HuggingFaceH4/aime_2024", "MathArena/aime_2025"
IDS: Mapping[str, tuple[str, Table]] = {
    **dict.fromkeys(("aime24", "aime2024"), ("aime", {"source": "hub", "dataset": _AIME[0]})),
    **dict.fromkeys(("aime25", "aime2025"), ("aime", {"source": "hub", "dataset": _AIME[1]})),
    "math-env": ("hendrycks-math", {"source": "hub"}),
}
"""Task set that gradus has under another name → that name, and the settings that make it the same.
"""
