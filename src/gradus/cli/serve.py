"""`gradus serve`: a model, or what a run has trained, behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.cli.options import print_help, take_options, take_value, wants_help
from gradus.config import InferenceProcessConfig, ModelConfig, ServeConfig, load_config
from gradus.errors import ConfigError, ProcessError, StorageError
from gradus.files import read_json, remove, storage_error, write_atomically, write_json
from gradus.launch.job import precision_warnings, with_dtypes, with_trial
from gradus.log import configure_logging, end_quietly
from gradus.plan.hardware import Hardware
from gradus.plan.machine import check
from gradus.plan.placement import GpuWish, place
from gradus.plan.processes import Machine
from gradus.processes.child import watch_death_pipe
from gradus.processes.listening import bind, resolve_host
from gradus.processes.started import Listens, ProcessFailed, ProcessSpec
from gradus.processes.supervisor import Supervisor, become_subreaper
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import read_marker
from gradus.run.model_files import ask_hub, is_model, published_models
from gradus.run.paths import GOOD_OUTCOMES, RunDirectory

if TYPE_CHECKING:
    from gradus.environments.policy.router import Router
    from gradus.inference.parsers import Parsers

NO_TOKEN, TOKEN_FILE = "--no-token", "--token-file"
OPTIONS = {
    f"{TOKEN_FILE} FILE": "the token that clients send; FILE is made when there is none",
    NO_TOKEN: "let anyone on this machine in; only on a loopback address",
}
SUMMARY = (
    "Serves MODEL_OR_RUN, a model directory, a name on the hub, a run, or a checkpoint, to any "
    "OpenAI client until Ctrl-C. '--port' and '--host' are short for '--inference.port' and "
    "'--inference.host', '--replicas N' starts N servers behind one address. A token is made and "
    "printed unless you give one."
)
STARTING = "starting vLLM"
"""Begins the line before the address."""
_SHORT = {
    "--port": "--inference.port",
    "--host": "--inference.host",
    "--replicas": "--inference.replicas",
}
_READY_FILE = "--ready-file"
"""Of a replica: where it says that it serves, to the one that started it."""
_RESTARTS = 5
"""How often within an hour a replica starts again; then it stays out while another serves."""
_START_SECONDS = 1800.0
_STOP_SECONDS = 8.0
_LOOK_SECONDS = 0.2


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
    watch_death_pipe()
    file, rest = take_value(words, TOKEN_FILE, wants="a file")
    ready_file, rest = take_value(rest, _READY_FILE, wants="a file")
    taken, rest = take_options(rest, {NO_TOKEN: ""})
    if taken and file is not None:
        raise ConfigError(f"{NO_TOKEN} and {TOKEN_FILE} contradict each other; use one of them")
    gpus = (machine := Machine.current()).gpus
    config = load_config(ServeConfig, _spelled_out(rest), check=partial(check, gpus=gpus))
    here = with_trial(Hardware.current(gpus), config, machine)
    config = with_dtypes(config, here)
    for line in precision_warnings(config, here):
        print(f"{'precision':<12}{line}")
    placement = place({"inference": GpuWish.of(config.inference)}, gpus, may_share=False)
    placement = placement.split("inference", config.inference.processes)
    os.environ.update(placement.variables("inference", gpus, os.environ))
    source = find_source(config.model)
    configure_logging("serve")
    end_quietly()

    from gradus.inference.server import check_model, run_model_server
    from gradus.inference.settings import ServedModel

    with model_directory(source) as model:
        process = _process_config(config, model)
        check_model(process.model)
        ask_hub(model)
        parsers = _parsers(config, model)
        token = _open_to_all(config.inference.host) if taken else read_token(file)
        name = config.name or source.name
        print(f"{'model':<12}{source.place}\n{'name':<12}{name}")
        tools, reasoning = parsers.tool or "none", parsers.reasoning or "none"
        print(f"{'parsers':<12}tools {tools}, reasoning {reasoning}")
        if token is not None and file is None:
            print(f"{'token':<12}{token}")
        print(f"{STARTING}; the address follows", flush=True)

        def tell(base_url: str) -> None:
            if ready_file is not None:
                write_json(Path(ready_file), {"base_url": base_url})
            print(f"{'serves at':<12}{base_url}/v1", flush=True)

        if config.inference.replicas == 1:
            has_own_length = config.max_length_tokens is None
            run_model_server(ServedModel(process, name, parsers, has_own_length, token), tell)
            return 0
        config = config.model_copy(update={"model": model, "name": name})
        variables = {
            it: {**os.environ, **placement.variables(it, gpus, os.environ)}
            for it in config.inference.processes
        }
        with _replica_folder() as folder:
            specs, own_token = _replica_specs(config, variables, folder, machine.num_cores)
            own = config.inference
            with bind(own.host, own.port, allow_public_bind=own.allow_public_bind) as listener:
                serve_replicas(specs, listener, tell, token=token, own_token=own_token)
    return 0


def _open_to_all(host: str) -> str | None:
    """No token; ConfigError where others than users of this machine could come in without one."""
    if resolve_host(host).is_loopback:
        return None
    raise ConfigError(
        f"{NO_TOKEN}: {host!r} can be reached from other machines; leave {NO_TOKEN} away, or serve "
        "on 127.0.0.1"
    )


def _parsers(config: ServeConfig, model: str) -> Parsers:
    from gradus.inference.parsers import Parsers, find_parsers

    found = find_parsers(model, config.tokenizer)
    return Parsers(
        found.tool if config.tool_parser == "auto" else config.tool_parser,
        found.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser,
    )


@contextlib.contextmanager
def _replica_folder() -> Iterator[Path]:
    """What replicas read and write; after a failure their logs stay, which the error names."""
    folder = Path(tempfile.mkdtemp(prefix="gradus-replicas-"))
    is_failed = False
    try:
        yield folder
    except ProcessFailed:
        is_failed = True
        raise
    finally:
        for path in folder.iterdir():
            if not is_failed or path.suffix != ".log":
                remove(path)
        if not is_failed:
            folder.rmdir()


def _replica_specs(
    config: ServeConfig, variables: Mapping[str, Mapping[str, str]], folder: Path, num_cores: int
) -> tuple[list[ProcessSpec], str]:
    """A `gradus serve` for each replica, on a port of loopback that the others keep, and their
    token."""
    token = read_token(str(folder / "token"))
    one = {"replicas": 1, "port": 0, "host": "127.0.0.1", "gpus": None}
    alone = config.model_copy(update={"inference": config.inference.model_copy(update=one)})
    write_atomically(folder / "serve.json", alone.model_dump_json().encode())
    threads = {"OMP_NUM_THREADS": str(max(1, (num_cores - 1) // len(variables)))}
    specs = []
    for name, own in variables.items():
        words = ("serve", "@", str(folder / "serve.json"), TOKEN_FILE, str(folder / "token"))
        ready = folder / f"{name}.json"
        specs.append(
            ProcessSpec(
                name,
                (sys.executable, "-P", "-m", "gradus.cli.main", *words, _READY_FILE, str(ready)),
                {**threads, **own},
                log=folder / f"{name}.log",
                ready_file=ready,
                restarts=_RESTARTS,
                ends_its_children=True,
                listens=Listens("127.0.0.1", 0),
            )
        )
    return specs, token


def serve_replicas(
    specs: Sequence[ProcessSpec],
    listener: socket.socket,
    tell: Callable[[str], None],
    *,
    token: str | None,
    own_token: str,
) -> None:
    """Start these servers, which want `own_token`, and serve them as one to those who send `token`,
    until SIGTERM or SIGINT, which ends all."""
    from gradus.environments.policy.router import Router

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    become_subreaper()
    found: dict[str, str] = {}
    with Supervisor(
        specs[0].log.parent / "pids.json",
        stop_timeout_seconds=_STOP_SECONDS,
        on_restart=partial(print, flush=True),
    ) as supervisor:
        supervisor.wait_ready(
            [supervisor.start(spec) for spec in specs],
            timeout_seconds=_START_SECONDS,
            on_ready=lambda child, said: found.update({child.spec.name: str(said["base_url"])}),
        )
        router = Router([found[spec.name] for spec in specs], token=own_token)
        asyncio.run(_serve_in_front(router, supervisor, found, listener, token, tell))


async def _serve_in_front(
    router: Router,
    supervisor: Supervisor,
    addresses: Mapping[str, str],
    listener: socket.socket,
    token: str | None,
    tell: Callable[[str], None],
) -> None:
    from gradus.inference.guard import Guard, ServedToken
    from gradus.inference.http_server import Stop, build_http_server, serve_until_stopped

    stop = Stop()
    server = build_http_server(Guard(router, ServedToken.of(token)))

    async def when_listening(base_url: str) -> None:
        tell(base_url)

    async def watch() -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(supervisor.check)
            except ProcessFailed as error:
                name = error.fault.process
                if not supervisor.serving(besides=name):
                    stop.fail(error)
                    return
                print(f"{error}; {name} stays out, and the others serve", flush=True)
                supervisor.replace(name, None, wait_seconds=0.0, ready_seconds=0.0)
            serving = {addresses[name] for name in supervisor.serving(besides="")}
            for replica in router.replicas.all:
                if replica.address not in serving:
                    router.replicas.lose(replica, "its process ended")

    def note_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            stop.fail(ProcessError(f"the servers can no longer be looked after: {error}"))

    watching = asyncio.ensure_future(watch())
    watching.add_done_callback(note_end)
    try:
        await serve_until_stopped(server, listener, stop=stop, when_listening=when_listening)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await router.close()


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
    """The model as a directory or a name of the hub; a checkpoint is written for the time of it,
    and a version is held on to, since a run that goes on deletes it."""
    place = Path(source.place)
    is_version = (
        place.name.startswith("version_")
        and read_marker(RunDirectory(place.parent.parent)) is not None
    )
    if not (source.is_checkpoint or is_version):
        yield source.place
        return
    beside = _beside(place) if is_version else None
    with tempfile.TemporaryDirectory(prefix=".gradus-serve-", dir=beside) as folder:
        target = str(Path(folder) / "model")
        if is_version:
            try:
                shutil.copytree(place, target, copy_function=_link)
            except OSError as error:
                if is_model(place):
                    raise storage_error(error, Path(target)) from error
                raise StorageError(f"{place} was deleted meanwhile; serve a newer one") from error
            yield target
            return
        # A separate process: torch must not be loaded here before vLLM's variables are set.
        command = [sys.executable, "-P", "-m", "gradus.cli.main", "export", source.place, target]
        if subprocess.run(command, check=False).returncode != 0:
            raise ProcessError(f"{source.place} cannot be written as a model; see the lines above")
        yield target


def _beside(version: Path) -> Path | None:
    """The run's folder where temporary files lie on another disk, to which no link leads."""
    run, temporary = version.parent.parent, Path(tempfile.gettempdir())
    is_near = run.stat().st_dev == temporary.stat().st_dev
    return None if is_near or not os.access(run, os.W_OK) else run


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the disk has none. `copytree` would hide why a disk keeps
    nothing more, so it is raised here."""
    try:
        os.link(source, target)
    except OSError:
        try:
            shutil.copyfile(source, target)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, Path(target)) from error


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
