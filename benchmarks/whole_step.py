"""A whole step of reinforcement learning, gradus against TRL's GRPO, in one run.

    python benchmarks/whole_step.py --output benchmarks/results/whole_step.json

Same model, texts, batch and learning rate; each side plays, rewards and trains in its own way:
gradus as `gradus rl` starts it, TRL 1.16 with its own generation, in one process with a thread per
core, in float32, with bf16 autocast, and with its weights in bfloat16, of which the fastest counts.

    chat     the demo's warmed-up model of 1.6M parameters, 256 episodes of about 16 tokens
    smollm2  SmolLM2-135M, 64 episodes of exactly 64 tokens (both sides forbid an earlier end)
    tools    a model of 1.6M parameters that learned to ask a tool: 32 episodes of four tool calls
             and a reply; TRL's own tool loop against gradus's harness and tool server. Look at
             `model_calls`: where TRL made one call an episode, its loop saw no tool call in the
             model's text, and the two sides cannot be compared

A step is from one end of a step to the next; the first ones, and gradus's last, beside which
nothing is played any more, do not count. Core-seconds are CPU time by role. `others` is what the
rest of the machine used meanwhile: seconds mean little where it is not near 0. `--before` measures
another tree's interpreter in turn with this one's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradus.processes.table import descendants, living_processes
from gradus_reverse_text.words import generate_texts

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TRL_DTYPES = ("float32", "bfloat16", "bfloat16 weights")
TRL_PACKAGES = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.17.0")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
ROLES = {
    "inference": "inference",
    "env-server": "environment",
    "trainer": "trainer",
    "orchestrator": "orchestrator",
}
POLL_SECONDS = 0.02
TOOL_DEMONSTRATIONS = 1200
LAST_STEPS = 2
"""Steps of gradus at the end that do not count."""


@dataclass(frozen=True)
class Case:
    """What both sides do."""

    name: str
    groups: int
    group_size: int
    turn_tokens: int
    """Most tokens of one reply."""
    max_length: int
    learning_rate: float
    source: dict[str, Any]
    """gradus's environment."""
    micro_batch_rows: tuple[int, ...]
    """TRL's; the fastest counts."""
    renderer: str = "auto"
    is_exact: bool = False
    """Whether every reply has exactly `turn_tokens`."""
    has_tool: bool = False
    kv_cache_gib: float = 1.0

    @property
    def episodes(self) -> int:
        return self.groups * self.group_size


REVERSE_TEXT = {
    "id": "gradus-reverse-text",
    "taskset": {"min_words": 2, "max_words": 3, "seed": 100},
}
CASES = {
    case.name: case
    for case in (
        Case("chat", 16, 16, 32, 128, 5e-4, REVERSE_TEXT, (256,), renderer="qwen3"),
        Case("smollm2", 16, 4, 64, 256, 1e-6, REVERSE_TEXT, (16,), is_exact=True),
        Case(
            *("tools", 8, 4, 64, 2048, 1e-6, {"id": "whole-step-tools"}, (16,)),
            renderer="qwen3",
            has_tool=True,
        ),
    )
}


def rows_of(case: Case) -> list[dict[str, str]]:
    """The prompts that TRL draws from; gradus's environment has the same."""
    if case.has_tool:
        return [{"text": f"{chr(97 + n)}4", "answer": ""} for n in range(26)]
    texts = generate_texts(1000, seed=100, min_words=2, max_words=3)
    return [{"text": text, "answer": text[::-1]} for text in texts]


def gradus_config(case: Case, model: Path, folder: Path, dtype: str, steps: int) -> dict[str, Any]:
    """As a user would write it; the precision is left out for gradus's own choice."""
    sampling: dict[str, Any] = {"temperature": 1.0, "max_completion_tokens": case.turn_tokens}
    if case.is_exact:
        sampling["extra_body"] = {"min_tokens": case.turn_tokens}
    source = case.source | {
        "group_size": case.group_size,
    }
    config: dict[str, Any] = {
        "name": "rl",
        "output_dir": str(folder),
        "max_steps": steps,
        "model": {
            "name": str(model),
            "renderer": case.renderer,
            "max_length_tokens": case.max_length,
        },
        "orchestrator": {
            "groups_per_batch": case.groups,
            "max_in_flight_episodes": case.episodes,
            "train": {"sampling": sampling, "env": [source]},
        },
        "trainer": {"optimizer": {"lr": case.learning_rate}},
        "inference": {"max_num_seqs": case.episodes, "kv_cache_gib": case.kv_cache_gib},
    }
    if dtype != "default":
        config["trainer"]["compute_dtype"] = dtype
        config["inference"]["dtype"] = dtype
    return config


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of the children that it waited for; 0 once it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in stat[11:15]) / TICKS_PER_SECOND


def role_of(pid: int) -> str | None:
    """Which role's process this is."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    if "gradus.cli.main" not in words:
        return None
    return ROLES.get(words[words.index("gradus.cli.main") + 1])


def busy_seconds() -> float:
    """CPU time that the whole machine has used."""
    user, nice, system, _idle, _wait, irq, soft = (
        int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
    )
    return (user + nice + system + irq + soft) / TICKS_PER_SECOND


@dataclass
class RunningGradus:
    """What `gradus rl` and all below it have used when each step ended."""

    launcher: int
    metrics: Path
    at_step: dict[int, dict[str, float]] = field(default_factory=dict)

    def look(self) -> None:
        """Note the steps that ended since the last look."""
        if not self.metrics.exists():
            return
        ended = [
            record
            for line in self.metrics.read_text().splitlines()
            if line.endswith("}") and "time/step_seconds" in (record := json.loads(line))
        ]
        for record in ended[len(self.at_step) :]:
            self.at_step[record["step"]] = self.used() | {"ended": record["time"]}

    def used(self) -> dict[str, float]:
        """Core-seconds until now, by role."""
        processes = living_processes()
        below = descendants(self.launcher, processes)
        used = {"all": 0.0, "launcher": cpu_seconds(self.launcher), "machine": busy_seconds()}
        for entry in below:
            if role := role_of(entry.pid) if entry.parent == self.launcher else None:
                own = [entry, *descendants(entry.pid, processes)]
                used[role] = used.get(role, 0.0) + sum(cpu_seconds(e.pid) for e in own)
        used["all"] = sum(value for name, value in used.items() if name not in ("all", "machine"))
        return used


def gradus_side(python: str, config: dict[str, Any], folder: Path, warm_up: int) -> dict[str, Any]:
    """One run; its processes and files are gone afterwards."""
    path = folder / "rl.json"
    path.write_text(json.dumps(config))
    variables = os.environ | {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    with (folder / "rl.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "gradus.cli.main", "rl", "@", str(path), "--clean"],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=variables,
        )
    running = RunningGradus(process.pid, folder / "rl" / "metrics.jsonl")
    try:
        while process.poll() is None:
            running.look()
            time.sleep(POLL_SECONDS)
    finally:
        process.terminate()
        process.wait()
    if process.returncode != 0:
        raise SystemExit(f"gradus failed:\n{(folder / 'rl.log').read_text()[-3000:]}")
    return summarise_gradus(running, config["max_steps"], warm_up)


def summarise_gradus(running: RunningGradus, num_steps: int, warm_up: int) -> dict[str, Any]:
    """Medians and means of the steps between the first and the last ones."""
    records = [json.loads(line) for line in running.metrics.read_text().splitlines()]
    last: dict[str, Any] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if value is not None}
    steps = range(warm_up - 1, num_steps - LAST_STEPS)
    ended = [running.at_step[step]["ended"] for step in steps]
    first, final, count = running.at_step[steps[0]], running.at_step[steps[-1]], len(steps) - 1
    spent = {name: (final[name] - first[name]) / count for name in first if name in final}
    machine = spent.pop("machine")
    elapsed = spent.pop("ended")
    return {
        "seconds": [b - a for a, b in itertools.pairwise(ended)],
        "core_seconds": {name: round(value, 3) for name, value in spent.items()},
        "others": round((machine - spent["all"]) / elapsed, 2),
        "sampled_tokens": last.get("episode/length_tokens/mean"),
        "model_calls": last.get("episode/turns/mean"),
        "rewards": [
            round(r["episode/reward/mean"], 3) for r in records if r.get("episode/reward/mean")
        ],
        "reported_seconds": {
            key.removeprefix("time/"): round(
                statistics.median(r[key] for r in records if r.get(key) and r["step"] in steps), 3
            )
            for key in last
            if key.startswith("time/") and any(r.get(key) and r["step"] in steps for r in records)
        },
    }


def trl_side(python: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One process; its last line is the result."""
    path = folder / "case.json"
    path.write_text(json.dumps(case))
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    begun, busy = time.monotonic(), busy_seconds()
    done = subprocess.run(
        [python, str(HERE / "trl_whole_step.py"), str(path)],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    own = result.pop("whole_core_seconds")
    elapsed = time.monotonic() - begun
    return result | {"others": round((busy_seconds() - busy - own) / elapsed, 2)}


def trl_case(case: Case, model: Path, folder: Path, steps: int, warm_up: int) -> dict[str, Any]:
    """All that TRL's side needs, but precision and micro batch."""
    return {
        "model": str(model),
        "folder": str(folder / "trl"),
        "rows": rows_of(case),
        "episodes": case.episodes,
        "group_size": case.group_size,
        "turn_tokens": case.turn_tokens,
        "episode_tokens": 1024 if case.has_tool else case.turn_tokens,
        "is_exact": case.is_exact,
        "has_tool": case.has_tool,
        "learning_rate": case.learning_rate,
        "steps": steps,
        "warm_up": warm_up,
    }


def prepare_model(case: Case, models: Path) -> Path:
    """The model of a case, made where it is not there yet: a minute or two."""
    folder = models / case.name
    if case.name == "smollm2":
        if not folder.exists():
            call([sys.executable, str(EXAMPLES / "smollm2" / "prepare.py"), str(folder)])
        return folder
    model = folder / "warm-up" / "model"
    if model.exists():
        return model
    start = folder / "start"
    call([sys.executable, str(EXAMPLES / "reverse_text" / "prepare.py"), str(start)])
    flags = ["--output_dir", str(folder), "--model.name", str(start / "model")]
    flags += ["--data.path", str(start / "conversations.jsonl")]
    if case.has_tool:
        from whole_step_tools import demonstrations

        lines = [json.dumps(row) + "\n" for row in demonstrations(TOOL_DEMONSTRATIONS, seed=0)]
        (start / "conversations.jsonl").write_text("".join(lines))
        flags += ["--model.max_length_tokens", "2048", "--batch_conversations", "8"]
        flags += ["--max_steps", "150", "--model.renderer", "qwen3"]
    config = str(EXAMPLES / "reverse_text" / "sft.toml")
    call([sys.executable, "-m", "gradus.cli.main", "sft", "@", config, *flags])
    return model


def call(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def install_trl(folder: Path) -> str:
    """A virtual environment with TRL; takes about a minute."""
    call([sys.executable, "-m", "venv", str(folder)])
    call([str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", *TRL_PACKAGES])
    return str(folder / "bin" / "python")


def measure(case: Case, options: argparse.Namespace, python: str, folder: Path) -> dict[str, Any]:
    """Rounds of every side in turn; the report of one case."""
    model = prepare_model(case, (options.models or folder / "models").absolute())
    sides: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for dtype in options.dtype:
            trees = {"gradus": sys.executable} | (
                {"before": options.before} if options.before else {}
            )
            for tree, interpreter in trees.items():
                steps = options.warm_up + options.steps + LAST_STEPS
                # A folder of its own: the metrics of another run would be taken for its.
                place = Path(tempfile.mkdtemp(dir=folder))
                config = gradus_config(case, model, place, dtype, steps)
                result = gradus_side(interpreter, config, place, options.warm_up)
                note(sides, f"{tree} {dtype}", result)
        for dtype in options.trl_dtype:
            for size in case.micro_batch_rows:
                given = trl_case(case, model, folder, options.trl_steps or options.steps, 1)
                given |= {"trl_dtype": dtype, "micro_batch_rows": size}
                result = trl_side(python, given, folder)
                note(sides, f"trl {dtype}, {size} rows", result)
    return report(case, sides)


def note(sides: dict[str, list[dict[str, Any]]], name: str, result: dict[str, Any]) -> None:
    """Keep a result, and show it: a whole case takes minutes."""
    sides.setdefault(name, []).append(result)
    print(name, json.dumps(result), file=sys.stderr, flush=True)


def report(case: Case, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Each side's median step, and every side of gradus against the fastest of TRL."""
    medians = {
        name: statistics.median(s for result in results for s in result["seconds"])
        for name, results in sides.items()
    }
    trl = min((value for name, value in medians.items() if name.startswith("trl")), default=None)
    return {
        "case": case.name,
        "episodes": case.episodes,
        "sides": {
            name: {"step_seconds": round(medians[name], 3)}
            | {key: value for key, value in results[-1].items() if key != "seconds"}
            | {"all_seconds": [round(s, 2) for result in results for s in result["seconds"]]}
            for name, results in sides.items()
        },
        "step_of_trl": {
            name: round(value / trl, 2)
            for name, value in medians.items()
            if trl and not name.startswith("trl")
        },
    }


def machine() -> dict[str, Any]:
    """Processor, cores and what it can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    flags = set(found.get("flags", "").split())
    return {
        "processor": found.get("model name"),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", nargs="*", default=["default", "float32", "bfloat16"])
    parser.add_argument("--trl-dtype", nargs="*", choices=TRL_DTYPES, default=TRL_DTYPES)
    parser.add_argument("--trl-python", help="interpreter that has TRL; none: install it")
    parser.add_argument("--before", help="interpreter of another tree of gradus")
    parser.add_argument("--models", type=Path, help="folder that keeps the models for next time")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl-steps", type=int, help="none: as many as gradus")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON; other cases that it holds are kept")
    return parser.parse_args()


def main() -> None:
    """Measure, print and store each case."""
    options = parse()
    # So that whoever ends this program early also ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        needs_trl = bool(options.trl_dtype)
        python = options.trl_python or (install_trl(folder / "venv") if needs_trl else "")
        for case in options.cases:
            found = measure(CASES[case], options, python, folder)
            print(json.dumps(found, indent=1), flush=True)
            if options.output:
                store(options.output, found)


def store(path: Path, found: dict[str, Any]) -> None:
    """Put one case into the report, in the place of an earlier one like it."""
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = [case for case in known if case["case"] != found["case"]]
    order = list(CASES)
    cases = sorted([*cases, found], key=lambda case: order.index(case["case"]))
    path.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
