"""`gradus eval` on this machine: start, follow the table, stop, sum up.

    >>> run_eval(EvalConfig(model=ModelConfig(name="runs/x/model"), env=[...]))  # doctest: +SKIP

That is also how another command evaluates a model directory that it made.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from gradus.config import (
    EvalConfig,
    EvaluatorProcessConfig,
    continued_identity,
    resolve,
    run_name,
    without_secrets,
)
from gradus.errors import ConfigError, ExitCode, GradusError
from gradus.files import read_json, write_atomically, write_json
from gradus.launch.endpoint_check import check_endpoint
from gradus.launch.eval_table import error_lines, is_complete, progress_line, table
from gradus.launch.interrupts import Interrupted, Interrupts
from gradus.launch.local import watched_children
from gradus.launch.plan import LaunchPlan, Machine, config_file, describe, plan_eval
from gradus.launch.progress import Progress
from gradus.launch.resume import IDENTITY_NAME
from gradus.launch.tail import LineTail
from gradus.processes.liveness import SilenceWatch
from gradus.processes.supervisor import Child, Supervisor, become_subreaper, last_words
from gradus.run.lease import RunLease, choose_opening, run_path
from gradus.run.paths import RunDirectory
from gradus.run.recording import MODEL_FILES, digest_files, model_folder

RESULTS_NAME = "results.json"

_TABLE_SECONDS = 0.5
_LINE_SECONDS = 5.0
_CLEAR_LINE = "\x1b[2K"


def run_eval(
    config: EvalConfig, *, resume: bool = False, clean: bool = False, dry_run: bool = False
) -> int:
    """One evaluation; returns the exit code.

    0 when every episode ended without error, 75 when some did not (--resume plays just those), 130
    after Ctrl-C. Everything else is a GradusError. Nothing in the folder changes before everything
    that may refuse the evaluation was asked.
    """
    become_subreaper()
    if resume and config.name is None:
        raise ConfigError("--resume needs the name of the evaluation; give it with --name")
    opening = choose_opening(resume=resume, clean=clean, dry_run=dry_run)
    if config.base_url is not None and not dry_run:
        check_endpoint(
            config.base_url,
            config.model.name,
            api_key_var=config.api_key_var,
            environment=os.environ,
        )
    name = run_name(config, secrets.token_hex(4))
    # What cannot be planned must not cost an old evaluation.
    resolve(config, run_dir=run_path(Path(config.output_dir), name), term=0)
    lease = opening(Path(config.output_dir), name, kind="eval")
    try:
        plan = plan_eval(config, lease.run_dir, lease.term, Machine.current())
        progress = Progress(sys.stdout, max_steps=0)
        progress.line(f"{'evaluation':<18}{lease.run_dir.root}")
        identity = _identity(lease.run_dir, config, plan, resume=resume)
        if dry_run:
            progress.lines([*describe(plan), "dry run: nothing was written and nothing started"])
            return ExitCode.DONE
        if resume:
            lease.claim()
        _prepare(lease.run_dir, plan)
        write_json(lease.run_dir.root / IDENTITY_NAME, identity)
        with Interrupts() as interrupts:
            return _Launch(config, plan, lease, progress, interrupts).run()
    finally:
        lease.release()


def _identity(
    run_dir: RunDirectory, config: EvalConfig, plan: LaunchPlan, *, resume: bool
) -> dict[str, Any]:
    """What the episodes depend on, with digests of the model's files when gradus serves it.

    ConfigError when the episodes that lie in the folder are of something else.
    """
    (evaluator,) = [it for it in plan.configs.values() if isinstance(it, EvaluatorProcessConfig)]
    folder = model_folder(config.model.name) if config.base_url is None else None
    # Every byte is read once more than the engine needs, and lies in memory when it loads them.
    digests = {} if folder is None else digest_files(folder, MODEL_FILES)
    identity = evaluator.identity | {"files": digests}
    path = run_dir.root / IDENTITY_NAME
    if not resume or not path.is_file():
        return identity
    return continued_identity(read_json(path), identity)


def _prepare(run_dir: RunDirectory, plan: LaunchPlan) -> None:
    """The folders and files that the processes of this launch find."""
    # Ready files of killed processes would be taken for those of the new ones.
    shutil.rmtree(run_dir.ready, ignore_errors=True)
    for process, process_config in plan.configs.items():
        write_json(config_file(run_dir, process), without_secrets(process_config))
    for folder in (run_dir.ready, run_dir.logs, run_dir.secrets):
        folder.mkdir(mode=0o700, exist_ok=True)
    for token in (run_dir.admin_token, run_dir.inference_token):
        write_atomically(token, secrets.token_hex(32).encode(), mode=0o600)


class _Launch:
    """One evaluation from the first process to the last table."""

    def __init__(
        self,
        config: EvalConfig,
        plan: LaunchPlan,
        lease: RunLease,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self._config = config
        self._plan = plan
        self._run_dir = lease.run_dir
        self._progress = progress
        self._interrupts = interrupts
        self._live = LiveTable(sys.stdout)
        self._notices = LineTail(lease.run_dir.notices, skips_old=True)
        self._silence = SilenceWatch(
            lease.run_dir.alive, limit_seconds=config.launch.silent_process_seconds
        )
        self._supervisor = Supervisor(
            lease.run_dir.processes, stop_timeout_seconds=config.launch.stop_timeout_seconds
        )

    def run(self) -> int:
        """Start, follow, stop; returns the exit code or raises what went wrong."""
        try:
            self._start()
            self._follow()
        except Interrupted as interrupted:
            self._stop()
            self._progress.line(f"interrupted {interrupted}; go on with --resume")
            return interrupted.exit_code
        except GradusError as error:
            self._stop()
            self._progress.lines(last_words(error))
            raise
        except BaseException:
            self._stop()
            raise
        self._stop()
        return self._sum_up()

    def _start(self) -> None:
        for stage in self._plan.stages:
            self._progress.started([spec.name for spec in stage])
            children = [self._supervisor.start(spec) for spec in stage]
            self._supervisor.wait_ready(
                children,
                timeout_seconds=self._config.launch.ready_timeout_seconds,
                on_ready=self._note_ready,
                on_wait=self._on_wait,
            )

    def _note_ready(self, child: Child, content: Mapping[str, Any]) -> None:
        address = content.get("base_url") or content.get("run_address") or ""
        self._progress.ready(child.spec.name, child.seconds(), str(address))

    def _on_wait(self) -> None:
        self._interrupts.check()
        self._progress.waiting()

    def _follow(self) -> None:
        (evaluator,) = [child for child in self._supervisor.children if child.spec.finishes]
        while evaluator.exit_code() is None:
            self._supervisor.check()
            self._interrupts.check()
            self._show_notices()
            self._live.show(self._run_dir.root / "progress.json")
            self._progress.lines(self._silence.look(watched_children(self._supervisor)))
            self._supervisor.reap_orphans()
            self._supervisor.pause()
        self._supervisor.check()

    def _show_notices(self) -> None:
        if lines := self._notices.read():
            self._live.clear()
            self._progress.lines(line.decode(errors="replace") for line in lines)

    def _stop(self) -> None:
        self._supervisor.stop(is_urgent=lambda: self._interrupts.is_urgent)
        self._supervisor.reap_orphans()
        self._live.clear()

    def _sum_up(self) -> int:
        results = read_json(self._run_dir.root / RESULTS_NAME)
        self._progress.lines([*table(results), *error_lines(results)])
        self._progress.line(f"{'results':<12}{self._run_dir.root / 'results.json'}")
        if is_complete(results):
            return ExitCode.DONE
        self._progress.line("some episodes failed; --resume plays just those again")
        return ExitCode.TRY_AGAIN


class LiveTable:
    """The table while the evaluation runs: redrawn on a terminal, now and then a line elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._shown_at = float("-inf")
        self._num_lines = 0
        self._last = ""

    def show(self, path: Path) -> None:
        """Show what `path` holds, unless that was done a moment ago."""
        pause = _TABLE_SECONDS if self._is_terminal else _LINE_SECONDS
        if time.monotonic() - self._shown_at < pause:
            return
        try:
            progress = read_json(path)
        except FileNotFoundError:
            return
        self._shown_at = time.monotonic()
        if self._is_terminal:
            self.clear()
            lines = table(progress)
            self._num_lines = len(lines)
            self._stream.write("".join(f"{line}\n" for line in lines))
        elif (line := progress_line(progress)) != self._last:
            self._last = line
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the table away from the terminal."""
        if self._num_lines:
            self._stream.write(f"\x1b[{self._num_lines}A")
            self._stream.write(f"{_CLEAR_LINE}\n" * self._num_lines)
            self._stream.write(f"\x1b[{self._num_lines}A")
            self._stream.flush()
        self._num_lines = 0
