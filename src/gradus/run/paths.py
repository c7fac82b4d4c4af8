"""Every path of a run as a property of one object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """The layout of one run on disk.

    >>> RunDirectory(Path("runs/demo")).metrics
    PosixPath('runs/demo/metrics.jsonl')
    """

    root: Path

    def directly_below(self) -> list[Path]:
        """Every file and folder that gradus puts into the root."""
        properties = [name for name, it in vars(type(self)).items() if isinstance(it, property)]
        found: dict[Path, None] = dict.fromkeys(getattr(self, name) for name in properties)
        names = ("evaluation.json", "results.json", "progress.json")
        return [
            *(path for path in found if path.parent == self.root),
            *map(self.root.joinpath, names),
        ]

    @property
    def config(self) -> Path:
        """Resolved per-process configs."""
        return self.root / "config"

    @property
    def metrics(self) -> Path:
        """One JSON object per record."""
        return self.root / "metrics.jsonl"

    @property
    def live(self) -> Path:
        """The orchestrator's queues and the engine's load at this moment."""
        return self.root / "live.json"

    @property
    def cuts(self) -> Path:
        """A line for each resume: where it cut `metrics.jsonl` off."""
        return self.root / "cuts.jsonl"

    @property
    def launched(self) -> Path:
        """What the user wrote for the last launch, with the versions of code and libraries."""
        return self.config / "launched.json"

    @property
    def trackers(self) -> Path:
        """What each tracker has got: `<tracker>.json`, and its own files in `<tracker>/`."""
        return self.root / "trackers"

    @property
    def journal(self) -> Path:
        """Append-only record of every decision and outcome of the orchestrator."""
        return self.root / "journal.jsonl"

    @property
    def logs(self) -> Path:
        """`<role>.log`, and `envs/train/<name>.log`."""
        return self.root / "logs"

    @property
    def episodes(self) -> Path:
        """`step_N/train.jsonl` and `step_N/eval.jsonl`."""
        return self.root / "episodes"

    def evaluation(self, version: int) -> Path:
        """The numbers of one version, beside its `eval.jsonl`; written when all of it is played."""
        return self.episodes / f"step_{version}" / "eval.json"

    @property
    def spool(self) -> Path:
        """Batches on their way to the trainer, and its events on their way back."""
        return self.root / "spool"

    @property
    def weights(self) -> Path:
        """Published versions, `version_N/`."""
        return self.root / "weights"

    @property
    def kept(self) -> Path:
        """The weights of a launch that saved no checkpoint, where a resume began again."""
        return self.root / "kept"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints, `step_N/`, and hidden folders of those in the making."""
        return self.root / "checkpoints"

    @property
    def replay(self) -> Path:
        """Played episodes with all their tokens, as they arrived; what a replay reads."""
        return self.root / "replay"

    @property
    def replay_report(self) -> Path:
        """How a replay compares with the run that it repeats."""
        return self.replay / "report.json"

    @property
    def model(self) -> Path:
        """The final model as a Hugging Face directory."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The final adapter in PEFT's format, when one was trained; `model` has it merged."""
        return self.root / "adapter"

    @property
    def ready(self) -> Path:
        """`<process>.json`, written by each process when it can serve."""
        return self.root / "ready"

    @property
    def secrets(self) -> Path:
        """The run's tokens, mode 0600 in a folder of mode 0700."""
        return self.root / "secrets"

    @property
    def admin_token(self) -> Path:
        """Bearer token of the inference server's admin routes; only the orchestrator reads it."""
        return self.secrets / "admin_token"

    @property
    def inference_token(self) -> Path:
        """Bearer token of the inference server's data routes."""
        return self.secrets / "inference_token"

    @property
    def lease(self) -> Path:
        """Owner and term of the run directory."""
        return self.root / "lease.json"

    @property
    def processes(self) -> Path:
        """Registry of started processes: pid and start time."""
        return self.root / "pids.json"

    @property
    def summary(self) -> Path:
        """What the run did, written at the end."""
        return self.root / "summary.json"

    @property
    def notices(self) -> Path:
        """Lines for the person at the terminal; the launcher shows each as it appears."""
        return self.root / "notices.log"

    def environment_log(self, purpose: str, name: str) -> Path:
        """Log of the environment process of one source; `purpose` is `train` or `eval`."""
        return self.logs / "envs" / purpose / f"{name}.log"

    @property
    def evicted(self) -> Path:
        """Why the run ended for want of anything to train; absent as long as it goes on."""
        return self.root / "control" / "evicted.txt"

    @property
    def solved(self) -> Path:
        """That nothing is left to learn, where the run ended for that; absent otherwise."""
        return self.root / "control" / "solved.txt"

    @property
    def alive(self) -> Path:
        """`<process>.json`, written again and again while its event loop runs."""
        return self.root / "alive"

    @property
    def save_request(self) -> Path:
        """Asks the trainer for a checkpoint after its present step; it deletes the file then."""
        return self.root / "control" / "save"

    def ready_file(self, process: str) -> Path:
        """Where `process` says that it can serve, and at which address."""
        return self.ready / f"{process}.json"

    def prometheus_targets(self, tracker: str) -> Path:
        """Where Prometheus finds the run's numbers, in the form of its `file_sd_configs`."""
        name = "prometheus" if tracker == "prometheus" else f"prometheus.{tracker}"
        return self.ready / f"{name}.json"

    def prepared_file(self, process: str) -> Path:
        """Where `process` notes the term in which its command ran."""
        return self.ready / f"{process}.prepared"

    def version(self, version: int) -> Path:
        """Directory of one published policy version."""
        return self.weights / f"version_{version:08d}"
