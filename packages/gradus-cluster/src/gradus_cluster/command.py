"""`gradus node`, `gradus render kubernetes`, and what `--slurm` does."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gradus.cli.options import print_help, take_options, take_value, wants_help, whole_number
from gradus.cli.runs import CLEAN, DRY_RUN, RESUME
from gradus.config import LaunchedConfig, RunConfig, load_config, run_name
from gradus.errors import ConfigError, ExitCode
from gradus.run.lease import choose_opener
from gradus.run.paths import RunDirectory
from gradus_cluster.kubernetes import Manifest, pod_problems, restarts_jobs
from gradus_cluster.side import NodeSide, serve_again
from gradus_cluster.slurm import SlurmJob, has_sbatch, submit, test

_STAY, _STDIN = "--stay", "--while-stdin"
_NODE_USAGE = f"gradus node RUN_DIRECTORY [--number N] [--host ADDRESS] [{_STAY}] [{_STDIN}]"
_NODE_HELP = f"""usage: {_NODE_USAGE}

Owns the processes of one more node of a run on several nodes, for the launcher on the first. A
scheduler starts it, or you do: once on each other node, before or after `gradus rl`, which waits.
It ends with the run. When the launcher does not answer for launch.nodes.away_seconds, it ends its
processes and itself. Every node must see the run's folder, at the same path.

  --number N            which node of the run this is, from 1; else the first that is free
  --host ADDRESS        of this node, for others to reach; else that of the way to the launcher
  {_STAY}                wait for the next launcher of the run where this one is lost, or has this
                        number already, instead of ending
  {_STDIN}         end also at the end of the standard input: when who started it is gone
"""


def node(words: Sequence[str]) -> int:
    """`gradus node`: serve the launcher of a run until it lets this node go."""
    if wants_help(words):
        print(_NODE_HELP, end="")
        return ExitCode.DONE
    options, rest = take_options(words, {_STAY: "", _STDIN: ""})
    given, rest = take_value(rest, "--number", wants="a number")
    host, rest = take_value(rest, "--host", wants="an address")
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(f"name the folder of one run: {_NODE_USAGE}")
    run_dir = RunDirectory(Path(rest[0]).resolve())
    tell, number = partial(print, flush=True), whole_number("--number", given)
    build_side = partial(NodeSide, run_dir, number=number, host=host, tell=tell)
    if _STDIN in options:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    return serve_again(build_side, tell) if _STAY in options else build_side().run()


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def submit_run(config: LaunchedConfig, options: set[str], words: tuple[str, ...]) -> int:
    """Put a run into the queue of SLURM, or print what would be put there."""
    name = run_name(config, secrets.token_hex(4))
    job = SlurmJob(config, name, words, Path.cwd())
    if DRY_RUN not in options:
        print("\n".join(submit(job, resume=RESUME in options, clean=CLEAN in options)))
        return ExitCode.DONE
    choose_opener(resume=RESUME in options, clean=CLEAN in options, dry_run=True)
    script = job.script()
    if has_sbatch():
        test(script)
    print(script, end="")
    return ExitCode.DONE


JOBSET_VERSION = "--jobset-version"
RENDER = "render kubernetes"
_RENDER_OPTIONS = {f"{JOBSET_VERSION} V": "of the cluster; from 0.12 on node sides restart alone"}


def render(words: Sequence[str]) -> int:
    """`gradus render kubernetes`: print the objects that run a config on Kubernetes."""
    if wants_help(words):
        summary = "Prints what `kubectl apply` needs to run a config on Kubernetes with JobSet."
        print_help(RENDER, summary, RunConfig, _RENDER_OPTIONS, words=words)
        return ExitCode.DONE
    if words[:1] != ["kubernetes"]:
        raise ConfigError(f"write gradus {RENDER} @ FILE.toml; there is nothing else to render for")
    version, rest = take_value(words[1:], JOBSET_VERSION, wants="a version")
    if not rest:
        raise ConfigError(f"a config is missing; write gradus {RENDER} @ FILE.toml")
    knows_jobs = restarts_jobs(version)
    config = load_config(RunConfig, rest, check=pod_problems)
    print(Manifest(config, restarts_jobs=knows_jobs).text(), end="")
    return ExitCode.DONE
