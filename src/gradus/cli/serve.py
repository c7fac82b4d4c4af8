"""`gradus serve`: a model, or what a run has trained, behind an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.config import InferenceProcessConfig, ModelConfig, ServeConfig, load_config
from gradus.errors import ConfigError, ProcessError
from gradus.files import read_json, write_atomically
from gradus.launch.job import precision_warnings, with_dtypes, with_trial
from gradus.log import configure_logging, end_quietly
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.placement import GpuWish, place
from gradus.plan.processes import Machine
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import read_marker
from gradus.run.model_files import is_model, published_models
from gradus.run.paths import GOOD_OUTCOMES, RunDirectory

NO_TOKEN, TOKEN_FILE = "--no-token", "--token-file"
OPTIONS = {
    f"{TOKEN_FILE} FILE": "the token that clients send; FILE is made when there is none",
    NO_TOKEN: "let anyone on this machine in; only on a loopback address",
}
SUMMARY = (
    "Serves MODEL_OR_RUN, a model directory, a name on the hub, a run, or a checkpoint, to any "
    "OpenAI client until Ctrl-C. '--port' and '--host' are short for '--inference.port' and "
    "'--inference.host'. A token is made and printed unless you give one."
)
STARTING = "starting vLLM"
"""Begins the line before the address."""
_SHORT = {"--port": "--inference.port", "--host": "--inference.host"}


@dataclass(frozen=True)
class ServedSource:
    """What is served, found on this disk or left to the hub."""

    place: str
    """A model directory, a checkpoint, or a name on the hub."""
    name: str
    """What clients call it unless the user says otherwise."""
    is_checkpoint: bool = False
    """Whether it must be written as a model directory first."""


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print_help("serve MODEL_OR_RUN", SUMMARY, ServeConfig, OPTIONS, words=words)
        return 0
    file, rest = take_value(words, TOKEN_FILE, wants="a file")
    taken, rest = take_options(rest, {NO_TOKEN: ""})
    if taken and file is not None:
        raise ConfigError(f"{NO_TOKEN} and {TOKEN_FILE} contradict each other; use one of them")
    machine = Machine.current()
    gpus = machine.gpus
    config = load_config(ServeConfig, _spelled_out(rest), check=partial(check, gpus=gpus))
    here = with_trial(Hardware.current(gpus), config, machine)
    config = with_dtypes(config, here)
    for line in precision_warnings(config, here):
        print(f"{'precision':<12}{line}")
    placement = place({"inference": GpuWish.of(config.inference)}, gpus, may_share=False)
    os.environ.update(placement.variables("inference", gpus, os.environ))
    source = find_source(config.model)
    configure_logging("serve")
    end_quietly()

    from gradus.inference.parsers import Parsers, find_parsers
    from gradus.inference.server import ask_hub, check_model, run_model_server
    from gradus.inference.settings import ServedModel

    with model_directory(source) as model:
        process = _process_config(config, model)
        check_model(process.model)
        ask_hub(model)
        found = find_parsers(model, config.tokenizer)
        parsers = Parsers(
            found.tool if config.tool_parser == "auto" else config.tool_parser,
            found.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser,
        )
        token = None if taken else read_token(file)
        name = config.name or source.name
        print(f"{'model':<12}{source.place}\n{'name':<12}{name}")
        tools, reasoning = parsers.tool or "none", parsers.reasoning or "none"
        print(f"{'parsers':<12}tools {tools}, reasoning {reasoning}")
        if token is not None and file is None:
            print(f"{'token':<12}{token}")
        print(f"{STARTING}; the address follows", flush=True)
        run_model_server(
            ServedModel(process, name, parsers, config.max_length_tokens is None, token),
            lambda base_url: print(f"{'serves at':<12}{base_url}/v1", flush=True),
        )
    return 0


def _spelled_out(words: Sequence[str]) -> list[str]:
    """The model in front as `--model`, and short flags in full."""
    rest = list(words)
    if rest and not rest[0].startswith(("-", "@")):
        rest = ["--model", *rest]
    spelled = []
    for word in rest:
        flag, equals, value = word.partition("=")
        spelled.append(f"{_SHORT.get(flag, flag)}{equals}{value}")
    return spelled


def _process_config(config: ServeConfig, model: str) -> InferenceProcessConfig:
    model_config = ModelConfig(
        name=model, tokenizer=config.tokenizer, trust_remote_code=config.trust_remote_code
    )
    if config.max_length_tokens is not None:
        length = {"max_length_tokens": config.max_length_tokens}
        model_config = model_config.model_copy(update=length)
    return InferenceProcessConfig(
        run_dir="",
        term=0,
        model=model_config,
        seed=config.seed,
        inference=config.inference,
    )


def find_source(model: str) -> ServedSource:
    """What `model` means; ConfigError for a folder that holds nothing to serve."""
    folder = Path(model)
    if not folder.is_dir():
        return ServedSource(model, model)
    path = folder.resolve()
    if (path / "config.json").is_file():
        return ServedSource(str(path), _name_of(path))
    if path.parent.name == "checkpoints":
        return ServedSource(str(path), f"{path.parent.parent.name}-{path.name}", is_checkpoint=True)
    run_dir = RunDirectory(path)
    if read_marker(run_dir) is None:
        raise ConfigError(
            f"{model} is neither a model directory (it has no config.json) nor a run of gradus"
        )
    return _newest(run_dir)


def _name_of(path: Path) -> str:
    """The folder's own name, or for a model of a run the run's."""
    if read_marker(RunDirectory(path.parent)) is not None:
        return path.parent.name
    return path.name


def _newest(run_dir: RunDirectory) -> ServedSource:
    """The final model of a run that is done; else its newest published version or checkpoint."""
    name = run_dir.root.name
    final = ServedSource(str(run_dir.model), name) if is_model(run_dir.model) else None
    if final is not None and _is_done(run_dir):
        return final
    versions = published_models(run_dir).items()
    found = [(version, ServedSource(str(path), name)) for version, path in versions]
    found += [
        (step, ServedSource(str(path), name, is_checkpoint=True))
        for step, path in CheckpointStore(run_dir, term=0).folders()
    ]
    if found:
        return max(found, key=lambda it: (it[0], not it[1].is_checkpoint))[1]
    if final is not None:
        return final
    raise ConfigError(
        f"{run_dir.root} has trained nothing that could be served: no model, no published version, "
        "no checkpoint"
    )


def _is_done(run_dir: RunDirectory) -> bool:
    if not run_dir.summary.is_file():
        return False
    summary = read_json(run_dir.summary)
    return isinstance(summary, dict) and summary.get("outcome") in GOOD_OUTCOMES


@contextlib.contextmanager
def model_directory(source: ServedSource) -> Iterator[str]:
    """The model as a directory or a name of the hub; a checkpoint is written for the time of it."""
    if not source.is_checkpoint:
        yield source.place
        return
    with tempfile.TemporaryDirectory(prefix="gradus-serve-") as folder:
        target = str(Path(folder) / "model")
        # A separate process: torch must not be loaded here before vLLM's variables are set.
        command = [sys.executable, "-m", "gradus.cli.main", "export", source.place, target]
        if subprocess.run(command, check=False).returncode != 0:
            raise ProcessError(f"{source.place} cannot be written as a model; see the lines above")
        yield target


def read_token(file: str | None) -> str:
    """The token in a file; a new one, which is written there when a file is named."""
    if file is None:
        return secrets.token_urlsafe(32)
    path = Path(file)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        write_atomically(path, f"{token}\n".encode(), mode=0o600)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE} {file}: cannot be read ({error})") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{TOKEN_FILE} {file}: a token is one word of printable ASCII")
    return token
