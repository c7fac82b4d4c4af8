"""`gradus chat`: talk to a model, to what a run has trained, or to a server that runs already."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import httpx
import openai

from gradus.cli.options import print_help, take_value, wants_help
from gradus.cli.serve import STARTING, TOKEN_FILE
from gradus.config import ServeConfig
from gradus.errors import ConfigError, ExitCode, ProcessError, first_line
from gradus.files import write_json
from gradus.installed import PLAYED, has_plugin
from gradus.log import shown_text
from gradus.plan.endpoints import is_on_this_machine
from gradus.processes.child import dying_with_parent
from gradus.run.json_lines import LineTail

if TYPE_CHECKING:
    from gradus.conformance.reading import Subject

SYSTEM, TEMPERATURE, MAX_TOKENS = "--system", "--temperature", "--max-tokens"
NAME, KEY_VAR = "--name", "--api-key-var"
ENVIRONMENT, TASK = "--env", "--task"
OPTIONS = {
    f"{SYSTEM} TEXT": "the system prompt",
    f"{TEMPERATURE} X": "sampling temperature; the server's own unless given",
    f"{MAX_TOKENS} N": "most tokens of a reply; the server's own unless given",
    f"{KEY_VAR} VAR": "variable that holds the key of a server at a URL",
    f"{NAME} MODEL": "the model of a server at a URL that has several",
    f"{ENVIRONMENT} ID": "play a task of an environment, or of a run's FILE.toml, as its user",
    f"{TASK} N": "which of its tasks, from 0",
}
SUMMARY = (
    "Talks to MODEL_OR_RUN_OR_URL; two of them answer the same words in turn. A URL is that of an "
    f"OpenAI-compatible server, whose model {NAME} chooses where it has several; anything else is "
    "served by `gradus serve` with the keys below until you leave. Ctrl-C ends a reply; /reset "
    "begins anew; /quit or Ctrl-D leaves."
)
_STOP_SECONDS = 60.0
_KEY = "GRADUS_CHAT_KEY"
"""Variable that holds the key of the server for the process of an environment."""
_NO_DEADLINES = {"setup": 600.0, "rollout": 86_400.0, "finalize": 600.0, "scoring": 600.0}
"""Of an episode that a person plays."""
_API = re.compile(r"/v\d+$")
"""What ends the path of an OpenAI-compatible server."""
_THOUGHTS = ("reasoning", "reasoning_content")
_ENDS = {"length": " [cut off: the most tokens]", "tool_calls": " [calls a tool]"}
"""How a reply ended → what is said of it."""
_NONSENSE = (ValueError, AttributeError, TypeError)
"""What the client raises for an answer of another form, such as a page."""
_FAULTS = (openai.OpenAIError, httpx.HTTPError, httpx.InvalidURL, *_NONSENSE)
"""What a server, or a network, can do to a request."""
_LOOK_SECONDS = 0.1
_LAST_LINES = 12
_URLS = ("http://", "https://")
_MEMORY, _HALF = "gpu_memory_utilization", 0.45
_PORT = re.compile(r"--(inference\.)?port(=.*)?")
"""Of the memory of a GPU, for each of two servers."""
_SERVE = "gradus serve: "
"""Begins the lines in which the server says why it ends."""
_SHOWN = ("model", "precision")
"""First words of the lines of `gradus serve` that are shown while it starts."""


@dataclass
class Chat:
    """One conversation with a served model."""

    client: openai.OpenAI
    model: str
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature` and `max_tokens`, where somebody chose them."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, shown: IO[str]) -> None:
        """Write the reply as it comes, and keep both; Ctrl-C keeps what was said until then.

        ProcessError when the server refuses or does not answer; then neither is kept, and the
        conversation can continue.
        """
        said = [{"role": "user", "content": text}]
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked: Any = [*head, *self.messages, *said]
        reply: list[str] = []
        end = ""
        try:
            with self.client.chat.completions.create(
                model=self.model, messages=asked, stream=True, **self.sampling
            ) as chunks:
                for chunk in chunks:
                    if not chunk.choices:
                        continue
                    delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
                    # Thoughts are shown and, as templates have it, not sent again.
                    thoughts = (getattr(delta, name, None) for name in _THOUGHTS)
                    content = delta.content or ""
                    reply.append(content)
                    shown.write(shown_text(next(filter(None, thoughts), "") + content))
                    shown.flush()
                    end = _ENDS.get(reason or "", end)
        except _FAULTS as error:
            if any(reply):
                shown.write("\n")
            raise _unanswered(self.client, error) from error
        except KeyboardInterrupt:
            end = " [stopped]"
        shown.write(f"{end}\n")
        self.messages += [*said, {"role": "assistant", "content": "".join(reply)}]


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        usage = "chat MODEL_OR_RUN_OR_URL [ANOTHER]"
        print_help(usage, SUMMARY, ServeConfig, OPTIONS, words=words)
        return ExitCode.DONE
    system, rest = take_value(words, SYSTEM, wants="a text")
    temperature, rest = take_value(rest, TEMPERATURE, wants="a number")
    max_tokens, rest = take_value(rest, MAX_TOKENS, wants="a number of tokens")
    key_var, rest = take_value(rest, KEY_VAR, wants="the name of a variable")
    environment, rest = take_value(rest, ENVIRONMENT, wants="the id of an environment, or a file")
    task, rest = take_value(rest, TASK, wants="the number of a task")
    sampling = {
        "temperature": _number(TEMPERATURE, temperature, float),
        "max_tokens": _number(MAX_TOKENS, max_tokens, int),
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
    targets = list(itertools.takewhile(lambda word: not word.startswith(("-", "@")), rest))
    if len(targets) not in (1, 2):
        raise ConfigError("name a model, a run or a URL, or two: gradus chat MODEL_OR_RUN_OR_URL")
    if len(set(targets)) < len(targets):
        raise ConfigError(f"{targets[0]} is named twice; name two models or runs")
    if key_var is not None and not any(target.startswith(_URLS) for target in targets):
        raise ConfigError(f"{KEY_VAR} is for a URL, and {targets[0]} is none")
    number = _number(TASK, task, int)
    if environment is None and number is not None:
        raise ConfigError(f"{TASK} is one of an environment; name it with {ENVIRONMENT}")
    if environment is not None and (len(targets) > 1 or system is not None):
        raise ConfigError(
            f"{ENVIRONMENT} plays with one model, and the environment says what it is told first"
        )
    # What is wrong with an environment is said before a model is loaded.
    subject = None if environment is None else _played(environment)
    options = _shared(targets, rest[len(targets) :])
    with contextlib.ExitStack() as stack:
        chats = [
            Chat(*_opened(target, _for(target, targets, options), key_var, stack), system, sampling)
            for target in targets
        ]
        if subject is not None:
            return _play(chats[0], subject, number or 0)
        titles = dict(zip(targets, chats, strict=True)) if len(chats) > 1 else {"": chats[0]}
        _converse(titles, sys.stdin, sys.stdout)
    return ExitCode.DONE


def _shared(targets: Sequence[str], options: Sequence[str]) -> list[str]:
    """The options, with half of a GPU for each of two models that are served on the same one."""
    served = [target for target in targets if not target.startswith(_URLS)]
    is_chosen = any(_MEMORY in option.replace("-", "_") or option == "@" for option in options)
    if len(served) > 1 and (port := next(filter(_PORT.fullmatch, options), None)):
        raise ConfigError(f"{port}: two models are served, each at a port of its own; leave it out")
    if len(served) < 2 or is_chosen:
        return list(options)
    return [*options, f"--inference.{_MEMORY}", str(_HALF)]


def _for(target: str, targets: Sequence[str], options: Sequence[str]) -> list[str]:
    """The options for a target: of a URL and a model, the URL has the name, the model the rest."""
    if len({it.startswith(_URLS) for it in targets}) == 1:
        return list(options)
    name, others = take_value(options, NAME, wants="the name of a model")
    named = [] if name is None else [NAME, name]
    return named if target.startswith(_URLS) else others


def _opened(
    target: str, options: Sequence[str], key_var: str | None, stack: contextlib.ExitStack
) -> tuple[openai.OpenAI, str]:
    """A client of what was named, and its model; a model is served as long as the stack lasts."""
    name = None
    if target.startswith(_URLS):
        client, name = _client_of_url([target, *options], key_var)
    else:
        client = stack.enter_context(_served([target, *options]))
    stack.enter_context(client)
    return client, _model_of(client, name)


def _played(environment: str) -> Subject:
    """The environment by its id, or the first source of a file; ConfigError for none."""
    from gradus.cli.env import sources_of, subject_of

    words = ["@", environment] if environment.endswith(".toml") else [environment]
    source = sources_of(words, seconds=_NO_DEADLINES)[0]
    if source.python is not None and shutil.which(source.python) is None:
        text = f"python = {source.python!r} is no program; name the `bin/python` of a virtual"
        raise ConfigError(f"{ENVIRONMENT} {environment}: {text} environment")
    wanted = str(source.taskset.get("id", source.id))
    if source.python is None and not has_plugin(wanted, PLAYED):
        raise ConfigError(f"{ENVIRONMENT} {environment}: {source.id!r} is not installed, nor here")
    return subject_of(source)


def _play(chat: Chat, subject: Subject, number: int) -> int:
    """One task in a process with the variables of the environment; its exit code."""
    with tempfile.TemporaryDirectory(prefix="gradus-chat-") as folder:
        file = Path(folder) / "request.json"
        request = {
            "config": subject.process.model_dump(mode="json"),
            "base_url": str(chat.client.base_url),
            "model": chat.model,
            "sampling": dict(chat.sampling),
            "task": number,
            "api_key_var": _KEY,
        }
        write_json(file, request, mode=0o600)
        python = subject.process.python or sys.executable
        command = [python, "-P", "-m", "gradus.environments.talk", str(file)]
        variables = {**subject.variables, _KEY: chat.client.api_key}
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with subprocess.Popen(dying_with_parent(command), env=variables) as child:
                return child.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def _converse(chats: Mapping[str, Chat], typed: IO[str], shown: IO[str]) -> None:
    """Until the end of the input. A fault ends it, but for a person, who may try again. Of two,
    each says under its title what it makes of the same words."""
    is_person = typed.isatty()
    if is_person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit lines and remember them
        names = " and ".join(title or chat.model for title, chat in chats.items())
        shown.write(f"{names}: Ctrl-C ends a reply, /reset begins anew, /quit leaves\n")
    while True:
        try:
            text = input("> ") if is_person else typed.readline()
        except (EOFError, KeyboardInterrupt):
            shown.write("\n")
            return
        if not is_person and not text:
            return
        text = text.strip()
        if text == "/quit":
            return
        for title, chat in chats.items():
            if text == "/reset":
                chat.messages.clear()
            elif text:
                shown.write(f"--- {title}\n" if title else "")
                try:
                    chat.say(text, shown)
                except ProcessError as error:
                    if not is_person:
                        raise
                    shown.write(f"{error}\n")


def _client_of_url(rest: Sequence[str], key_var: str | None) -> tuple[openai.OpenAI, str | None]:
    name, others = take_value(rest[1:], NAME, wants="the name of a model")
    if others:
        raise ConfigError(f"{others[0]} is for a model that `gradus chat` serves, not for a URL")
    key = "" if key_var is None else os.environ.get(key_var, "")
    if key_var is not None and not key:
        raise ConfigError(f"{KEY_VAR} {key_var}: the variable is not set")
    if not key.isascii():
        raise ConfigError(f"{KEY_VAR} {key_var}: a key is printable ASCII")
    url = rest[0].rstrip("/")
    try:
        parts = urlsplit(url)
        is_here = is_on_this_machine(url)
        is_ended = bool(_API.search(parts.path))
    except ValueError as error:
        raise ConfigError(f"{url} is not a URL: {error}") from error
    if parts.username or parts.password:
        raise ConfigError(f"keep the key out of the URL; give it with {KEY_VAR} VAR")
    return _client(url if is_ended else f"{url}/v1", key or "none", is_here=is_here), name


def _client(url: str, key: str, *, is_here: bool) -> openai.OpenAI:
    """A client that asks no proxy for what is on this machine."""
    http = openai.DefaultHttpxClient(trust_env=not is_here)
    return openai.OpenAI(base_url=url, api_key=key, http_client=http)


def _model_of(client: openai.OpenAI, name: str | None) -> str:
    """The model of that name, or the only one that the server has."""
    try:
        known = [model.id for model in client.models.list()]
    except _FAULTS as error:
        raise _unanswered(client, error) from error
    if not known:
        raise ConfigError(f"{client.base_url} serves no model")
    if name is None and len(known) == 1:
        return known[0]
    if name in known:
        return str(name)
    problem = "serves several models" if name is None else f"has no model {name!r}"
    raise ConfigError(f"{client.base_url} {problem}; name one with {NAME}: {', '.join(known)}")


def _unanswered(client: openai.OpenAI, error: Exception) -> ProcessError:
    refuses = isinstance(error, openai.APIStatusError)
    return ProcessError(
        f"{client.base_url} {'refuses' if refuses else 'does not answer'}: {first_line(error)}"
    )


def _leave(*_: object) -> NoReturn:
    raise SystemExit(ExitCode.TRY_AGAIN)


@contextlib.contextmanager
def _stops_handled() -> Iterator[None]:
    """A closed terminal and a SIGTERM leave as Ctrl-D does, with the server stopped."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _served(words: Sequence[str]) -> Iterator[openai.OpenAI]:
    """A client of `gradus serve WORDS`, which runs meanwhile."""
    with _stops_handled(), tempfile.TemporaryDirectory(prefix="gradus-chat-") as folder:
        token_file = Path(folder) / "token"
        command = [sys.executable, "-P", "-m", "gradus.cli.main", "serve", *words]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                # A Ctrl-C that ends a reply must not reach it.
                dying_with_parent([*command, TOKEN_FILE, str(token_file)]),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            url = _address(server, log)
            yield _client(url, token_file.read_text().strip(), is_here=True)
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where it serves, told at the end of what it prints; its error when it ends before."""
    tail = LineTail(log)
    said: deque[str] = deque(maxlen=_LAST_LINES)
    while True:
        has_ended = server.poll() is not None
        for line in tail.read():
            if line.startswith("serves at"):
                return line.split()[-1]
            said.append(line)
            if line.partition(" ")[0] in _SHOWN:
                print(line, flush=True)
            elif line.startswith(STARTING):
                print(STARTING, flush=True)
        if has_ended:
            refused = [line.partition(_SERVE)[2] for line in said if line.startswith(_SERVE)]
            if refused and server.returncode == ExitCode.CONFIG:
                raise ConfigError("\n".join(line.removeprefix("--model: ") for line in refused))
            end = "\n".join(said)
            text = f"the model cannot be served, exit code {server.returncode}:\n{end}"
            raise (ConfigError if server.returncode == ExitCode.CONFIG else ProcessError)(text)
        time.sleep(_LOOK_SECONDS)


def _number(option: str, text: str | None, kind: type) -> Any:
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        number = kind(text)
        if math.isfinite(number):
            return number
    raise ConfigError(f"{option}: {text!r} is not a number")
