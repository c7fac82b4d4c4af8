"""The task set `program`: prompts for somebody else's program, and what its work is worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, field_validator
from verifiers.v1.runtimes import Runtime

from gradus.errors import ConfigError
from gradus_kit.tasksets.json_lines import rows_of
from gradus_kit.tasksets.rewards import RewardFunction
from gradus_program.harness import ProgramState
from gradus_program.running import Run, read_output
from gradus_program.settings import ProgramKeys, check_program, inside

OFFERED = ("row", "output", "errors", "exit_code", "files", "reply", "trace")
"""Offered to a reward function by name."""


class ProgramConfig(ProgramKeys, vf.TasksetConfig):
    """The program, its tasks, and the function that rates what it did."""

    path: Path | None = None
    """File of JSON lines, one task each."""
    tasks: list[dict[str, Any]] = Field(default_factory=list)
    """Tasks written here, in place of a file."""
    column: str = "prompt"
    """Key of a task that holds what the program is told; what is not text is written as JSON."""
    reward: str = ""
    """The function that rates an episode, as "module:function" or "file.py:function"."""
    outputs: list[str] = Field(default_factory=list)
    """Files of the working folder that the function may read, e.g. ["answer.txt"]."""
    max_file_bytes: int = Field(1_048_576, ge=1)
    """A larger file counts as missing."""

    @field_validator("outputs")
    @classmethod
    def _are_inside(cls, names: list[str]) -> list[str]:
        return [inside(name) for name in names]


class ProgramData(vf.TaskData):
    """One task, and how the program is run for it."""

    row: dict[str, Any]
    """The task as it is written, with the keys that only the reward function reads."""
    program: ProgramKeys
    """The program; a task's own `command` wins over that of the task set."""
    reward: str
    """The function that rates it."""
    outputs: list[str]
    """Files that the function may read."""
    max_file_bytes: int
    """Size up to which they are read."""


class ProgramTask(vf.Task[ProgramData, ProgramState, vf.TaskConfig]):
    """One run of the program."""

    @property
    def key(self) -> str:
        """The identity of the task, whatever runs for it."""
        content = json.dumps([self.data.idx, self.data.row], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @vf.reward  # type: ignore[untyped-decorator]
    async def rated(self, trace: vf.Trace, runtime: Runtime) -> float | dict[str, float]:
        """What the function says; 0 for a program that a deadline ended."""
        function = RewardFunction.load(self.data.reward, offered=OFFERED)
        run = trace.state.run
        if not isinstance(run, Run) or run.exit_code is None:
            return {function.name: 0.0}
        return await function(
            {
                "row": self.data.row,
                "output": run.output.text,
                "errors": run.errors.text,
                "exit_code": run.exit_code,
                "files": await self._files(runtime) if "files" in function.wanted else {},
                "reply": trace.last_reply,
                "trace": trace,
            }
        )

    async def _files(self, runtime: Runtime) -> dict[str, str]:
        """The files that are there, by name; bytes that are not UTF-8 become U+FFFD."""
        found = {}
        for name in self.data.outputs:
            raw = await read_output(runtime, name, self.data.max_file_bytes)
            if raw is not None:
                found[name] = raw.decode(errors="replace")
        return found


def ended_well(exit_code: int) -> float:
    """1 for exit code 0: the reward of an agent that is only tried."""
    return float(exit_code == 0)


class ProgramTaskset(vf.Taskset[ProgramTask, ProgramConfig]):
    """Tasks in the order in which they are written."""

    def load(self) -> Iterable[ProgramTask]:
        """Yield the tasks; ConfigError for what no program could play."""
        config = self.config
        if not config.reward:
            raise ConfigError('`reward` is missing; write e.g. reward = "rewards.py:score"')
        RewardFunction.load(config.reward, offered=OFFERED)
        keys = ProgramKeys.model_validate(config.model_dump(include=set(ProgramKeys.model_fields)))
        rows = list(self._rows())
        if keys.command or not all("command" in row for _, row in rows):
            check_program(keys)
        for where, row in rows:
            data = ProgramData(
                prompt=_text(row, config.column, where),
                row=row,
                program=_own_command(keys, row, where),
                reward=config.reward,
                outputs=config.outputs,
                max_file_bytes=config.max_file_bytes,
            )
            yield ProgramTask(data, config.task)

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        config = self.config
        if (config.path is None) == (not config.tasks):
            raise ConfigError("give either `path`, a file of JSON lines, or `tasks`, a list")
        if config.path is None:
            yield from ((f"tasks[{n}]", row) for n, row in enumerate(config.tasks))
            return
        yield from rows_of(config.path)


def _text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise ConfigError(f"{where} has no {column!r}; it has {', '.join(row) or 'no keys'}")
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value)


def _own_command(keys: ProgramKeys, row: dict[str, Any], where: str) -> ProgramKeys:
    if "command" not in row:
        return keys
    try:
        own = ProgramKeys.model_validate({**keys.model_dump(), "command": row["command"]})
    except ValueError as error:
        raise ConfigError(f"{where}: `command` must be a list of texts") from error
    check_program(own)
    return own
