"""The processes of a run: the config that each loads, and the function that it runs then."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gradus.config import StrictConfig

Config = TypeVar("Config", bound="StrictConfig")


@dataclass(frozen=True)
class Role:
    """One kind of process."""

    config: str
    """Its config, a name of `gradus.config`."""
    entry: str
    """`module:function` that runs it to its end; imports the heavy parts."""
    process: str
    """Its name in logs; empty where its config names it."""
    summary: str
    """One line for the list of commands."""


_RUN, _SFT = "RunProcessConfig", "SftProcessConfig"
ROLES = {
    "inference": Role(
        "InferenceProcessConfig", "gradus.inference.server:run", "", "serve the policy"
    ),
    "env-server": Role(
        "EnvironmentProcessConfig",
        "gradus.environments.process:serve",
        "",
        "serve one environment",
    ),
    "trainer": Role(
        _RUN, "gradus.trainer.entry.rl:run", "trainer", "train on the batches of a run"
    ),
    "sft-trainer": Role(
        _SFT, "gradus.trainer.entry.sft:run", "trainer", "train on the conversations of a run"
    ),
    "bench-rank": Role(
        _RUN, "gradus.trainer.entry.bench:run", "trainer", "train on made-up samples"
    ),
    "orchestrator": Role(
        _RUN, "gradus.orchestrator.build:run", "orchestrator", "play episodes and make batches"
    ),
    "replayer": Role(
        _RUN,
        "gradus_lab.replay.replayer:run",
        "replayer",
        "send recorded batches to the trainer again",
    ),
    "tracker": Role(
        "TrackerProcessConfig",
        "gradus.tracking.follow.process:run",
        "tracker",
        "send the numbers of a run to its trackers",
    ),
    "evaluator": Role(
        "EvalProcessConfig",
        "gradus.orchestrator.evaluation.process:run",
        "evaluator",
        "play the episodes of an evaluation",
    ),
    "sft-evaluator": Role(
        _SFT,
        "gradus.orchestrator.evaluation.process:run",
        "evaluator",
        "evaluate versions while they are made",
    ),
}
"""What the launcher starts, with a config that it wrote."""


def _written(model: type[Config], words: Sequence[str]) -> Config:
    """The config that the launcher wrote for a process, `@ FILE`, with the step to continue at."""
    from pydantic import ValidationError

    from gradus.cli.options import take_value
    from gradus.errors import ConfigError

    step, rest = take_value(words, "--resume-step", wants="a step")
    if len(rest) != 2 or rest[0] != "@":
        raise ConfigError("a process of a run takes '@ FILE', which its launcher wrote")
    try:
        config = model.model_validate_json(Path(rest[1]).read_bytes())
    except OSError as error:
        raise ConfigError(f"{rest[1]}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        found = [(".".join(map(str, it["loc"])), it["msg"]) for it in error.errors()]
        lines = [f"{rest[1]}: {key}: {reason}" for key, reason in found]
        raise ConfigError("\n".join(lines)) from None
    return config if step is None else config.model_copy(update={"resume_step": int(step)})


def run_role(name: str, words: Sequence[str]) -> int:
    """Run one process of a run until it ends by itself or its launcher is gone."""
    from gradus import config as configs
    from gradus.cli.options import print_help, wants_help

    role = ROLES[name]
    model = getattr(configs, role.config)
    if wants_help(words):
        print_help(name, "A process of a run, started by the launcher.", model)
        return 0

    from gradus.companions import show_torchvision
    from gradus.environments.verifiers.deferred import defer_imports
    from gradus.heartbeat import Heartbeat
    from gradus.log import configure_logging, end_quietly
    from gradus.processes.child import (
        leave_no_core,
        open_many_files,
        show_stacks,
        uncollected,
        watch_death_pipe,
    )
    from gradus.run.model_files import reads_images
    from gradus.run.paths import RunDirectory
    from gradus.run.ready import write_done

    show_stacks()
    # For what it starts: the engine, workers of environments, ranks.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    end_quietly()
    watch_death_pipe()
    leave_no_core()
    open_many_files()
    # The interpreter's last collection walks every imported module: a second or more per process.
    atexit.register(gc.freeze)
    config = _written(model, words)
    process = role.process or config.process
    rank = os.environ.get("RANK")
    configure_logging(process if rank is None else f"{process}/{rank}")
    module, _, function = role.entry.partition(":")
    if module.startswith("gradus.trainer.") and reads_images(config.model.name):
        # Before anything imports transformers.
        show_torchvision()
    # Before anything imports verifiers.
    defer_imports()
    with uncollected():
        run = getattr(importlib.import_module(module), function)
    run_dir = RunDirectory(Path(config.run_dir))
    heartbeat = Heartbeat(run_dir.alive.absolute() / f"{process}.json")
    if rank not in (None, "0"):
        heartbeat = heartbeat.strand(f"rank_{rank}")
    with heartbeat.beating():
        run(config)
    write_done(run_dir, process)
    return 0
