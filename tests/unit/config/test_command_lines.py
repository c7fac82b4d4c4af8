"""Command lines of TRL and verl as configs: every option is carried or listed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gradus.config import RunConfig, SftConfig
from gradus.config.problems import is_key
from gradus.config.read.command_lines import MOVES, from_command_line
from gradus.config.read.renames import To
from gradus.errors import ConfigError

TRL = """
# the run of last week
accelerate launch --num_processes 1 grpo.py \\
  --model_name_or_path Qwen/Qwen3-0.6B --dataset_name rows.jsonl --learning_rate 1e-6 \\
  --num_generations 8 --per_device_train_batch_size 16 --gradient_accumulation_steps=4 \\
  --max_prompt_length 512 --max_completion_length 256 --beta 0.04 --epsilon 0.2 --use_vllm --bf16 \\
  --lr_scheduler_type constant_with_warmup --max_steps 100 --report_to wandb --use_peft \\
  --lora_r 16 --reward_funcs accuracy format --num_train_epochs 3 --made_up 1
"""
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.parquet "
    "data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 "
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.rollout.n=5 "
    "+actor_rollout_ref.actor.megatron.override_transformer_config."
    "moe_router_bias_update_rate=1e-3 "
    "'trainer.logger=[console,wandb]' trainer.save_freq=-1 "
    "trainer.total_training_steps=30 trainer.test_freq=5 +foo.bar=1"
)


def test_a_command_line_of_trl_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(TRL)
    found = from_command_line("trl", [str(tmp_path / "run.sh")])
    config = RunConfig.model_validate(found.values)
    assert (config.model.name, config.model.max_length_tokens) == ("Qwen/Qwen3-0.6B", 768)
    assert (config.max_steps, config.orchestrator.groups_per_batch) == (100, 8)
    assert config.orchestrator.train.env[0].group_size == 8
    assert found.values["trainer"] == {
        "optimizer": {"lr": 1e-6, "schedule": "constant", "betas": [0.9, 0.999]},
        "loss": {
            "type": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "reference_kl_coefficient": 0.04,
            "reference_kl_estimator": "k3",
        },
        "compute_dtype": "bfloat16",
        "lora": {"rank": 16, "alpha": 32},
    }
    assert [note.partition(":")[0] for note in found.left_out] == [
        "per_device_train_batch_size",
        'reward_funcs = ["accuracy", "format"]',
        "num_train_epochs = 3",
        "made_up = 1",
    ]


def test_a_command_line_of_verl_becomes_a_run() -> None:
    found = from_command_line("verl", shlex.split(VERL))
    config = RunConfig.model_validate(found.values)
    assert (config.max_steps, config.checkpoint.interval_steps) == (30, None)
    assert config.trainer.router_bias_rate == 0.001
    assert [it.type for it in config.monitor] == ["wandb"]
    assert config.orchestrator.train.sampling.max_completion_tokens == 1024
    assert [note.partition(" =")[0] for note in found.left_out] == ["trainer.test_freq", "foo.bar"]


_GRPO = "algorithm.adv_estimator=grpo"
_VERL_MODEL = "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("trainer", "words", "adapters", "listed"),
    [
        (
            "trl",
            "grpo --use_peft False --lora_r 16 --lora_alpha 32",
            None,
            ["lora_r", "lora_alpha"],
        ),
        (
            "trl",
            "grpo --lora_r 16 --lora_target_modules q k",
            None,
            ["lora_r", "target_mod"],
        ),
        ("trl", "sft --lora_alpha 8 --lora_dropout 0.1", None, ["lora_alpha", "lora_dropout"]),
        ("trl", "grpo --use_peft", {"rank": 16, "alpha": 32}, []),
        ("trl", "sft --use_peft yes --lora_r 8", {"rank": 8, "alpha": 32}, []),
        ("verl", f"{_VERL_MODEL}.lora_rank=0 {_VERL_MODEL}.lora_alpha=16", None, ["lora_alpha"]),
        ("verl", f"{_VERL_MODEL}.lora_alpha=16", None, ["lora_alpha"]),
        ("verl", f"{_VERL_MODEL}.lora_rank=8", {"rank": 8, "alpha": 16}, []),
    ],
)
def test_adapters_train_only_where_they_did(
    trainer: str, words: str, adapters: dict[str, int] | None, listed: list[str]
) -> None:
    found = from_command_line(
        trainer, [*words.split(), *([_GRPO, "a=1"] if trainer == "verl" else [])]
    )
    learns = found.values if found.command == "sft" else found.values.get("trainer", {})
    assert learns.get("lora") == adapters
    said = [note for note in found.left_out if "adapters are off" in note]
    assert [name in note for name, note in zip(listed, said, strict=True)] == [True] * len(listed)


_K3 = {"reference_kl_coefficient": 0.001, "reference_kl_estimator": "k3"}


@pytest.mark.parametrize(
    ("words", "loss", "listed"),
    [
        ("use_kl_loss=True", _K3, ["kl_loss_coef: not given"]),
        ("use_kl_loss=True kl_loss_coef=0.1", _K3 | {"reference_kl_coefficient": 0.1}, []),
        ("kl_loss_coef=0.001 kl_loss_type=mse", {}, ["without use_kl_loss"]),
        ("use_kl_loss=False kl_loss_coef=0.001", {}, ["without use_kl_loss"]),
        (
            "use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=mse",
            _K3 | {"reference_kl_estimator": "k2"},
            [],
        ),
        ("use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=low_var_kl", _K3, []),
        ("use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=abs", _K3, ["k3 is written"]),
    ],
)
def test_the_pull_of_verl_is_there_where_it_was(
    words: str, loss: dict[str, object], listed: list[str]
) -> None:
    given = [f"actor_rollout_ref.actor.{word}" for word in words.split()]
    found = from_command_line("verl", [_GRPO, *given])
    assert found.values["trainer"]["loss"] == {"type": "ppo_clip", **loss}
    assert [said in note for said, note in zip(listed, found.left_out, strict=True)] == [
        True for _ in listed
    ]


@pytest.mark.parametrize(
    ("words", "low", "high"),
    [("--epsilon 0.3", 0.3, 0.3), ("--epsilon 0.1 --epsilon_high 0.28", 0.1, 0.28)],
)
def test_trl_clips_on_both_sides_alike_unless_told(words: str, low: float, high: float) -> None:
    loss = from_command_line("trl", ["grpo", *words.split()]).values["trainer"]["loss"]
    assert loss == {"type": "ppo_clip", "clip_low": low, "clip_high": high}


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ("trl --num_iterations 1", []),
        ("trl --num_iterations 2", ["num_iterations = 2: each batch trains once"]),
        ("verl actor_rollout_ref.actor.ppo_epochs=1", []),
        ("verl 'trainer.nnodes=\"1\"'", []),
        ("trl --scale_rewards batch", ["written as by each group"]),
        (
            "verl actor_rollout_ref.actor.clip_ratio=0.1",
            ["written for actor_rollout_ref.actor.clip_ratio_low and actor_rollout_ref.actor."],
        ),
    ],
)
def test_only_what_differs_is_listed(words: str, listed: list[str]) -> None:
    trainer, *rest = shlex.split(words)
    start = ["main_ppo", _GRPO] if trainer == "verl" else ["grpo"]
    found = from_command_line(trainer, [*start, *rest])
    assert [it in note for it, note in zip(listed, found.left_out, strict=True)] == [
        True for _ in listed
    ]


_CAPPED = {"type": "cispo", "aggregation": "token_mean"}


@pytest.mark.parametrize(
    ("words", "loss", "listed"),
    [
        ("--epsilon_high 4", {"ratio_cap": 4}, []),
        (
            "--epsilon 0.1 --epsilon_high 5.0 --beta 0.1",
            {"ratio_cap": 5.0, **_K3, "reference_kl_coefficient": 0.1},
            [],
        ),
        ("--epsilon 6", {"ratio_cap": 6}, []),
        ("", {}, ["epsilon_high = 0.2: no ratio_cap"]),
        ("--epsilon_high x", {}, ['epsilon_high = "x"']),
        (
            "--epsilon_high 4 --importance_sampling_level sequence",
            {"ratio_cap": 4},
            ["goes by token here"],
        ),
        ("--epsilon_high 4 --importance_sampling_level token", {"ratio_cap": 4}, []),
    ],
)
def test_cispo_of_trl_is_cispo(words: str, loss: dict[str, object], listed: list[str]) -> None:
    found = from_command_line("trl", ["grpo", "--loss_type", "cispo", *words.split()])
    RunConfig.model_validate({"max_steps": 9, "model": {"name": "m"}, **found.values})
    assert found.values["trainer"]["loss"] == {**_CAPPED, **loss}
    assert [it in note for it, note in zip(listed, found.left_out, strict=True)] == [
        True for _ in listed
    ]


def test_rewards_by_the_mean_of_their_group_are_max_rl() -> None:
    found = from_command_line("trl", ["grpo", "--scale_rewards", "mean"])
    config = RunConfig.model_validate({"max_steps": 9, "model": {"name": "m"}, **found.values})
    assert (config.orchestrator.train.algo.type, found.left_out) == ("max_rl", ())


def test_without_a_weight_trl_pulls_by_nothing() -> None:
    found = from_command_line("trl", ["grpo", "--beta", "0.0"])
    assert found.values["trainer"]["loss"] == {"type": "ppo_clip", "reference_kl_coefficient": 0.0}


_SEQUENCE = {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2}
_ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("words", "loss", "is_scaled", "listed"),
    [
        ("trl grpo --max_steps 9", {"type": "ppo_clip"}, True, []),
        ("trl grpo --scale_rewards none", {"type": "ppo_clip"}, False, []),
        ("trl grpo --scale_rewards batch", {"type": "ppo_clip"}, True, ["scale_rewards"]),
        (
            "trl grpo --loss_type grpo --importance_sampling_level sequence",
            {**_SEQUENCE, "aggregation": "sequence_mean"},
            True,
            [],
        ),
        ("trl grpo --loss_type dr_grpo", {"type": "ppo_clip"}, True, ["loss_type"]),
        (
            f"verl {_GRPO} algorithm.norm_adv_by_std_in_grpo=False data.seed=1",
            {"type": "ppo_clip"},
            False,
            [],
        ),
        (
            f"verl {_GRPO} {_ACTOR}.clip_ratio=0.3 {_ACTOR}.policy_loss.loss_mode=gspo",
            {"type": "gspo", "clip_low": 0.3, "clip_high": 0.3},
            True,
            [f"{_ACTOR}.clip_ratio"],
        ),
        (
            f"verl {_GRPO} {_ACTOR}.clip_ratio_low=0.1 {_ACTOR}.clip_ratio=0.3",
            {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3},
            True,
            [f"{_ACTOR}.clip_ratio"],
        ),
        (
            f"verl {_GRPO} {_ACTOR}.clip_ratio=0.2 {_ACTOR}.clip_ratio_high=0.28",
            {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
            True,
            [],
        ),
        (
            f"verl {_GRPO} {_ACTOR}.loss_agg_mode=seq-mean-token-mean "
            f"{_ACTOR}.policy_loss.loss_mode=gpg",
            {"type": "ppo_clip", "aggregation": "sequence_mean"},
            True,
            [f"{_ACTOR}.policy_loss.loss_mode"],
        ),
    ],
)
def test_the_loss_is_what_both_trainers_take_by_themselves(
    words: str, loss: dict[str, object], is_scaled: bool, listed: list[str]
) -> None:
    trainer, *rest = words.split()
    found = from_command_line(trainer, rest)
    found.values["model"] = {"name": "m"}
    config = RunConfig.model_validate({"max_steps": 9, **found.values})
    assert found.values["trainer"]["loss"] == loss
    assert getattr(config.orchestrator.train.algo, "scale_by_std", None) is is_scaled
    assert [note.partition(" =")[0] for note in found.left_out] == listed


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("trl grpo --config x.yaml", "no option of that file was read"),
        (f"verl {_GRPO} trainer.nnodes=2", "launch.nodes"),
        (f"verl {_GRPO} trainer.nnodes=1 a=1", "a = 1"),
        (
            f"verl {_GRPO} {_ACTOR}.fsdp_config.param_offload=True",
            "trainer.parallel.offload_optimizer",
        ),
        (f"verl {_GRPO} {_ACTOR}.ppo_epochs=2", "trainer.updates_per_batch"),
        (f"verl {_GRPO} data.val_files=x", "orchestrator.eval.env"),
    ],
)
def test_an_option_that_gradus_has_otherwise_is_named(words: str, hint: str) -> None:
    trainer, *rest = words.split()
    (note,) = from_command_line(trainer, rest).left_out
    assert hint in note


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("grpo --top_p 0.95", "sampling.top_p"),
        ("grpo --max_completion_length 4096", "sampling.max_completion_tokens"),
        ("grpo --max_prompt_length 8192 --max_completion_length 8192", ""),
        ("sft --dataset_name rows.jsonl --max_length 16384", ""),
    ],
)
def test_what_the_first_start_would_refuse_is_said(words: str, key: str) -> None:
    given = [*words.split(), "--max_steps", "9", "--model_name_or_path", "m"]
    refused = from_command_line("trl", given).toml().partition("# Still refused:")[2]
    assert (key in refused, bool(refused)) == (True, bool(key))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.seed=1", ["not given, gae (with a critic) there: written as grpo"]),
        ("algorithm.adv_estimator=null", ["not given, gae"]),
        ("algorithm.adv_estimator=rloo", ["algorithm.adv_estimator = rloo: written as grpo"]),
        (_GRPO, []),
    ],
)
def test_verl_takes_a_critic_unless_told(given: str, said: list[str]) -> None:
    found = from_command_line("verl", [given])
    assert found.values["orchestrator"]["train"]["algo"]["type"] == "grpo"
    assert [it in note for it, note in zip(said, found.left_out, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("words", "optimizer", "lengths"),
    [
        (
            "trl grpo --seed 1",
            {"lr": 1e-6, "schedule": "linear", "betas": [0.9, 0.999]},
            (2048, 256),
        ),
        (
            "trl grpo --adam_beta2 0.9 --lr_scheduler_type constant --learning_rate 2 "
            "--max_completion_length 64 --max_prompt_length 32",
            {"lr": 2, "schedule": "constant", "betas": [0.9, 0.9]},
            (96, 64),
        ),
        ("trl sft --max_steps 9", {"lr": 2e-5, "schedule": "linear", "betas": [0.9, 0.999]}, 1024),
        ("trl sft --max_seq_length 64 --adam_beta1 0.5", {"lr": 2e-5, "betas": [0.5, 0.999]}, 64),
        (
            f"verl {_GRPO}",
            {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]},
            (1024, 512),
        ),
        (
            f"verl {_GRPO} {_ACTOR}.optim.weight_decay=0.1 {_ACTOR}.optim.betas=[0.9,0.95] "
            "data.max_response_length=4096",
            {"lr": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            (4608, 4096),
        ),
    ],
)
def test_what_both_trainers_take_by_themselves_is_written(
    words: str, optimizer: dict[str, object], lengths: object
) -> None:
    trainer, *rest = words.split()
    found = from_command_line(trainer, rest)
    table = found.values if found.command == "sft" else found.values["trainer"]
    assert table["optimizer"] == {
        **({"schedule": "linear"} if trainer == "trl" else {}),
        **optimizer,
    }
    needed = {"model": {"name": "m"} | found.values.get("model", {})}
    if found.command == "sft":
        given = {"data": {"path": "rows.jsonl"}, **found.values, **needed}
        assert SftConfig.model_validate(given).model.max_length_tokens == lengths
    else:
        config = RunConfig.model_validate({"max_steps": 9, **found.values, **needed})
        sampled = config.orchestrator.train.sampling.max_completion_tokens
        assert (config.model.max_length_tokens, sampled) == lengths
    assert found.left_out == ()


def test_what_no_option_holds_is_left_to_be_written() -> None:
    named = from_command_line("trl", ["grpo", "--reward_funcs", "mine", "--max_steps", "9"])
    (source,) = RunConfig.model_validate(
        {"model": {"name": "m"}, **named.values}
    ).orchestrator.train.env
    assert source.taskset == {"path": "train.jsonl", "reward": "rewards.py:score"}
    assert [note.partition(": ")[0] for note in named.to_write[:2]] == ["train.jsonl", "rewards.py"]
    text = named.toml()
    assert "# To be written:" in text
    assert "a function of reply and row rates here" in text
    plain = from_command_line("verl", ["data.train_files=rows.parquet"])
    assert "reward" not in plain.values["orchestrator"]["train"]["env"][0]["taskset"]
    assert [note.partition(": ")[0] for note in plain.to_write[:2]] == [
        "taskset.path",
        "taskset.reward",
    ]


def test_a_command_line_for_sft_is_one() -> None:
    words = "trl sft --model_name_or_path x/y --dataset_name rows.jsonl --max_seq_length 512"
    found = from_command_line("trl", [*words.split(), "--per_device_train_batch_size", "4"])
    assert found.command == "sft"
    assert SftConfig.model_validate(found.values).batch_conversations == 4


def test_what_is_none_there_is_what_gradus_does_anyway() -> None:
    words = "sft --model_name_or_path x/y --dataset_name rows.jsonl --max_length None"
    assert "None" not in from_command_line("trl", words.split()).toml()
    words = "grpo --model_name_or_path x/y --run_name None"
    assert "name" not in from_command_line("trl", words.split()).values


@pytest.mark.parametrize(
    ("begin", "command"),
    [
        ("trl grpo", "rl"),
        ("/opt/env/bin/trl sft", "sft"),
        ("CUDA_VISIBLE_DEVICES=0 WANDB_NAME=sft trl grpo", "rl"),
        ("accelerate launch --config_file sft.yaml grpo.py", "rl"),
        ("torchrun --nproc_per_node=2 scripts/sft.py", "sft"),
        ("python -m trl.scripts.sft", "sft"),
        ("python grpo_reward.py", "rl"),
        ("python grpo_after_sft.py", "rl"),
        ("grpo", "rl"),
        ("", "rl"),
    ],
)
def test_the_command_is_what_stands_before_the_options(begin: str, command: str) -> None:
    options = "--model_name_or_path out/sft --reward_funcs sft.py --max_steps 9"
    found = from_command_line("trl", f"{begin} {options}".split())
    assert found.command == command
    assert (found.values["max_steps"], found.values["model"]["name"]) == (9, "out/sft")
    assert any(note.startswith('reward_funcs = "sft.py"') for note in found.left_out)
    assert any("read as grpo" in note for note in found.left_out) == (not begin)


@pytest.mark.parametrize(
    "name", ["dpo", "trl dpo", "trl rloo", "python kto.py", "-m trl.scripts.dpo"]
)
def test_what_trl_trains_otherwise_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="only grpo and sft can"):
        from_command_line("trl", ["python", *name.split(), "--learning_rate", "1e-5"])


def test_a_script_of_another_name_is_said_to_be_read_as_grpo() -> None:
    found = from_command_line("trl", ["python", "train.py", "--max_steps", "9"])
    assert found.left_out == ("train.py: read as grpo",)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--output_dir my-sft=x", "output_dir", "my-sft=x"),
        ("--run_name a=b", "name", "a=b"),
        ("--max_steps 9 $@ 2>&1 | tee --append log", "max_steps", 9),
    ],
)
def test_a_value_ends_at_the_next_option(option: str, key: str, value: object) -> None:
    found = from_command_line("trl", ["grpo", *option.split()])
    assert found.values[key] == value
    assert found.left_out == ()


@pytest.mark.parametrize(
    ("option", "listed"),
    [
        ("--max_steps abc", ['max_steps = "abc"']),
        ("--max_steps", ["max_steps = true"]),
        ("--bf16 abc", ['bf16 = "abc"']),
        ("--report_to 5", ["report_to = 5"]),
        ("--report_to wandb swanlab", ['report_to = ["wandb", "swanlab"]']),
        ("--lr_scheduler_type a b", ['lr_scheduler_type = ["a", "b"]']),
        ("--max_prompt_length abc --max_completion_length 64", ['max_prompt_length = "abc"']),
        ("--max_prompt_length 8 --max_completion_length 0", ["max_prompt_length = 8"]),
        ("--adam_beta2 None", ["adam_beta1 and adam_beta2 = [0.9, null]"]),
        ("--num_generations 0", ["num_generations = 0"]),
        (
            "--per_device_train_batch_size 8 --num_generations 0",
            ["num_generations = 0", "per_device_train_batch_size = 8"],
        ),
        (
            "--per_device_train_batch_size 8 --gradient_accumulation_steps x",
            ['gradient_accumulation_steps = "x"', "per_device_train_batch_size = 8"],
        ),
        (
            "--per_device_train_batch_size 8 --gradient_accumulation_steps 2.5",
            ["gradient_accumulation_steps = 2.5", "per_device_train_batch_size = 8"],
        ),
        ("--per_device_train_batch_size x", ['per_device_train_batch_size = "x"']),
    ],
)
def test_an_option_of_no_use_is_listed(option: str, listed: list[str]) -> None:
    found = from_command_line("trl", ["grpo", *option.split()])
    assert [note.partition(": ")[0] for note in found.left_out] == listed
    assert "groups_per_batch" not in str(found.values)


def test_an_override_of_verl_may_name_a_script() -> None:
    words = ["data.seed=3", "custom_reward_function.path=r.py", "~ray", "--config-name", "x", _GRPO]
    found = from_command_line("verl", ["python3", "-m", "verl.trainer.main_ppo", *words])
    assert found.values["seed"] == 3
    said = [note.partition(" =")[0] for note in found.left_out]
    assert said == ["custom_reward_function.path", "~ray", "config_name"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"trl grpo --run_name 'a", "close the quote"), (b"\xff\xfe\x00trl", "is not UTF-8")],
)
def test_a_file_that_holds_no_command_line_is_one_sentence(
    content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        from_command_line("trl", [str(tmp_path / "run.sh")])


def test_a_command_line_in_one_word_is_no_file() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_command_line("trl", [f"trl grpo --run_name {'a' * 999}"])


@pytest.mark.parametrize(
    ("trainer", "words", "said"),
    [
        ("trl", [], "no option found"),
        ("trl", ["trl", "grpo"], "no option found"),
        ("verl", ["verl.trainer.fsdp_sft_trainer", "a=1"], "a command line for sft"),
    ],
)
def test_what_is_no_command_line_is_refused(trainer: str, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_command_line(trainer, words)


@pytest.mark.parametrize("name", MOVES)
def test_every_line_leads_to_a_key_of_the_config(name: str) -> None:
    model = SftConfig if name.endswith("sft") else RunConfig
    keys = [to.key if isinstance(to, To) else to for to in MOVES[name].values()]
    moved = [key.replace("source.", "orchestrator.train.env.0.") for key in keys]
    assert [key for key in moved if not is_key(model, key)] == []
