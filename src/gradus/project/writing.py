"""What `gradus init` writes: the demo, or a project over rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from gradus.errors import ConfigError
from gradus.plan.gpus import FoundGpus
from gradus.project.choices import Setting, choose, toml
from gradus.project.folder import ProjectNames, fill
from gradus.project.kinds import Wish
from gradus.project.measured import measure, project_model, tiny_settings
from gradus.project.reward import try_reward, write_reward
from gradus.project.rows import split

_ENOUGH = 16
"""Rows that measure something."""
_DOES = {
    "eval": "measures the model on tasks that do not train",
    "sft": "trains the model on the answers",
    "rl": "trains the model by the reward",
}
Tables = list[tuple[str, list[Setting]]]


def write_demo(stage: Path, names: ProjectNames) -> list[str]:
    """The task set of words, its test, a tiny model and two configs; returns what to tell."""
    files = {"project/demo.py": "{module}.py", "project/demo_test.py": "test_{module}.py"}
    fill(stage, files, names.values)
    project_model(stage / "model", None)
    model = [*tiny_settings(), Setting("max_length_tokens", 64)]
    reply = Setting("max_completion_tokens", 16)
    source = Setting("id", names.task_id, f"The task set in {names.module}.py.")
    others = {"seed": 1, "num_tasks": 64}
    rl: Tables = [
        (
            "",
            [Setting("name", names.name), Setting("output_dir", "runs"), Setting("max_steps", 70)],
        ),
        ("[model]", model),
        ("[orchestrator]", [Setting("groups_per_batch", 16)]),
        ("[orchestrator.train.sampling]", [reply]),
        ("[[orchestrator.train.env]]", [source, Setting("group_size", 16)]),
        ("[trainer.optimizer]", [Setting("lr", 2e-3)]),
        ("[inference]", [Setting("max_num_seqs", 256), Setting("kv_cache_gib", 1.0)]),
    ]
    evaluation: Tables = [
        ("", [Setting("name", f"{names.name}-eval"), Setting("output_dir", "runs")]),
        ("[model]", model),
        ("[sampling]", [reply]),
        ("[[env]]", [source, Setting("group_size", 4), Setting("taskset", others)]),
        ("[inference]", [Setting("kv_cache_gib", 0.5)]),
    ]
    _write(stage, {"rl": rl, "eval": evaluation})
    return ["a tiny untrained model learns to say words: vowels and consonants by turns, then stop"]


def write_project(stage: Path, names: ProjectNames, wish: Wish, gpus: FoundGpus) -> list[str]:
    """Rows, reward, test and a config for each stage; returns what to tell."""
    train, held_out = split(wish.rows)
    for name, side in {"train.jsonl": train, "held_out.jsonl": held_out}.items():
        (stage / name).write_text("".join(row.line for row in side), encoding="utf-8")
    kind = wish.kind
    reward = write_reward(stage, wish.reward, wish.rows)
    function = reward.path.rpartition(":")[2]
    own = {"reward_module": reward.module, "function": function, "turns": str(kind.turns)}
    values = {**names.values, **own}
    fill(stage, {"project/rewards_test.py": "test_rewards.py"}, values)
    fill(stage, {f"project/{name}": file for name, file in kind.files.items()}, values)
    paid = try_reward(stage, reward, kind.offered, wish.rows)
    model, keys, told = project_model(stage / "model", wish.model)
    lengths = measure(model, wish.rows, [dict(tool) for tool in kind.tools] or None)
    if kind.tools and lengths.renderer == "default":
        raise ConfigError(
            f"--tools: no renderer reads the tool calls of {wish.model}; take a model of a known "
            "family, or begin without tools"
        )
    chosen = choose(lengths, len(train), kind.turns, gpus)
    source = [Setting("id", Template(kind.environment).substitute(values))]
    at_once = _at_once(chosen) if kind.starts_programs else []
    taskset = {**kind.keys, "reward": reward.path}
    configs = _Configs(names.name, keys, chosen, source, taskset, at_once)
    stages = {"eval": configs.eval(), "rl": configs.rl(min(64, len(held_out)), len(gpus.gpus) == 1)}
    has_answers = train[0].answer is not None
    if has_answers and not kind.no_sft:
        stages["sft"] = configs.sft()
    _write(stage, stages)
    shown = ["max_length_tokens", "max_completion_tokens", "micro_batch_tokens", "rank", "lr"]
    shown += ["sft_lr"] if "sft" in stages else []
    left = len(wish.rows) - len(train) - len(held_out)
    repeats = f", {left} left out for repeating one held out" if left else ""
    lines = [
        f"{len(train)} rows to train on, {len(held_out)} held out{repeats}",
        *_few(len(held_out), len(wish.rows), left),
        f"tasks: {kind.tells}",
        told,
        *paid,
        *(f"{it.key} = {it.value:g}: {it.reason}" for key in shown if (it := chosen.get(key))),
        f"dtype = auto: {chosen['dtype'].reason}",
    ]
    if at_once:
        lines += [f"{it.key} = {it.value}: {it.reason}" for it in at_once]
        lines += ["an agent's own words and tools come on top: raise max_length_tokens by as much"]
    return [*lines, f"no sft.toml: {kind.no_sft}"] if has_answers and kind.no_sft else lines


def _few(held_out: int, rows: int, left: int) -> list[str]:
    """What so few rows to measure with mean, and why there are not more."""
    if held_out >= _ENOUGH:
        return []
    why = f", as many of the {rows} rows ask the same" if left else ""
    reach = f"{1 / math.sqrt(held_out):.1f}"
    return [
        f"few held out{why}: an evaluation of {held_out} tasks is sure to about ± {reach}; more "
        "rows with different prompts measure better"
    ]


def _at_once(chosen: Mapping[str, Setting]) -> list[Setting]:
    """As many programs as the cores bear; a group must fit."""
    cores = len(os.sched_getaffinity(0))
    number = max(int(chosen["group_size"].value), 2 * cores)
    reason = f"each episode is a process of the agent: 2 for each of {cores} cores, or one group"
    return [Setting("max_in_flight_episodes", number, reason)]


@dataclass(frozen=True)
class _Configs:
    """The files of a project over rows, by stage."""

    name: str
    model: list[Setting]
    chosen: Mapping[str, Setting]
    source: list[Setting]
    taskset: Mapping[str, Any]
    at_once: list[Setting]
    """How many episodes may run at once, where it matters."""

    def eval(self) -> Tables:
        tables = self._top("-eval", self.at_once)
        tables += [("[sampling]", [self.chosen["max_completion_tokens"]])]
        return [*tables, ("[[env]]", [*self._source("held_out"), Setting("group_size", 4)])]

    def sft(self) -> Tables:
        chosen = self.chosen
        keys = ("batch_conversations", "max_steps", "micro_batch_tokens")
        steps = int(chosen["max_steps"].value)
        often = Setting("interval_steps", max(1, steps // 10))
        patience = Setting("patience", 3, "validations without a lower loss end the run")
        rate = [
            chosen["sft_lr"],
            Setting("warmup_steps", max(1, steps // 20), "the first steps are the wildest"),
            Setting("schedule", "cosine"),
        ]
        return [
            *self._top("-sft", [chosen[key] for key in keys]),
            ("[data]", [Setting("path", "train.jsonl")]),
            ("[validation]", [Setting("path", "held_out.jsonl"), often, patience]),
            ("[optimizer]", rate),
            *self._adapters("[lora]"),
        ]

    def rl(self, num_evaluated: int, shares_gpu: bool) -> Tables:
        chosen, number = self.chosen, Setting("num_tasks", num_evaluated)
        often = Setting("interval_steps", 10, "How often the rows that do not train are played.")
        shared = [Setting("gpu_sharing", "turns"), Setting("gpu_memory_utilization", 0.5)]
        memory, dtype = chosen["micro_batch_tokens"], chosen["dtype"].reason
        reason = f"{memory.reason}\nThe dtype is auto: {dtype}."
        return [
            *self._top("", [Setting("max_steps", 60)]),
            ("[orchestrator]", [chosen["groups_per_batch"], *self.at_once]),
            ("[orchestrator.train.sampling]", [chosen["max_completion_tokens"]]),
            ("[[orchestrator.train.env]]", [*self._source("train"), chosen["group_size"]]),
            ("[orchestrator.eval]", [often, *self.at_once]),
            ("[[orchestrator.eval.env]]", [*self._source("held_out"), number]),
            ("[trainer]", [Setting(memory.key, memory.value, reason)]),
            ("[trainer.optimizer]", [chosen["lr"]]),
            *self._adapters("[trainer.lora]"),
            *([("[inference]", shared)] if shares_gpu else []),
        ]

    def _top(self, suffix: str, settings: list[Setting]) -> Tables:
        top = [Setting("name", f"{self.name}{suffix}"), Setting("output_dir", "runs"), *settings]
        return [("", top), ("[model]", [*self.model, self.chosen["max_length_tokens"]])]

    def _source(self, side: str) -> list[Setting]:
        return [*self.source, Setting("taskset", {"path": f"{side}.jsonl", **self.taskset})]

    def _adapters(self, header: str) -> Tables:
        return [(header, [self.chosen["rank"]])] if "rank" in self.chosen else []


def _write(stage: Path, configs: Mapping[str, Sequence[tuple[str, list[Setting]]]]) -> None:
    for command, tables in configs.items():
        head = (
            f"gradus {command} @ {command}.toml      {_DOES[command]}\n"
            f"gradus check @ {command}.toml   says whether this works here, and what it would run\n"
            f"gradus {command} --help         lists the keys; each may follow the command: --name b"
        )
        text = toml(tables, head=head)
        (stage / f"{command}.toml").write_text(text, encoding="utf-8")
