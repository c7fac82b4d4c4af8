"""A run as Python sees it: what its folder holds, finished or not."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from gradus.errors import ConfigError, RunDirectoryError
from gradus.files import read_json
from gradus.launch.episodes import RESULTS_NAME, is_complete
from gradus.monitor import describe_metric
from gradus.run.checkpoints import CheckpointStore
from gradus.run.episodes import RecordedEpisode, episode_files, read_episodes
from gradus.run.json_lines import read_objects
from gradus.run.lease import MARKER_NAME, read_marker
from gradus.run.paths import RunDirectory
from gradus.run.records import EVALUATION, read_records
from gradus.view.episode import TokenRecords, token_rows
from gradus.view.index import EXPRESSION
from gradus.view.terminal import records_of, whole_index

_PART = "episode/source/reward/part/mean"
_EVALUATED = "eval/"
Purpose = Literal["train", "eval"]


@dataclass(frozen=True)
class RunCheckpoint:
    """One committed checkpoint."""

    step: int
    """Updates that its weights contain."""
    path: Path
    """Its folder; `gradus export` makes a model of it."""


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """Reads the folder of a run, finished or not; writes nothing.

    >>> run = load_run("runs/demo")  # doctest: +SKIP
    >>> run.metrics()[-1]["episode/reward/mean"]  # doctest: +SKIP
    0.84
    """

    path: Path
    """The run's folder."""

    def __repr__(self) -> str:
        rewards = [row["reward"] for row in self.rewards() if row["reward"] is not None]
        learned = f", reward {rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else ""
        return f"<run {self.path}: {self.outcome or 'not finished'}{learned}>"

    @property
    def outcome(self) -> str | None:
        """`done`, `solved`, `stalled`, `alarmed`, `failed`, `interrupted`, of an evaluation
        `done` or `incomplete`; None while it is not finished."""
        run_dir = RunDirectory(self.path)
        if run_dir.summary.is_file():
            return str(read_json(run_dir.summary)["outcome"])
        results = self.path / RESULTS_NAME
        if results.is_file():
            return "done" if is_complete(read_json(results)) else "incomplete"
        return None

    @property
    def model(self) -> Path | None:
        """The folder of the final model; None as long as there is none."""
        folder = RunDirectory(self.path).model
        return folder if (folder / "config.json").is_file() else None

    @overload
    def metrics(self, *, frame: Literal[False] = False) -> list[dict[str, float]]: ...
    @overload
    def metrics(self, *, frame: Literal[True]) -> Any: ...
    def metrics(self, *, frame: bool = False) -> Any:
        """One record for each step and each evaluation, in the order in which they were written.

        `step` and `time` (seconds since 1970) stand beside the metrics; a value that was not finite
        is NaN. With `frame` a pandas DataFrame with one column for each key.
        """
        records = read_records(RunDirectory(self.path).metrics)
        rows = [{"step": it.step, "time": it.time, **it.numbers} for it in records]
        return _frame(rows) if frame else rows

    @overload
    def episodes(
        self,
        *,
        purpose: Purpose | None = ...,
        where: str = ...,
        sort: str = ...,
        frame: Literal[False] = False,
    ) -> Iterator[dict[str, Any]]: ...
    @overload
    def episodes(
        self,
        *,
        purpose: Purpose | None = ...,
        where: str = ...,
        sort: str = ...,
        frame: Literal[True],
    ) -> Any: ...
    def episodes(
        self,
        *,
        purpose: Purpose | None = None,
        where: str = "",
        sort: str = "",
        frame: bool = False,
    ) -> Any:
        """The records of episodes as their file has them, step by step; purpose as in `rows`.

        `where` and `sort` choose and order them as in `gradus view --list`, of all purposes unless
        one is given. Read one by one, since a run may hold more than fits into memory. With
        `frame` a pandas DataFrame; nested values become columns such as `gradus.outcome`.
        """
        if where or sort:
            rows = self._chosen(where, sort, purpose)
        else:
            rows = self._episodes(purpose or self._usual_purpose)
        return _frame(rows, nested=True) if frame else rows

    def _chosen(self, where: str, sort: str, purpose: Purpose | None) -> Iterator[dict[str, Any]]:
        index = whole_index(RunDirectory(self.path))
        filters: dict[str, list[str]] = {EXPRESSION: [where] if where else []}
        if purpose:
            filters["purpose"] = [purpose]
        return records_of(index, filters, sort)

    def tokens(self, episode: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A dict for each token of an episode of `episodes()`: its text, the logprob of engine and
        trainer, entropy, advantage, weight, push, policy version; None for what nobody noted.

        ConfigError says why there are none.
        """
        found = TokenRecords(RunDirectory(self.path)).of(episode, limit=None)
        if "why" in found:
            raise ConfigError(f"{self.path}: no tokens: {found['why']}")
        return token_rows(found)

    def _episodes(self, purpose: Purpose) -> Iterator[dict[str, Any]]:
        for _, path in episode_files(RunDirectory(self.path), purpose):
            yield from read_objects(path)

    @property
    def _usual_purpose(self) -> Purpose:
        marker = read_marker(RunDirectory(self.path))
        return "train" if marker is None or marker.kind == "rl" else "eval"

    def rewards(self, *, frame: bool = False) -> Any:
        """The mean reward of each step, and of each of its parts without weights: a list of dicts,
        with `frame` a pandas DataFrame."""
        rows = []
        for record in read_records(RunDirectory(self.path).metrics):
            if record.is_evaluation or "episode/reward/mean" not in record.metrics:
                continue
            about = map(describe_metric, record.metrics)
            parts = [it for it in about if it is not None and it.family == _PART]
            is_one = len({it.labels["source"] for it in parts}) == 1
            named = {
                it.labels["part"] if is_one else f"{it.labels['source']}/{it.labels['part']}": it
                for it in parts
            }
            values = {name: record.metrics[it.name] for name, it in named.items()}
            reward = record.metrics["episode/reward/mean"]
            rows.append({"step": record.step, "reward": reward, **values})
        return _frame(rows) if frame else rows

    def evaluations(self, *, frame: bool = False) -> Any:
        """The numbers of each evaluated version, without their `eval/`; as `rewards`."""
        rows = [
            {"version": it.step}
            | {
                name.removeprefix(_EVALUATED): value
                for name, value in it.metrics.items()
                if name.startswith(_EVALUATED) and name != EVALUATION
            }
            for it in read_records(RunDirectory(self.path).metrics)
            if it.is_evaluation
        ]
        return _frame(rows) if frame else rows

    def rows(self, *, purpose: Purpose | None = None, frame: bool = False) -> Any:
        """A dict for each episode, as a person reads it: step, source, row, prompt, reply, reward
        and its parts, error; by step, and in a step by task. With `frame` a pandas DataFrame.

        Without a purpose those that trained, of an evaluation those that it played.
        """
        files = episode_files(RunDirectory(self.path), purpose or self._usual_purpose)
        rows = [
            _row(step, episode)
            for step, path in files
            for episode in sorted(read_episodes(path), key=lambda it: (it.source, it.number))
        ]
        return _frame(rows, nested=True) if frame else rows

    def checkpoints(self) -> list[RunCheckpoint]:
        """The committed checkpoints, oldest first; their files are not checked here."""
        found = CheckpointStore(RunDirectory(self.path), term=0).folders()
        return [RunCheckpoint(step, folder) for step, folder in found]


def load_run(path: str | Path) -> LoadedRun:
    """The run in a folder; RunDirectoryError when gradus made no run there."""
    folder = Path(path)
    if not (folder / MARKER_NAME).is_file():
        raise RunDirectoryError(
            f"{folder} is not the folder of a run; it is <output_dir>/<name>, which `gradus rl` "
            "prints first"
        )
    return LoadedRun(folder)


def _row(step: int, episode: RecordedEpisode) -> dict[str, Any]:
    shown = episode.shown
    prompt, reply = shown.last_turn if shown is not None else ("", "")
    return {
        "step": step,
        "source": episode.source,
        "row": dict(episode.row),
        "prompt": prompt,
        "reply": reply,
        "reward": episode.reward,
        "rewards": dict(shown.rewards) if shown is not None else {},
        "error": episode.error,
        "error_message": episode.error_message,
    }


def _frame(rows: Any, *, nested: bool = False) -> Any:
    """A pandas DataFrame; ConfigError without pandas, which gradus itself does not need."""
    if importlib.util.find_spec("pandas") is None:
        raise ConfigError("frame=True needs pandas: pip install pandas")
    pandas = importlib.import_module("pandas")
    return pandas.json_normalize(list(rows)) if nested else pandas.DataFrame(list(rows))
