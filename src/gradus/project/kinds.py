"""What can be begun: which options go together, and what each kind writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradus.errors import ConfigError
from gradus.plugins import REWARD_ARGUMENTS
from gradus.project.rows import TaskRow, read_task_rows

TURNS = 3
"""Replies of the model in a kind with several turns."""
_COMPUTE = {
    "name": "calculator_compute",
    "description": "The value of an expression such as 12 * (3 + 4).",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "title": "Expression"}},
        "required": ["expression"],
    },
}


@dataclass(frozen=True)
class TaskKind:
    """One kind of tasks over rows of a file."""

    flag: str
    """The option that asks for it; "" for replies to prompts."""
    tells: str
    """What it is, for a person."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Templates → files, beside rows and reward."""
    environment: str = "$task_id"
    """The id of its environment; that of the written module by default."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the task set."""
    offered: Sequence[str] = REWARD_ARGUMENTS
    """What a reward function may ask for."""
    turns: int = 1
    tools: Sequence[Mapping[str, Any]] = ()
    starts_programs: bool = False
    """Whether each episode starts a process."""
    no_sft: str = ""
    """Why the answers teach nothing; "" where they do."""


KINDS = {
    "": TaskKind("", "the model replies once to a prompt", environment="jsonl"),
    "--tools": TaskKind(
        "--tools",
        "the model replies with tools, of which a calculator is there",
        {"tools.py": "{module}.py"},
        turns=TURNS,
        tools=[{"type": "function", "function": _COMPUTE}],
        no_sft="the answers show no call of a tool and would teach to do without",
    ),
    "--multi-turn": TaskKind(
        "--multi-turn",
        f"the model replies up to {TURNS} times, until it is right",
        {"multi_turn.py": "{module}.py"},
        turns=TURNS,
    ),
    "--agent": TaskKind(
        "--agent",
        "a program that asks the model itself",
        {"agent.py": "agent.py"},
        environment="program",
        starts_programs=True,
        keys={"command": ["python", "agent.py"], "files": ["agent.py"]},
        offered=("row", "output", "errors", "exit_code", "files", "reply", "trace"),
    ),
}
"""By their flags."""


@dataclass(frozen=True)
class DataWish:
    """Which rows."""

    path: str
    """A file, a folder, or a data set of the hub."""
    split: str = "train"
    subset: str | None = None

    def __str__(self) -> str:
        return self.path

    def rows(self) -> list[TaskRow]:
        return read_task_rows(self.path, split=self.split, subset=self.subset)


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    kind: TaskKind
    rows: Sequence[TaskRow]
    reward: str | None = None
    """`file.py:function` or `module:function`; None for the one that compares with the answer."""
    model: str | None = None
    """A folder or a name on the hub; None for a tiny untrained model."""

    @classmethod
    def of(
        cls, flags: Sequence[str], data: DataWish | None, reward: str | None, model: str | None
    ) -> Wish:
        """ConfigError for options that contradict each other or the rows."""
        kind = kind_of(flags)
        if reward is not None and data is None:
            raise ConfigError("--reward rates replies to rows of yours; name them with --from")
        rows = _sums() if data is None else data.rows()
        if rows[0].answer is None and reward is None:
            raise ConfigError(
                f"{data} has no answers to compare a reply with (a key such as `answer`); add "
                "them, or give a function that rates a reply: --reward rewards.py:score"
            )
        if kind.flag == "--agent" and not all(isinstance(row.prompt, str) for row in rows):
            raise ConfigError(f"--agent gives its program one text, and {data} holds messages")
        return cls(kind, rows, reward, model)


def kind_of(flags: Sequence[str]) -> TaskKind:
    """The kind that was asked for; ConfigError for two at once."""
    if len(flags) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(flags))} do not go together: --agent brings tools and turns of "
            "its own, and a task with tools has several turns already; choose one and change the "
            "file that it writes"
        )
    return KINDS[flags[0] if flags else ""]


def _sums(number: int = 240) -> list[TaskRow]:
    """Rows for who brings none: products small enough for a small model."""
    found = []
    for place in range(number):
        a, b = 2 + place % 11, 3 + place * 7 % 17
        found.append(TaskRow.of({"prompt": f"{a} * {b} = ?", "answer": str(a * b)}, f"row {place}"))
    return found
