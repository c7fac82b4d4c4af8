"""`gradus rl` with a scripted engine in the place of vLLM; everything else is real.

    python scripted_rl.py rl @ run.toml [--resume]

What the engine says follows from the prompt, the seed of the request and every byte of the weights
that it serves: runs that differ in one bit anywhere differ in all that follows.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
from dataclasses import replace
from pathlib import Path

from gradus.cli.main import main as run_gradus
from gradus.config.run import RunConfig
from gradus.death_watch import watch_death_pipe
from gradus.launch import local
from gradus.launch.plan import LaunchPlan, Machine, plan_rl
from gradus.run_dir import RunDirectory
from gradus.testing.engine import ScriptedEngine, serve
from gradus.testing.engine_script import GenerateCall, Reply
from gradus.weights.manifest import read_manifest

MAX_REPLY_TOKENS = 6
LOGPROB = -5.0
"""Nats, about those of an untrained model."""


class SeededEngine(ScriptedEngine):
    """Speaks as a sampler would that is exact to the bit."""

    def answer_to(self, call: GenerateCall) -> Reply:
        """Some tokens of the prompt, drawn by seed and weights."""
        # The first token of a chat is a control token.
        control = {call.prompt_token_ids[0], *call.sampling_params["stop_token_ids"]}
        words = [token for token in call.prompt_token_ids if token not in control]
        what = f"{self._weights()}/{call.sampling_params['seed']}/{call.prompt_token_ids}"
        source = random.Random(hashlib.sha256(what.encode()).digest())
        tokens = [source.choice(words) for _ in range(source.randint(1, MAX_REPLY_TOKENS))]
        return Reply(tokens, [LOGPROB - source.random() / 8 for _ in tokens])

    def _weights(self) -> str:
        """The digest of the served tensors, whatever version and epoch they have."""
        if not self.applied:
            return "initial"
        files = read_manifest(Path(self.applied[-1].directory)).files
        return files["model.safetensors"].sha256


def plan_scripted(
    config: RunConfig,
    run_dir: RunDirectory,
    epoch: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """The real plan with this file in the place of the inference server."""
    plan = plan_rl(config, run_dir, epoch, machine, resume_step=resume_step)
    (engine, *environments), *later = plan.stages
    assert engine.name == "inference"
    argv = (machine.python, __file__, "--engine", str(run_dir.root), "--epoch", str(epoch))
    return replace(plan, stages=((replace(engine, argv=argv), *environments), *later))


def serve_scripted(run_dir: Path, epoch: int) -> None:
    watch_death_pipe()

    async def run() -> None:
        await serve(SeededEngine(run_dir=run_dir, epoch=epoch, max_length_tokens=256))

    asyncio.run(run())


def main() -> int:
    if "--engine" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--engine", type=Path)
        parser.add_argument("--epoch", type=int)
        chosen = parser.parse_args()
        serve_scripted(chosen.engine, chosen.epoch)
        return 0
    local.plan_rl = plan_scripted
    return run_gradus(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
