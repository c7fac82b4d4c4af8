"""`--slurm`: one batch script that runs a whole run on its nodes, and its submission.

The job starts the launcher on its first node, in the batch step, and a node side on each other one,
in a step of its own. The submission makes the run's folder, so every start of the job, also the
first, is a `--resume`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradus
from gradus.config import EvalConfig, LaunchedConfig, SftConfig
from gradus.errors import ConfigError, DeadlineError, first_line
from gradus.files import read_json, write_atomically, write_json
from gradus.plan.nodes import required_nodes
from gradus.run.lease import RunKind, choose_opener, run_path
from gradus.run.paths import RunDirectory

PROGRAM = (sys.executable, "-P", "-m", "gradus.cli.main")
"""What runs `gradus` on each node."""

_ANSWER_SECONDS = 60.0
_UNREACHED = re.compile(
    r"unable to contact|timed out|connection refused|configuration (source|file)", re.IGNORECASE
)
_UNNAMABLE = re.compile(r"[%\\\x00-\x1f\x7f]")
"""What SLURM does not take as it is in the name of a file."""
_PREFIX = re.compile(r"^(sbatch|srun|squeue): (error: )?|^allocation failure: ")

_BODY = r"""
cd -- "$folder" || exit 75
launcher= warned= ended=

# SLURM sends USR1 before the time is over (and before it preempts, where a site has set
# PreemptParameters=send_user_signal): the launcher saves, and the job waits in the queue again.
warn() {
  [ -z "$warned" ] || return
  warned=1
  echo "slurm: job $SLURM_JOB_ID ends soon"
  [ -z "$launcher" ] || kill -TERM "$launcher"
}
trap warn USR1
# TERM comes to all processes of a job that somebody cancels or puts back; nothing is left to ask.
trap 'ended=1' TERM

# A node side that ends too early comes back; one that is refused (64) does not. It has all CPUs
# of its node that the job has, which a step asks for anew since SLURM 22.05.
node_side() {
  while true; do
    srun --overlap --nodes=1 --ntasks=1 --relative="$1" --cpu-bind=none \
      ${cpus:+"--cpus-per-task=$cpus"} \
      "${program[@]}" node "$run" --number "$1" < /dev/null
    case $? in 0 | 64) return ;; esac
    sleep 1
  done
}

# Its newest checkpoint, or how many episodes of an evaluation have no error: each job plays the
# others again.
saved() {
  ls -- "$run/checkpoints" 2> /dev/null | tail -n 1
  [ "$command" != eval ] || cat -- "$run"/episodes/*/eval.jsonl 2> /dev/null |
    grep -Ec '"is_shared":(true|false),"error":null'
}

before=$(saved)
export GRADUS_NODE_SIDES="job $SLURM_JOB_ID of SLURM"
for ((number = 1; number < nodes; number++)); do node_side "$number" & done
"${program[@]}" "$command" @ "$config" --resume "${options[@]}" < /dev/null &
launcher=$!
[ -z "$warned" ] || kill -TERM "$launcher"
# A bash that a signal interrupts in `wait` may lose the exit code.
while kill -0 "$launcher" 2> /dev/null; do sleep 0.5; done
wait "$launcher"
code=$?
[ -z "$warned" ] || [ "$code" != 143 ] || code=75 # before it could listen to signals
# Node sides that were let go end by themselves, soon.
for ((tries = 0; tries < 20; tries++)); do
  [ -n "$(jobs -r)" ] || break
  sleep 0.5
done

# 75: worth another try, but not after three jobs in a row that saved nothing.
# Nor where SLURM has started the job again elsewhere, or another launcher has the run.
is_ours() {
  grep -qE "\"owner\": null|\"pid\": $launcher," "$run/lease.json" || return
  [[ "$(scontrol show job -o "$SLURM_JOB_ID")" == *" Restarts=${SLURM_RESTART_COUNT:-0} "* ]]
}
if [ "$code" = 75 ] && [ -z "$ended" ] && [ "$requeue" = 1 ] && is_ours; then
  tries=0
  if [ "$(saved)" = "$before" ]; then
    read -r tries 2> /dev/null < "$run/config/slurm_tries"
    tries=$((tries + 1))
  fi
  echo "$tries" > "$run/config/slurm_tries"
  if [ "$tries" -lt 3 ]; then
    echo "slurm: job $SLURM_JOB_ID waits in the queue again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "slurm: three jobs in a row saved nothing new, so this one is the last"
  fi
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob:
    """The job of one run."""

    config: LaunchedConfig
    name: str
    options: tuple[str, ...]
    """Further words for the launcher."""
    folder: Path
    """Whatever a config says of paths is seen from here."""

    @property
    def run_dir(self) -> RunDirectory:
        return RunDirectory(run_path(Path(self.config.output_dir), self.name))

    @property
    def kind(self) -> RunKind:
        kinds: dict[type, RunKind] = {SftConfig: "sft", EvalConfig: "eval"}
        return kinds.get(type(self.config), "rl")

    @property
    def num_nodes(self) -> int:
        return required_nodes(self.config, "--slurm", "job").number

    def script(self) -> str:
        """The whole batch script; ConfigError for a folder that it cannot name."""
        run = str(self.run_dir.root)
        if found := _UNNAMABLE.search(run):
            raise ConfigError(
                f"output_dir: {run!r} has a {found[0]!r}, which SLURM takes for something else in "
                "the name of a file; choose another folder"
            )
        lines = [f"#SBATCH {option}" for option in self._options()]
        settings = {
            "run": run,
            "folder": str(self.folder),
            "config": str(self.run_dir.slurm_config),
            "nodes": str(self.num_nodes),
            "requeue": str(int(self.config.slurm.requeue)),
            "command": self.kind,
            "cpus": "" if self.config.slurm.cpus is None else str(self.config.slurm.cpus),
        }
        lists = {"program": PROGRAM, "options": self.options}
        return "\n".join(
            [
                "#!/bin/bash",
                f"# The run {self.name}, written by gradus {gradus.__version__}.",
                *lines,
                "",
                *(f"{key}={shlex.quote(value)}" for key, value in settings.items()),
                *(f"{key}=({shlex.join(words)})" for key, words in lists.items()),
                _BODY,
            ]
        )

    def _options(self) -> Iterator[str]:
        slurm, nodes = self.config.slurm, self.config.launch.nodes
        yield f"--job-name={self.name}"
        yield f"--nodes={self.num_nodes}"
        yield "--ntasks-per-node=1"
        if slurm.cpus is None:
            yield from ("--exclusive", "--mem=0")
        else:
            yield f"--cpus-per-task={slurm.cpus}"
        if nodes is not None and nodes.gpus:
            yield f"--gpus-per-node={nodes.gpus}"
        chosen = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
        yield from (f"--{key}={value}" for key, value in chosen.items() if value is not None)
        yield f"--signal=B:USR1@{self.config.launch.warning_seconds}"
        yield "--requeue" if slurm.requeue else "--no-requeue"
        yield "--open-mode=append"
        yield _quoted("--output", str(self.run_dir.slurm_log))
        for option in slurm.extra:
            name, equals, value = option.partition("=")
            yield _quoted(name, value) if equals else name

    def frozen(self) -> dict[str, Any]:
        """What the user wrote, as every start of the job finds it."""
        values = self.config.model_dump(mode="json", exclude_unset=True)
        return {**values, "name": self.name}


def _quoted(option: str, value: str) -> str:
    """An option as a line for sbatch holds it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{option}="{escaped}"'


def submit(job: SlurmJob, *, resume: bool, clean: bool) -> list[str]:
    """Put the job into the queue; lines for a person.

    ConfigError, before anything is written, for what SLURM refuses, and while a job of this run
    waits or runs.
    """
    script = job.script()
    test(script)
    run_dir = job.run_dir
    _refuse_second(run_dir)
    lease = choose_opener(resume=resume, clean=clean, dry_run=False)(
        Path(job.config.output_dir), job.name, kind=job.kind
    )
    try:
        _refuse_second(run_dir)
        run_dir.config.mkdir(mode=0o700, exist_ok=True)
        run_dir.slurm_tries.unlink(missing_ok=True)
        # It may hold the variables of processes, as what the user wrote does.
        write_json(run_dir.slurm_config, job.frozen(), mode=0o600)
        write_atomically(run_dir.slurm_script, script.encode(), mode=0o700)
        said = _sbatch("--parsable", str(run_dir.slurm_script))
        number = said.strip().partition(";")[0]
        write_json(run_dir.slurm_job, {"job": number})
    finally:
        lease.release()
    nodes = "1 node" if job.num_nodes == 1 else f"{job.num_nodes} nodes"
    return [
        f"{'run':<18}{run_dir.root}",
        f"{'submitted':<18}job {number} on {nodes}; it says what it does in {run_dir.slurm_log}",
        f"{'':<18}squeue --job {number} shows it, scancel {number} ends it",
    ]


def has_sbatch() -> bool:
    return shutil.which("sbatch") is not None


def test(script: str) -> None:
    """ConfigError when SLURM would refuse a script, or is not there."""
    if not has_sbatch():
        raise ConfigError(
            "this machine has no sbatch, so --slurm can submit nothing; do it where SLURM is, or "
            "add --dry-run, which prints the script"
        )
    _sbatch("--test-only", text=script)


def _refuse_second(run_dir: RunDirectory) -> None:
    """ConfigError while a job of the run waits or runs: one would end the other."""
    try:
        number = str(read_json(run_dir.slurm_job)["job"])
    except FileNotFoundError:
        return
    words = ["squeue", "--noheader", f"--jobs={number}", f"--name={run_dir.root.name}"]
    asked = _ask([*words, "--format=%T"])
    state = asked.stdout.strip().lower()
    if asked.returncode == 0 and state:
        raise ConfigError(
            f"job {number} of the run {run_dir.root} is {state} already; wait for its end, or end "
            f"it with 'scancel {number}'"
        )


def _sbatch(*words: str, text: str | None = None) -> str:
    answer = _ask(["sbatch", *words], text)
    if answer.returncode == 0:
        return answer.stdout
    said = [_PREFIX.sub("", line.strip()) for line in answer.stderr.splitlines() if line.strip()]
    reason = "; ".join(dict.fromkeys(map(first_line, said))) or f"exit code {answer.returncode}"
    if _UNREACHED.search(reason):
        raise DeadlineError(f"SLURM does not answer: {reason}; try again later")
    raise ConfigError(f"SLURM refuses this job: {reason}; see [slurm] and launch.nodes")


def _ask(words: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """DeadlineError where SLURM is silent."""
    # What was chosen for the shell's own jobs would be stronger than the script.
    env = {key: it for key, it in os.environ.items() if not key.startswith("SBATCH_")}
    try:
        return subprocess.run(
            words,
            input=text or "",
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{words[0]} gave no answer in {_ANSWER_SECONDS:g} s; try again later"
        ) from None
