"""`gradus agent`: plays one episode of any command, and shows what of it would train."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.cli.options import print_help, take_value, wants_help
from gradus.cli.runs import evaluate
from gradus.config import EvalConfig
from gradus.errors import ConfigError, ExitCode
from gradus.log import shown_text
from gradus.run.episodes import RecordedEpisode, locate_episodes, read_record
from gradus.run.paths import RunDirectory

TASK, REWARD, SAMPLING, NAME = "--task", "--reward", "--sampling-by", "--name"
OUTPUT = "--output-dir"
OPTIONS = {
    f"{TASK} TEXT": "what the agent is told on its standard input; otherwise yours, if it is piped",
    f"{REWARD} F.py:FUN": "a function that rates the episode; otherwise 1 for exit code 0",
    f"{SAMPLING} WHO": "`run` or `program`: who says how its calls are sampled",
}
SUMMARY = (
    "Runs COMMAND once as an episode of MODEL_OR_RUN, with the variables of OpenAI's and "
    "Anthropic's libraries set, and shows its conversation, its tokens and what of them would "
    "train. Files of the current folder that COMMAND names are copied into the agent's own."
)
_CHARACTERS = 600
"""Shown of a message: its beginning and its end."""


def run(words: Sequence[str]) -> int:
    """Play the episode; 70 where it failed."""
    words = list(words)
    own, command = _parted(words)
    if wants_help(own):
        print_help("agent MODEL_OR_RUN -- COMMAND ...", SUMMARY, EvalConfig, OPTIONS, words=own)
        return ExitCode.DONE
    task, rest = take_value(own, TASK, wants="a text")
    reward, rest = take_value(rest, REWARD, wants="a function")
    sampling, rest = take_value(rest, SAMPLING, wants="`run` or `program`")
    name, rest = take_value(rest, NAME, wants="a name")
    folder, rest = take_value(rest, OUTPUT, wants="a folder")
    if not rest or rest[0].startswith(("-", "@")):
        raise ConfigError("name a model or a run: gradus agent MODEL_OR_RUN -- COMMAND ...")
    if not command:
        raise ConfigError("a command is missing; write it after --, e.g. -- python agent.py")
    if task is None:
        task = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    taskset = {
        "command": command,
        "files": _files(command),
        "tasks": [{"prompt": task}],
        "reward": reward or "gradus_program.taskset:ended_well",
        "sampling": sampling or "run",
    }
    name = name or f"agent-{secrets.token_hex(4)}"
    source = {"id": "program", "name": "agent", "group_size": 1, "taskset": taskset}
    given = ["--name", name, "--output-dir", folder or "runs", "--max-retries", "0"]
    given += ["--env", json.dumps([source]), "--model", rest[0]]
    code = evaluate([*given, *rest[1:]])
    if code != ExitCode.DONE:
        return code
    return _show(RunDirectory(Path(folder or "runs") / name))


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first `--`, and the command after it."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _files(command: Sequence[str]) -> list[str]:
    """Files of this folder that the command names, or the folders in which they are."""
    named = [word for word in command if not os.path.isabs(word) and os.path.isfile(word)]
    if outside := [word for word in named if ".." in Path(word).parts]:
        raise ConfigError(
            f"{outside[0]} is not in this folder, from which the agent gets its files; start "
            "gradus agent in a folder that holds it"
        )
    return sorted({str(Path(word).parts[0]) for word in named})


def _show(run_dir: RunDirectory) -> int:
    for file in sorted(run_dir.episodes.glob("step_*/eval.jsonl")):
        for line, episode in locate_episodes(file):
            record = read_record(file, line.start, line.end)
            if episode is not None and record is not None:
                print("\n".join(_lines(episode, record)))
                return ExitCode.INTERNAL if episode.error else ExitCode.DONE
    raise ConfigError(f"{run_dir.root} holds no episode; its logs say why")


def _lines(episode: RecordedEpisode, record: Mapping[str, Any]) -> Iterator[str]:
    for number, trace in enumerate(episode.traces):
        for message in trace.messages:
            who = "model" if message.is_sampled else message.role
            yield f"\n--- {who}\n{shown_text(_short(message.text))}"
        yield from _told(record["traces"][number], episode)
    if episode.error:
        yield f"{'failed':<18}{episode.error}: {shown_text(episode.error_message)}"


def _told(trace: Mapping[str, Any], episode: RecordedEpisode) -> Iterator[str]:
    """What the program did, and how many of the sampled tokens would train."""
    info = trace.get("info") or {}
    program = info.get("program") or {}
    yield ""
    asked = ", ".join(f"{count} by {name}" for name, count in program.get("dialects", {}).items())
    yield f"{'calls':<18}{asked or 'none'}; {program.get('num_streams', 0)} streamed"
    for key, what in (("num_refused", "refused"), ("num_unread", "left by the agent")):
        if program.get(key):
            yield f"{'':<18}{program[key]} {what}"
    for text in program.get("refused", []):
        yield f"{'refused':<18}{shown_text(text)}"
    yield f"{'exit code':<18}{program.get('exit_code')}"
    if program.get("exit_code") and (said := program.get("stderr", "").strip()):
        yield f"{'its last words':<18}{shown_text(said[-_CHARACTERS:])}"
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    yield f"{'reward':<18}{reward}"
    sampled = [node for node in trace.get("nodes") or [] if node.get("sampled")]
    context = set(info.get("quarantined_turns", []))
    counts = [_num_tokens(trace, node) for node in sampled]
    trained = sum(count for turn, count in enumerate(counts) if turn not in context)
    is_lost = bool(episode.error)
    yield f"{'tokens':<18}{sum(counts)} sampled, {0 if is_lost else trained} would train"
    for reason, turns in info.get("untrained_turns", {}).items():
        if turns:
            turn = "turn is" if len(turns) == 1 else "turns are"
            yield f"{'':<18}{len(turns)} {turn} context: {reason}"
    if dropped := program.get("dropped"):
        yield f"{'not used':<18}{json.dumps(dropped)} (of what it asked for)"
    if program.get("lost_reasoning"):
        yield f"{'reasoning':<18}{program['lost_reasoning']} replies came back without theirs"


def _num_tokens(trace: Mapping[str, Any], node: Mapping[str, Any]) -> int:
    """Sampled tokens of a message, by the call that sampled it."""
    place = trace["nodes"].index(node)
    calls = [call for call in trace.get("calls") or [] if call.get("node") == place]
    return sum(int((call.get("usage") or {}).get("completion_tokens") or 0) for call in calls[:1])


def _short(text: str) -> str:
    if len(text) <= _CHARACTERS:
        return text
    half = _CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
