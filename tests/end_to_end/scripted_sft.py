"""`gradus sft` with a slow scripted engine in the place of vLLM; everything else is real.

    python scripted_sft.py sft @ sft.toml [--resume]

The engine repeats the prompt and takes its time, so that training is done long before the
evaluations of its versions are.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from gradus.cli.main import main as run_gradus
from gradus.config.sft import SftConfig
from gradus.death_watch import watch_death_pipe
from gradus.launch import local
from gradus.launch.plan import LaunchPlan, Machine, plan_sft
from gradus.run_dir import RunDirectory
from gradus.testing.engine import ScriptedEngine, serve

LATENCY_SECONDS = 0.4


def plan_scripted(
    config: SftConfig,
    run_dir: RunDirectory,
    epoch: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """The real plan with this file in the place of the inference server."""
    plan = plan_sft(config, run_dir, epoch, machine, resume_step=resume_step)
    (engine, *environments), *later = plan.stages
    assert engine.name == "inference"
    argv = (machine.python, __file__, "--engine", str(run_dir.root), "--epoch", str(epoch))
    return replace(plan, stages=((replace(engine, argv=argv), *environments), *later))


def serve_scripted(run_dir: Path, epoch: int) -> None:
    watch_death_pipe()

    async def run() -> None:
        await serve(ScriptedEngine(run_dir=run_dir, epoch=epoch, latency_seconds=LATENCY_SECONDS))

    asyncio.run(run())


def main() -> int:
    if "--engine" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--engine", type=Path)
        parser.add_argument("--epoch", type=int)
        chosen = parser.parse_args()
        serve_scripted(chosen.engine, chosen.epoch)
        return 0
    local.plan_sft = plan_scripted
    return run_gradus(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
