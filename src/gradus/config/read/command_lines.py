"""A command line of TRL or verl as a config of gradus: every option is carried or listed.

`gradus check --from trl` prints it. An option moves by a line here; what has no line, or no place
in the schema, is listed with what `foreign` says of it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config.problems import is_key
from gradus.config.read.foreign import field_hint
from gradus.config.read.prime_rl import SCHEMAS, Conversion, from_prime_rl
from gradus.config.read.renames import Moves, Table, To, shown_json
from gradus.config.read.toml import read_config_file
from gradus.errors import ConfigError

_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
TRAINERS = ("trl", "verl")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _on(word: str) -> Any:
    """The value of a switch; one that is off means what gradus does anyway."""
    return lambda is_on: word if is_on is True else {}


def _positive(value: Any) -> Any:
    if value is None or value <= 0:
        raise ValueError(value)
    return value


def _trackers(names: Any) -> list[Table]:
    given = [names] if isinstance(names, str) else names
    return [{"type": name} for name in given if name in _TRACKERS]


def _learning(at: str) -> Moves:
    """What both trainers call the keys of one that learns, below `at`."""
    return {
        "learning_rate": f"{at}optimizer.lr",
        "weight_decay": f"{at}optimizer.weight_decay",
        "max_grad_norm": f"{at}optimizer.max_grad_norm",
        "warmup_steps": f"{at}optimizer.warmup_steps",
        "lr_scheduler_type": To(f"{at}optimizer.schedule", lambda it: _SCHEDULES.get(it, it)),
        "lora_r": f"{at}lora.rank",
        "lora_alpha": f"{at}lora.alpha",
        "lora_target_modules": f"{at}lora.target_modules",
        "gradient_checkpointing": To(f"{at}parallel.activation_checkpointing", _on("full")),
        "bf16": To(f"{at}compute_dtype", _on("bfloat16")),
    }


_TRL_SHARED: Moves = {
    "model_name_or_path": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "output_dir": "output_dir",
    "run_name": "name",
    "max_steps": To("max_steps", _positive),
    "seed": "seed",
    "save_steps": "checkpoint.interval_steps",
    "report_to": To("monitor", _trackers),
}
MOVES: Mapping[str, Moves] = {
    "trl rl": {
        **_TRL_SHARED,
        **_learning("trainer."),
        "num_generations": "source.group_size",
        "dataset_name": "source.taskset.path",
        "system_prompt": "source.taskset.instruction",
        "temperature": "orchestrator.train.sampling.temperature",
        "top_p": "orchestrator.train.sampling.top_p",
        "max_completion_length": "orchestrator.train.sampling.max_completion_tokens",
        "vllm_max_model_length": "model.max_length_tokens",
        "vllm_gpu_memory_utilization": "inference.gpu_memory_utilization",
        "vllm_tensor_parallel_size": "inference.tensor_parallel_size",
        "epsilon": "trainer.loss.clip_low",
        "epsilon_high": "trainer.loss.clip_high",
        "beta": "trainer.loss.reference_kl_coefficient",
    },
    "trl sft": {
        **_TRL_SHARED,
        **_learning(""),
        "dataset_name": "data.path",
        "max_length": "model.max_length_tokens",
        "max_seq_length": "model.max_length_tokens",
    },
    "verl rl": {
        "data.train_files": "source.taskset.path",
        "data.prompt_key": "source.taskset.prompt_key",
        "data.train_batch_size": "orchestrator.groups_per_batch",
        "data.max_response_length": "orchestrator.train.sampling.max_completion_tokens",
        "data.seed": "seed",
        "actor_rollout_ref.model.path": "model.name",
        "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
        "actor_rollout_ref.model.lora_rank": To("trainer.lora.rank", _positive),
        "actor_rollout_ref.model.lora_alpha": "trainer.lora.alpha",
        "actor_rollout_ref.model.enable_gradient_checkpointing": To(
            "trainer.parallel.activation_checkpointing", _on("full")
        ),
        f"{_ACTOR}.optim.lr": "trainer.optimizer.lr",
        f"{_ACTOR}.optim.weight_decay": "trainer.optimizer.weight_decay",
        f"{_ACTOR}.optim.lr_warmup_steps": To("trainer.optimizer.warmup_steps", _positive),
        f"{_ACTOR}.grad_clip": "trainer.optimizer.max_grad_norm",
        f"{_ACTOR}.clip_ratio": "trainer.loss.clip_low",
        f"{_ACTOR}.clip_ratio_low": "trainer.loss.clip_low",
        f"{_ACTOR}.clip_ratio_high": "trainer.loss.clip_high",
        f"{_ACTOR}.entropy_coeff": "trainer.loss.entropy_coefficient",
        f"{_ACTOR}.kl_loss_coef": "trainer.loss.reference_kl_coefficient",
        f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
        f"{_ROLLOUT}.n": "source.group_size",
        f"{_ROLLOUT}.temperature": "orchestrator.train.sampling.temperature",
        f"{_ROLLOUT}.top_p": "orchestrator.train.sampling.top_p",
        f"{_ROLLOUT}.tensor_model_parallel_size": "inference.tensor_parallel_size",
        f"{_ROLLOUT}.gpu_memory_utilization": "inference.gpu_memory_utilization",
        f"{_ROLLOUT}.max_num_seqs": "inference.max_num_seqs",
        f"{_ROLLOUT}.max_model_len": "model.max_length_tokens",
        "trainer.total_training_steps": To("max_steps", _positive),
        "trainer.save_freq": To("checkpoint.interval_steps", _positive),
        "trainer.default_local_dir": "output_dir",
        "trainer.experiment_name": "name",
        "trainer.n_gpus_per_node": "trainer.num_processes",
        "trainer.logger": To("monitor", _trackers),
    },
}
"""Trainer and command → its options, and the keys that they become. `source.` is the one source."""


def converted(words: Sequence[str]) -> Conversion:
    """The config for the name of a trainer and its file or command line."""
    trainer, *rest = words or [""]
    if trainer in TRAINERS:
        return from_command_line(trainer, rest)
    if trainer != "prime-rl":
        raise ConfigError(f"--from {trainer}: only prime-rl, trl and verl can be converted")
    files = [word for word in rest if word != "@"]
    if len(files) != 1:
        raise ConfigError(f"--from prime-rl needs one file after it, not {len(files)}")
    return from_prime_rl(read_config_file(files[0]).values)


def from_command_line(trainer: str, words: Sequence[str]) -> Conversion:
    """The config for a command line of `trl` or `verl`, or for the file that holds one."""
    if len(words) == 1 and Path(words[0]).is_file():
        words = shlex.split(Path(words[0]).read_text().replace("\\\n", " "), comments=True)
    command = "sft" if any("sft" in word and "=" not in word for word in words) else "rl"
    moves = MOVES.get(f"{trainer} {command}")
    if moves is None:
        raise ConfigError(f"--from {trainer}: a command line for {command} cannot be converted")
    given = dict(_options(words))
    if not given:
        raise ConfigError(
            f"--from {trainer}: no option found; write the command line behind it, or name a file "
            "that holds one"
        )
    values: Table = {}
    notes = [*_derived(trainer, command, given, values)]
    for key, value in given.items():
        new = moves.get(key)
        to = new if isinstance(new, To) else To(new or "")
        try:
            made = to.make(value) if new is not None else {}
        except (TypeError, ValueError):
            made = {}
        if new is None:
            known = SCHEMAS[command]
            hint = field_hint((key.rpartition(".")[2],), partial(is_key, known))
            notes.append(f"{key} = {shown_json(value)}: {hint or 'gradus has no such setting'}")
        elif made != {}:
            _put(values, to.key, made)
    return Conversion(command, _finished(values, command), tuple(notes))


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value`, `--switch` and `key=value`; other words start the trainer."""
    scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
    rest = list(words[max(scripts, default=-1) + 1 :])
    while rest:
        word = rest.pop(0)
        key, equals, text = word.lstrip("+-").partition("=")
        if word.startswith("--") and not equals:
            values = []
            while rest and not rest[0].startswith("--") and "=" not in rest[0]:
                values.append(_value(rest.pop(0)))
            yield key.replace("-", "_"), values if len(values) > 1 else next(iter(values), True)
        elif equals:
            yield key.replace("-", "_") if word.startswith("--") else key, _value(text)


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        is_list = text.startswith("[") and text.endswith("]")
        return [it.strip(" '\"") for it in text[1:-1].split(",")] if is_list else text


def _derived(trainer: str, command: str, given: Table, values: Table) -> Iterator[str]:
    """Numbers that follow from several options, which are used up; a line for what was assumed."""
    keys = ("data.max_prompt_length", "data.max_response_length")
    keys = keys if trainer == "verl" else ("max_prompt_length", "max_completion_length")
    if (prompt := given.pop(keys[0], None)) and isinstance(given.get(keys[1]), int):
        _put(values, "model.max_length_tokens", prompt + given[keys[1]])
    for switch in ("use_peft", "use_vllm"):
        if given.pop(switch, True) is False and switch == "use_peft":
            given.pop("lora_r", None)
    if given.pop(f"{_ACTOR}.use_kl_loss", True) is False:
        given.pop(f"{_ACTOR}.kl_loss_coef", None)
    estimator = given.pop("algorithm.adv_estimator", "grpo")
    if estimator != "grpo":
        yield f"algorithm.adv_estimator = {estimator}: written as grpo; see orchestrator.train.algo"
    size = given.pop("per_device_train_batch_size", None)
    if isinstance(size, int):
        size *= given.pop("gradient_accumulation_steps", 1)
        of_group = given.get("num_generations", 8) if command == "rl" else 1
        key = "orchestrator.groups_per_batch" if command == "rl" else "batch_conversations"
        number = max(1, size // of_group)
        _put(values, key, number)
        yield f"per_device_train_batch_size: one device is assumed, {key} = {number}"


def _put(values: Table, path: str, value: Any) -> None:
    *tables, last = path.split(".")
    for name in tables:
        values = values.setdefault(name, {})
    values[last] = value


def _finished(values: Table, command: str) -> Table:
    """The source as the only one, and the loss that clips as both trainers do."""
    if command == "sft":
        return values
    source = {"id": "jsonl", **values.pop("source", {})}
    _put(values, "orchestrator.train.env", [source])
    loss = values.get("trainer", {}).get("loss", {})
    if "clip_low" in loss or "clip_high" in loss:
        values["trainer"]["loss"] = {"type": "ppo_clip", **loss}
    return values
