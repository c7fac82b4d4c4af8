"""A command line of TRL or verl as a config of gradus: every option is carried or listed.

`gradus check --from trl` prints it. An option moves by a line here; what has no line, or no place
in the schema, is listed with what `foreign` says of it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from gradus.config.problems import is_key
from gradus.config.read.foreign import field_hint
from gradus.config.read.prime_rl import SCHEMAS, Conversion, fit, from_prime_rl
from gradus.config.read.renames import Draft, Moves, Table, To, shown_json
from gradus.config.read.toml import read_config_file
from gradus.errors import ConfigError

_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
_PLAIN_TRACKERS = ("console", "file", "none")
"""What gradus writes anyway, or nothing."""
_OTHERS = frozenset(
    ["bco", "cpo", "dpo", "gkd", "kto", "orpo", "ppo", "prm", "reward", "rloo", "xpo"]
)
"""What else TRL trains, in the names of its scripts."""
_COMMANDS = ("grpo", "sft")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SHELL = re.compile(r"[|&;]+|\d?>.*|&>.*")
"""A word of the shell, which ends a command."""
TRAINERS = ("trl", "verl")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _on(word: str) -> Any:
    """The value of a switch; one that is off means what gradus does anyway."""

    def made(is_on: Any) -> Any:
        if is_on not in (True, False, None):
            raise ValueError("neither true nor false")
        return word if is_on else {}

    return made


def _positive(value: Any) -> Any:
    """A number; nothing for one that means "off" to both trainers."""
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return value if value > 0 else {}


def _trackers(names: Any) -> list[Table]:
    given = names if isinstance(names, list) else [names]
    for name in given:
        if name not in (*_TRACKERS, *_PLAIN_TRACKERS, None):
            raise ValueError(f"{shown_json(name)} is not among {', '.join(_TRACKERS)}")
    return [{"type": name} for name in given if name in _TRACKERS]


def _schedule(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("not the name of a schedule")
    return _SCHEDULES.get(name, name)


def _estimator(name: Any) -> str:
    """With a `+` the gradient is that of k2, whatever the value is."""
    if name in ("low_var_kl", "k3"):
        return "k3"
    if name not in ("mse", "k2", "k1+", "k2+", "k3+", "low_var_kl+", "kl+", "mse+"):
        raise ValueError("gradus pulls by k2 (mse) or k3 (low_var_kl); k3 is written")
    return "k2"


def _among(known: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What each of these words becomes; another one is listed."""

    def made(word: Any) -> Any:
        if word is not None and str(word) not in known:
            raise ValueError(f"gradus has only what is called {', '.join(known)} there")
        return known.get(str(word))

    return made


_IS_SCALED = To(
    "orchestrator.train.algo.scale_by_std",
    _among({"True": True, "group": True, "False": False, "none": False}),
)


def _learning(at: str) -> Moves:
    """What both trainers call the keys of one that learns, below `at`."""
    return {
        "learning_rate": f"{at}optimizer.lr",
        "weight_decay": f"{at}optimizer.weight_decay",
        "max_grad_norm": f"{at}optimizer.max_grad_norm",
        "warmup_steps": f"{at}optimizer.warmup_steps",
        "lr_scheduler_type": To(f"{at}optimizer.schedule", _schedule),
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
        "loss_type": To(
            "trainer.loss.aggregation",
            _among({"dapo": "token_mean", "bnpo": "token_mean", "grpo": "sequence_mean"}),
        ),
        "scale_rewards": _IS_SCALED,
        "importance_sampling_level": To(
            "trainer.loss.type", _among({"token": "ppo_clip", "sequence": "gspo"})
        ),
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
        f"{_ACTOR}.megatron.override_transformer_config.moe_router_bias_update_rate": (
            "trainer.router_bias_rate"
        ),
        f"{_ACTOR}.optim.lr": "trainer.optimizer.lr",
        f"{_ACTOR}.optim.betas": "trainer.optimizer.betas",
        f"{_ACTOR}.optim.weight_decay": "trainer.optimizer.weight_decay",
        f"{_ACTOR}.optim.lr_warmup_steps": To("trainer.optimizer.warmup_steps", _positive),
        f"{_ACTOR}.grad_clip": "trainer.optimizer.max_grad_norm",
        f"{_ACTOR}.loss_agg_mode": To(
            "trainer.loss.aggregation",
            _among({"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}),
        ),
        f"{_ACTOR}.policy_loss.loss_mode": To(
            "trainer.loss.type", _among({"vanilla": "ppo_clip", "gspo": "gspo"})
        ),
        f"{_ACTOR}.ulysses_sequence_parallel_size": "trainer.parallel.context_parallel_size",
        f"{_ACTOR}.fsdp_config.optimizer_offload": "trainer.parallel.offload_optimizer",
        "algorithm.norm_adv_by_std_in_grpo": _IS_SCALED,
        f"{_ACTOR}.clip_ratio_low": "trainer.loss.clip_low",
        f"{_ACTOR}.clip_ratio_high": "trainer.loss.clip_high",
        f"{_ACTOR}.entropy_coeff": "trainer.loss.entropy_coefficient",
        f"{_ACTOR}.kl_loss_coef": "trainer.loss.reference_kl_coefficient",
        f"{_ACTOR}.kl_loss_type": To("trainer.loss.reference_kl_estimator", _estimator),
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
_TRL_USUAL = {"lr_scheduler_type": "linear", "adam_beta1": 0.9, "adam_beta2": 0.999}
USUAL: Mapping[str, Table] = {
    "trl rl": _TRL_USUAL | {"learning_rate": 1e-6, "max_completion_length": 256},
    "trl sft": _TRL_USUAL | {"learning_rate": 2e-5, "max_length": 1024},
    "verl rl": {
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{_ACTOR}.optim.lr": 1e-6,
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.optim.betas": [0.9, 0.999],
    },
}
"""What they take by themselves of how and what is learned, where gradus takes something else."""


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
    name, rest = _begun(_words(words))
    command = _command(trainer, name)
    moves, usual = MOVES[f"{trainer} {command}"], USUAL[f"{trainer} {command}"]
    given = dict(_options(rest, has_overrides=trainer == "verl"))
    if not given:
        raise ConfigError(
            f"--from {trainer}: no option found; write the command line after it, or name a file "
            "that holds one"
        )
    given = usual | given
    values: Table = {}
    notes = [*_derived(trainer, command, given, values)]
    if trainer == "trl" and not any(known in name for known in _COMMANDS):
        notes.append(f"{name or 'no command'}: read as grpo")
    for key, value in given.items():
        why = _carry(key, value, moves, values) if key in moves else _unknown(key, command)
        if why:
            notes.append(f"{key} = {shown_json(value)}: {why}")
    has_reward = any(_is_reward(key) for key in given)
    finished = _finished(values, command)
    fit(Draft(finished, SCHEMAS[command], notes=notes), "" if command == "sft" else "trainer.")
    left = () if command == "sft" else tuple(_to_write(finished, has_reward=has_reward))
    return Conversion(command, finished, tuple(notes), left)


def _words(words: Sequence[str]) -> Sequence[str]:
    """The command line, or that of the file which is named."""
    if len(words) != 1:
        return words
    try:
        file = Path(words[0])
        if not file.is_file():
            return words
        return shlex.split(file.read_text("utf-8-sig").replace("\\\n", " "), comments=True)
    except OSError as error:
        raise ConfigError(f"{words[0]:.80} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{words[0]} is not UTF-8 ({error.reason}); convert it") from error
    except ValueError as error:
        raise ConfigError(
            f"{words[0]} holds no command line of a shell ({error}); close the quote, or remove "
            "what is not of the command"
        ) from error


def _begun(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The script, module or command that is started ("" for none), and the words after it."""
    is_option = [
        word.startswith("-") or ("=" in word and not _VARIABLE.match(word)) for word in words
    ]
    first = (*is_option, True).index(True)
    plain = [word for word in words[:first] if not _VARIABLE.match(word)]
    behind_trl = [place for place, word in enumerate(plain, 1) if Path(word).name == "trl"]
    if behind_trl:
        return "".join(plain[behind_trl[-1] :][:1]), words[first:]
    is_launched = bool(plain) and plain[-1] not in _COMMANDS
    for place, word in enumerate(words if is_launched else ()):
        if is_option[place] and not word.startswith("-"):
            break
        is_script = word.endswith(".py") and not is_option[place]
        if is_script or (place and words[place - 1] in ("-m", "--module")):
            return word, words[place + 1 :]
    return "".join(plain[-1:]), words[first:]


def _command(trainer: str, name: str) -> str:
    """`rl` or `sft`, by what is started; ConfigError for what is neither."""
    tokens = set(re.split(r"[^a-z]+", name.lower()))
    if trainer == "verl":
        if "sft" in tokens:
            raise ConfigError("--from verl: a command line for sft cannot be converted")
        return "rl"
    is_other = bool(tokens & _OTHERS) or (bool(name) and "." not in name)
    if is_other and not tokens & {*_COMMANDS}:
        raise ConfigError(
            f"--from trl: {name!r} cannot be converted, only grpo and sft can; if it is one of "
            "them, write `trl grpo` or `trl sft` before the options"
        )
    return "sft" if "sft" in tokens and "grpo" not in tokens else "rl"


def _options(words: Sequence[str], *, has_overrides: bool) -> Iterator[tuple[str, Any]]:
    """`--key values`, `--key=value`, `--switch` and, in overrides as of Hydra, `key=value`."""
    rest = [*takewhile(lambda word: not _SHELL.fullmatch(word), words)]
    rest = [word for word in rest if word not in ("$@", "$*")]
    while rest:
        word = rest.pop(0)
        key, equals, text = word.lstrip("+-").partition("=")
        if word.startswith("--") and not equals:
            values = []
            while rest and not rest[0].startswith("--") and not (has_overrides and "=" in rest[0]):
                values.append(_value(rest.pop(0)))
            yield key.replace("-", "_"), values if len(values) > 1 else next(iter(values), True)
        elif equals:
            yield key.replace("-", "_") if word.startswith("--") else key, _value(text)
        else:
            yield word, None


def _carry(key: str, value: Any, moves: Moves, values: Table) -> str:
    """Put the value where it belongs; why it does not, "" where it does."""
    new = moves[key]
    to = new if isinstance(new, To) else To(new)
    try:
        made = to.make(value)
    except ValueError as error:
        return str(error)
    if made is not None and made != {}:  # None is what gradus does anyway
        _put(values, to.key, made)
    return ""


def _is_reward(key: str) -> bool:
    return key in ("reward_funcs", "reward_model_name_or_path") or key.startswith(
        ("custom_reward_function.", "reward_model.", "reward.")
    )


def _unknown(key: str, command: str) -> str:
    if _is_reward(key):
        return "a function of reply and row rates here, see below"
    if key == "config":
        return "no option of that file was read; give them on the command line"
    hint = field_hint((key.rpartition(".")[2],), partial(is_key, SCHEMAS[command]))
    return hint or "gradus has no such setting"


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
    if (prompt := given.pop(keys[0], None)) is not None:
        if _is_count(prompt) and _is_count(given.get(keys[1])):
            _put(values, "model.max_length_tokens", prompt + given[keys[1]])
        else:
            why = f"with {keys[1]}, both from 1, it would make model.max_length_tokens"
            yield f"{keys[0]} = {shown_json(prompt)}: {why}"
    given.pop("use_vllm", None)
    if trainer == "trl":
        betas = [given.pop(name) for name in ("adam_beta1", "adam_beta2")]
        if all(isinstance(it, int | float) for it in betas):
            _put(values, f"{'' if command == 'sft' else 'trainer.'}optimizer.betas", betas)
        else:
            yield f"adam_beta1 and adam_beta2 = {shown_json(betas)}: two numbers make the betas"
    for key in ("trainer.nnodes", "num_iterations", f"{_ACTOR}.ppo_epochs"):
        if str(given.get(key)) == "1":
            del given[key]
    yield from _adapters(trainer, given)
    if trainer == "trl" and command == "rl":
        yield from _scaled_and_clipped(given, values)
    if (both := given.pop(f"{_ACTOR}.clip_ratio", None)) is not None:
        sides = [f"{_ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
        if both != 0.2 and (left := [it for it in sides if it not in given]):
            yield f"{_ACTOR}.clip_ratio = {both}: written for {' and '.join(left)}, 0.2 there"
        given |= dict.fromkeys(sides, both) | given
    pull = f"{_ACTOR}.kl_loss_coef"
    if given.pop(f"{_ACTOR}.use_kl_loss", False) is not True:
        if coefficient := given.pop(pull, None):
            yield f"{pull} = {shown_json(coefficient)}: without effect there, without use_kl_loss"
        given.pop(f"{_ACTOR}.kl_loss_type", None)
    elif pull not in given:
        given[pull] = 0.001
        yield f"{pull}: not given; {given[pull]} as there"
    estimator = given.pop("algorithm.adv_estimator", "grpo" if trainer == "trl" else None)
    if estimator != "grpo":
        was = f" = {estimator}" if estimator else ": not given, gae (with a critic) there"
        yield f"algorithm.adv_estimator{was}: written as grpo; see orchestrator.train.algo"
    yield from _batch(command, given, values)


def _scaled_and_clipped(given: Table, values: Table) -> Iterator[str]:
    """TRL's rewards by their mean are MaxRL; its CISPO bounds the weight itself."""
    if (by := given.get("scale_rewards")) in ("mean", "batch"):
        del given["scale_rewards"]
        if by == "mean":
            _put(values, "orchestrator.train.algo.type", "max_rl")
        else:
            yield 'scale_rewards = "batch": by the whole batch there; written as by each group'
    if given.get("loss_type") != "cispo":
        given |= {"epsilon_high": given["epsilon"], **given} if "epsilon" in given else {}
        return
    del given["loss_type"]
    _put(values, "trainer.loss", {"type": "cispo", "aggregation": "token_mean"})
    if (level := given.pop("importance_sampling_level", "token")) != "token":
        yield f"importance_sampling_level = {shown_json(level)}: cispo goes by token here"
    lower, cap = given.pop("epsilon", 0.2), given.pop("epsilon_high", None)
    cap = lower if cap is None else cap
    if isinstance(cap, int | float) and cap >= 1:
        _put(values, "trainer.loss.ratio_cap", cap)
    else:
        yield f"epsilon_high = {shown_json(cap)}: no ratio_cap, which is from 1; 5 is taken"


def _adapters(trainer: str, given: Table) -> Iterator[str]:
    """Adapters where the command line switches them on, with what its trainer takes by itself."""
    model = "actor_rollout_ref.model." if trainer == "verl" else ""
    if model:
        is_on, usual = _is_count(given.get(f"{model}lora_rank")), {f"{model}lora_alpha": 16}
    else:
        is_on = str(given.pop("use_peft", False)).lower() in ("true", "yes", "t", "y", "1")
        usual = {"lora_r": 16, "lora_alpha": 32}
    if is_on:
        given |= usual | given
        return
    for key in [it for it in given if it.startswith((f"{model}lora_", f"{model}target_modules"))]:
        if value := given.pop(key):
            yield f"{key} = {shown_json(value)}: without effect there, where adapters are off"


def _batch(command: str, given: Table, values: Table) -> Iterator[str]:
    """The batch of TRL, from whole numbers alone; what is none is listed."""
    key = "orchestrator.groups_per_batch" if command == "rl" else "batch_conversations"
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    wrong = [name for name in sizes if name in given and not _is_count(given[name])]
    for name in wrong:
        yield f"{name} = {shown_json(given.pop(name))}: not a whole number from 1"
    size = given.pop(sizes[0], None)
    if size is None or wrong:
        if size is not None:
            yield f"{sizes[0]} = {size}: {key} is not set, as {' and '.join(wrong)} would count"
        return
    size *= given.pop(sizes[1], 1)
    of_group = given.get(sizes[2], 8) if command == "rl" else 1
    number = max(1, size // of_group)
    _put(values, key, number)
    yield f"{sizes[0]}: one device is assumed, {key} = {number}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _put(values: Table, path: str, value: Any) -> None:
    *tables, last = path.split(".")
    for name in tables:
        values = values.setdefault(name, {})
    values[last] = value


def _to_write(values: Table, *, has_reward: bool) -> Iterator[str]:
    """What the task set needs and no option of another trainer holds; fills in where it stands."""
    taskset = values["orchestrator"]["train"]["env"][0].setdefault("taskset", {})
    path = taskset.setdefault("path", "train.jsonl")
    if not str(path).endswith(".jsonl"):
        yield (
            f"taskset.path: {shown_json(path)} as a file of JSON lines, one row such as "
            '{"prompt": "2 + 2?", "answer": "4"} a line; a data set has to_json("train.jsonl")'
        )
    elif path == "train.jsonl":
        yield 'train.jsonl: your rows, one such as {"prompt": "2 + 2?", "answer": "4"} a line'
    if has_reward:
        taskset["reward"] = "rewards.py:score"
        yield "rewards.py: def score(reply, row): return 1.0 if reply == row['answer'] else 0.0"
    else:
        yield (
            "taskset.reward: a reply is compared with the row's answer; for a function of yours "
            'write reward = "rewards.py:score"'
        )
    yield "docs/do/reward.md says what a reward may take; gradus init --from FILE writes all of it"


def _finished(values: Table, command: str) -> Table:
    """The source as the only one, and what both trainers do by themselves: clip, pull by k3, and
    divide by the standard deviation of a group."""
    if command == "sft":
        return values
    source = {"id": "jsonl", **values.pop("source", {})}
    _put(values, "orchestrator.train.env", [source])
    algo = values["orchestrator"]["train"].get("algo", {})
    if "type" not in algo:
        algo = {"type": "grpo", "scale_by_std": True, **algo}
    _put(values, "orchestrator.train.algo", algo)
    loss = {"type": "ppo_clip", **values.get("trainer", {}).get("loss", {})}
    if loss["type"] == "gspo":
        loss = {"clip_low": 0.2, "clip_high": 0.2, **loss}
    _put(values, "trainer.loss", loss)
    if loss.get("reference_kl_coefficient"):
        loss.setdefault("reference_kl_estimator", "k3")
    return values
