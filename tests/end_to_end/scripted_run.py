"""`gradus rl` and `gradus sft` with a scripted engine in the place of vLLM; all else is real.

    python scripted_run.py rl @ run.toml [--resume]
    python scripted_run.py sft @ sft.toml [--resume]
    python scripted_run.py turns @ run.toml          an RL run on a machine that seems to have GPUs

In an RL run, what the engine says follows from the prompt, the seed of the request and every byte
of the weights that it serves: runs that differ in one bit anywhere differ in all that follows. In a
supervised run it repeats the prompt and takes its time, so that training is done long before the
evaluations of its versions are.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from gradus.cli.main import main as run_gradus
from gradus.config import RunConfig, SftConfig, load_config
from gradus.launch import job
from gradus.launch.launch import launch
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.processes import LaunchPlan, Machine, plan_config
from gradus.processes.child import watch_death_pipe
from gradus.processes.started import ProcessSpec
from gradus.run.model_files import model_config
from gradus.run.paths import RunDirectory
from gradus.sealed import open_sealed
from gradus.testing.engine import ScriptedEngine, serve
from gradus.testing.engine_script import GenerateCall, GenerateRequest, Placed, Reply
from gradus.weights.published import VersionLabel
from gradus.wire.images import bytes_of, open_image
from gradus_cluster import kubernetes, slurm

MAX_REPLY_TOKENS = 6
LOGPROB = -5.0
"""Nats, about those of an untrained model."""
IMAGE_KEYS = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
TURNS = "turns.txt"
"""In the run directory: what the engine did around the GPU."""
PRETENDED = FoundGpus((Gpu("0", "made up", None), Gpu("1", "made up", None)))
SLOWNESS = "SCRIPTED_LATENCY_SECONDS"
"""Variable with the latency of a reply in an RL run."""
LATENCY_SECONDS = 0.4
"""Of a reply in a supervised run."""


class SeededEngine(ScriptedEngine):
    """Speaks as a sampler would that is exact to the bit."""

    def look(self, model: str) -> None:
        """Know the tokens of a model that reads images."""
        found = model_config(model)
        self.image_token = found.get("image_token_id")
        self.image_tokens = {it for key, it in found.items() if key in IMAGE_KEYS}
        self.sizes: dict[str, int] = {}

    def with_images(self, asked: GenerateRequest) -> Placed:
        """As vLLM does for a tiny Qwen3-VL, which has 28 x 28 pixels in a token."""
        if not asked.content_parts:
            return asked, None
        for part in asked.content_parts:
            if "url" in part:
                sides = open_image(bytes_of(part["url"])).size
                self.sizes[part["uuid"]] = math.prod(max(1, round(side / 28)) for side in sides)
            elif part["uuid"] not in self.sizes:
                raise ValueError(f"no image {part['uuid']} was sent here")
        lengths = [self.sizes[part["uuid"]] for part in asked.content_parts]
        prompt: list[int] = []
        ranges: list[dict[str, int]] = []
        for token in asked.token_ids:
            if token == self.image_token:
                ranges.append({"offset": len(prompt), "length": lengths[len(ranges)]})
            prompt += [token] * (ranges[-1]["length"] if token == self.image_token else 1)
        return msgspec.structs.replace(asked, token_ids=prompt), ranges

    def answer_to(self, call: GenerateCall) -> Reply:
        """Some tokens of the prompt, drawn by seed and weights."""
        # The first token of a chat is a control token.
        control = {call.prompt_token_ids[0], *call.sampling_params["stop_token_ids"]}
        control |= self.image_tokens
        words = [token for token in call.prompt_token_ids if token not in control]
        what = f"{self._weights()}/{call.sampling_params['seed']}/{call.prompt_token_ids}"
        source = random.Random(hashlib.sha256(what.encode()).digest())
        tokens = [source.choice(words) for _ in range(source.randint(1, MAX_REPLY_TOKENS))]
        return Reply(tokens, [LOGPROB - source.random() / 8 for _ in tokens])

    def _weights(self) -> str:
        """The digest of the served tensors, whatever version and term they have."""
        if not self.applied:
            return "initial"
        files = open_sealed(Path(self.applied[-1].directory), VersionLabel).files
        return files["model.safetensors"].sha256


class WrittenList(list[str]):
    """A list whose entries also stand in a file, for a test that waits for another process."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def append(self, entry: str) -> None:
        """Add an entry to both."""
        super().append(entry)
        # A run may be denied its disk on purpose; the real engine writes nothing here.
        with suppress(OSError), self._file.open("a") as file:
            file.write(f"{entry}\n")


def build_engine(command: str, run_dir: Path, term: int, model: str) -> ScriptedEngine:
    """What serves the run of `gradus <command>`."""
    if command == "rl":
        engine = SeededEngine(run_dir=run_dir, term=term, max_length_tokens=256)
        engine.look(model)
        engine.latency_seconds = float(os.environ.get(SLOWNESS, "0"))
        engine.turns = WrittenList(run_dir / TURNS)
        return engine.await_version()
    return ScriptedEngine(
        run_dir=run_dir, term=term, latency_seconds=LATENCY_SECONDS
    ).await_version()


def with_script(
    config: RunConfig | SftConfig,
    machine: Machine,
    run_dir: RunDirectory,
    term: int,
    resume_step: int | None,
) -> LaunchPlan:
    """The real plan with this file in the place of the inference server."""
    is_shared = config.inference.gpu_sharing != "never"
    machine = replace(machine, gpus=PRETENDED) if is_shared else machine
    whole = plan_config(config, machine, run_dir, term, resume_step)
    if config.inference.addresses is not None:
        return whole
    first, *later = whole.stages
    command = "rl" if isinstance(config, RunConfig) else "sft"
    chosen = ("--engine", command, "--run-dir", str(run_dir.root), "--term", str(term))
    chosen += ("--model", config.model.name)

    def scripted(spec: ProcessSpec) -> ProcessSpec:
        if spec.name not in config.inference.processes:
            return spec
        slow = {SLOWNESS: os.environ[SLOWNESS]} if SLOWNESS in os.environ else {}
        argv = (machine.python, __file__, *chosen, "--process", spec.name)
        return replace(spec, argv=argv, env={**spec.env, **slow})

    assert first[0].name in config.inference.processes
    return replace(whole, stages=(tuple(map(scripted, first)), *later))


def serve_engine(words: Sequence[str]) -> None:
    """Be the inference server of a run."""
    watch_death_pipe()
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--term", type=int)
    parser.add_argument("--process")
    parser.add_argument("--model", default="")
    chosen = parser.parse_args(words)

    async def run() -> None:
        engine = build_engine(chosen.engine, chosen.run_dir, chosen.term, chosen.model)
        engine.model = chosen.model
        await serve(engine, process=chosen.process)

    asyncio.run(run())


def main(words: Sequence[str]) -> int:
    """The engine, or the command with its plan changed."""
    if "--engine" in words:
        serve_engine(words)
        return 0
    job.plan_config = with_script
    slurm.PROGRAM = (sys.executable, __file__)
    slowness = f"{SLOWNESS}={os.environ.get(SLOWNESS, '0')}"
    kubernetes.PROGRAM = ("env", slowness, *slurm.PROGRAM)
    if words[0] == "turns":
        # Without the check, which looks at the GPUs of the real machine.
        return launch(job.job_of(load_config(RunConfig, words[1:])))
    return run_gradus(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
