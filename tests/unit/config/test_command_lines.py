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
    "actor_rollout_ref.rollout.n=5 'trainer.logger=[console,wandb]' trainer.save_freq=-1 "
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
        "optimizer": {"lr": 1e-6, "schedule": "constant"},
        "loss": {"type": "ppo_clip", "clip_low": 0.2, "reference_kl_coefficient": 0.04},
        "compute_dtype": "bfloat16",
        "lora": {"rank": 16},
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
    assert [it.type for it in config.monitor] == ["wandb"]
    assert config.orchestrator.train.sampling.max_completion_tokens == 1024
    assert [note.partition(" =")[0] for note in found.left_out] == ["trainer.test_freq", "foo.bar"]


def test_a_command_line_for_sft_is_one() -> None:
    words = "trl sft --model_name_or_path x/y --dataset_name rows.jsonl --max_seq_length 512"
    found = from_command_line("trl", [*words.split(), "--per_device_train_batch_size", "4"])
    assert found.command == "sft"
    assert SftConfig.model_validate(found.values).batch_conversations == 4


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
