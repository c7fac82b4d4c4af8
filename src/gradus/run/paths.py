"""Every path of a run, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GOOD_OUTCOMES = frozenset({"done", "solved", "stalled"})
"""What `summary.json` calls the end of a run that ended well."""

Purpose = Literal["train", "eval"]
"""What the episodes of a source are for."""
IMAGE_NAME = "image:"
"""In a record, before the SHA-256 of an image of the run."""


def environment_process(source: str, purpose: Purpose = "train", number: int = 0) -> str:
    """One of a source's processes, counted from 0.

    >>> environment_process("words"), environment_process("words", "eval", 1)
    ('env_words', 'eval_words@2')
    """
    prefix = "env_" if purpose == "train" else "eval_"
    return f"{prefix}{source}" + (f"@{number + 1}" if number else "")


class _Below:
    """A path of the run, from its root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run_dir: RunDirectory, owner: type) -> Path:
        return run_dir.root / self._path


@dataclass(frozen=True)
class RunDirectory:
    """The layout of one run on disk.

    >>> RunDirectory(Path("runs/demo")).metrics
    PosixPath('runs/demo/metrics.jsonl')
    """

    root: Path

    from_python = _Below("from_python")
    """Rows and functions that a call in Python gave."""
    config = _Below("config")
    """Resolved per-process configs."""
    metrics = _Below("metrics.jsonl")
    """One JSON object per record."""
    live = _Below("live.json")
    """The orchestrator's queues and the engine's load at this moment."""
    machine = _Below("machine.jsonl")
    """What the run's processes took of the launcher's machine, a line every ten seconds."""
    older_machine = _Below("machine.1.jsonl")
    """The same before the file was full."""
    cuts = _Below("cuts.jsonl")
    """A line for each resume: where it cut `metrics.jsonl` off."""
    launched = _Below("config/launched.json")
    """What the user wrote for the last launch, with the versions of code and libraries."""
    trackers = _Below("trackers")
    """What each tracker has got: `<tracker>.json`, and its own files in `<tracker>/`."""
    journal = _Below("journal.jsonl")
    """Append-only record of every decision and outcome of the orchestrator."""
    logs = _Below("logs")
    """`<role>.log`, and `envs/train/<name>.log`."""
    episodes = _Below("episodes")
    """`step_N/train.jsonl` and `step_N/eval.jsonl`."""
    spool = _Below("spool")
    """Batches on their way to the trainer, and its events on their way back."""
    end_of_batches = _Below("spool/end.msgpack")
    """From which step on no batch comes, if the run ends early."""
    weights = _Below("weights")
    """Published versions, `version_N/`."""
    kept = _Below("kept")
    """The weights of a launch that saved no checkpoint, where a resume began again."""
    best = _Below("best")
    """The best evaluated version, and `best.json`, which says what it earned."""
    checkpoints = _Below("checkpoints")
    """Committed checkpoints, `step_N/`, and hidden folders of those in the making."""
    tokens = _Below("tokens")
    """`step_N/rank_R.bin`: tokens of a step with what engine and trainer said of them."""
    replay = _Below("replay")
    """Played episodes with all their tokens, as they arrived; what a replay reads."""
    images = _Below("replay/images")
    """The images of its samples, each once, by the SHA-256 of its bytes."""
    replay_report = _Below("replay/report.json")
    """How a replay compares with the run that it repeats."""
    replay_deleted = _Below("replay/deleted.json")
    """The limit that the episodes in `replay` were deleted for, and the step; absent otherwise."""
    model = _Below("model")
    """The final model as a Hugging Face directory."""
    adapter = _Below("adapter")
    """The final adapter in PEFT's format, when one was trained; `model` has it merged."""
    ready = _Below("ready")
    """`<process>.json`, written by each process when it can serve."""
    servers = _Below("servers")
    """Addresses of the inference servers that joined, where others start them."""
    secrets = _Below("secrets")
    """The run's tokens, mode 0600 in a folder of mode 0700."""
    admin_token = _Below("secrets/admin_token")
    """Bearer token of the inference server's admin routes; only the orchestrator reads it."""
    inference_token = _Below("secrets/inference_token")
    """Bearer token of the inference server's data routes."""
    node_token = _Below("secrets/node_token")
    """What a launcher and the node sides of its run know each other by."""
    authority = _Below("secrets/authority.pem")
    """Certificate by which the processes of a run over nodes know servers on other nodes."""
    launcher = _Below("launcher.json")
    """Where the launcher of a run on several nodes listens for their node sides, and its term."""
    nodes = _Below("nodes")
    """`<number>.json`, the registry of started processes of each node beside the launcher's."""
    slurm_script = _Below("config/slurm.sh")
    """The batch script of the run's job."""
    slurm_config = _Below("config/slurm.json")
    """What the user wrote, for every start of that job; mode 0600."""
    slurm_job = _Below("config/slurm_job.json")
    """The number of the job that was submitted last."""
    slurm_tries = _Below("config/slurm_tries")
    """Starts of that job in a row that saved no checkpoint."""
    slurm_log = _Below("slurm.log")
    """What the launcher and the node sides of a job print."""
    lease = _Below("lease.json")
    """Owner and term of the run directory."""
    processes = _Below("pids.json")
    """Registry of started processes: pid and start time."""
    summary = _Below("summary.json")
    """What the run did, written at the end."""
    notices = _Below("notices.log")
    """Lines for the person at the terminal; the launcher shows each as it appears."""
    evicted = _Below("control/evicted.txt")
    """Why the run ended for want of anything to train; absent while it runs."""
    audit = _Below("audit.jsonl")
    """Who started the run and with what, its terms, admin calls and weights; never cut."""
    solved = _Below("control/solved.txt")
    """Why the run counts as solved; absent otherwise."""
    stalled = _Below("control/stalled.txt")
    """How long the reward has not risen, where the run ended for that; absent otherwise."""
    alarmed = _Below("control/alarmed.txt")
    """Which alarm ended the run; absent otherwise."""
    standing = _Below("standing")
    """Where the orchestrator stands, for one that is started again in its term."""
    alive = _Below("alive")
    """`<process>.json`, written again and again while its event loop runs."""
    save_request = _Below("control/save")
    """Asks the trainer for a checkpoint after its present step; it deletes the file then."""

    @property
    def good_ends(self) -> dict[str, Path]:
        """Outcome → the file that says why, of a run that ended well before its last step."""
        return {"solved": self.solved, "stalled": self.stalled, "alarmed": self.alarmed}

    def directly_below(self) -> list[Path]:
        """Every file and folder that gradus puts into the root."""
        table = [it for it in vars(type(self)).values() if isinstance(it, _Below)]
        paths = [it.__get__(self, type(self)) for it in table]
        names = ("evaluation.json", "results.json", "progress.json")
        return [
            *(path for path in paths if path.parent == self.root),
            *map(self.root.joinpath, names),
        ]

    def evaluation(self, version: int) -> Path:
        """The numbers of one version, beside its `eval.jsonl`; written when all of it is played."""
        return self.episodes / f"step_{version}" / "eval.json"

    def environment_log(self, purpose: str, name: str) -> Path:
        return self.logs / "envs" / purpose / f"{name}.log"

    def ready_file(self, process: str) -> Path:
        return self.ready / f"{process}.json"

    def prometheus_targets(self, tracker: str) -> Path:
        """Where Prometheus finds the run's numbers, in the form of its `file_sd_configs`."""
        name = "prometheus" if tracker == "prometheus" else f"prometheus.{tracker}"
        return self.ready / f"{name}.json"

    def standing_file(self, term: int) -> Path:
        return self.standing / f"term_{term:08d}.msgpack"

    def prepared_file(self, process: str) -> Path:
        """Where `process` notes the term in which its command ran."""
        return self.ready / f"{process}.prepared"

    def version(self, version: int) -> Path:
        return self.weights / f"version_{version:08d}"
