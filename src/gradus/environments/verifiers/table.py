"""What gradus changes in verifiers and its libraries, and why; docs/upstream.md shows it.

Nothing that is recorded is replaced: the interception, the graph and the tokens stay verifiers'
own. A row that saves nothing is needed: without it episodes would be others, and nothing starts.
What is saved was measured with `benchmarks/episodes_per_second.py`, as a share of the CPU time of
an episode of one turn with the chat harness.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradus.environments.policy.images import leave_images_to_engine
from gradus.environments.spares import keep_spare_containers
from gradus.environments.verifiers import exits, replies, shortcuts
from gradus.environments.verifiers.deferred import IMPORTERS, defer_imports
from gradus.environments.verifiers.engine_client import RequestSeeds
from gradus.environments.verifiers.nested_plugins import import_nested_plugins
from gradus.environments.verifiers.patch import source_digest
from gradus.environments.verifiers.plain_content import keep_content_plain
from gradus.environments.verifiers.task_headers import send_task_headers
from gradus.environments.verifiers.tool_servers import ToolServerLimits, bound_tool_servers
from gradus.errors import ConfigError
from gradus.log import get_logger

_TRAIN = "verifiers.v1.clients.train:"
_SERVER = "verifiers.v1.interception.server:"
_LAUNCH = "verifiers.v1.mcp.launch:"
_SESSION = "verifiers.v1.session:RolloutSession."
_SUBPROCESS = "verifiers.v1.runtimes.subprocess:SubprocessRuntime."
_DECORATORS = "verifiers.v1.utils.decorators:"
_RENDERING = {
    f"{_TRAIN}RendererSlot.run": "3b2314a359c6557b",
    f"{_TRAIN}TrainClient.get_response": "119c604871f8d038",
}

log = get_logger(__name__)


@dataclass(frozen=True)
class ProcessSettings:
    """What patches ask of the source."""

    tool_servers: ToolServerLimits = field(default_factory=ToolServerLimits)
    headers_from: str | None = None
    """Field of a task's data with headers for its model requests."""
    warm_containers: int = 0
    seeds: RequestSeeds = field(default_factory=RequestSeeds)


@dataclass(frozen=True)
class Patch:
    """One change of a library, and the code that it was written for."""

    install: Callable[[ProcessSettings], object] | None
    """Puts it in place; twice is harmless. None where gradus has code of its own instead."""
    otherwise: str
    """What is wrong, or what it costs, without it."""
    until: str
    """When it can go."""
    relies_on: Mapping[str, str]
    """What it changes or calls, with the digest of its source."""
    saves: str = ""
    """Measured; empty where episodes would be others without it."""

    def changed(self) -> list[str]:
        return [name for name, digest in self.relies_on.items() if source_digest(name) != digest]


TABLE: Mapping[str, Patch] = {
    "use_engine_client": Patch(
        lambda given: replies.use_engine_client(given.seeds),
        "all requests of an episode would share one seed, and openai and httpx around one post "
        "would cost 20 % of it",
        "verifiers takes a client for the engine",
        {
            f"{_TRAIN}TrainClient.__init__": "b3352761cd3ccc44",
            "renderers.client:generate": "2c392ec9177c6ce3",
        },
    ),
    "seed_each_request": Patch(
        lambda given: replies.seed_each_request(given.seeds),
        "all requests of an episode would share one seed",
        "verifiers draws a seed for each request",
        {"verifiers.v1.clients.eval:EvalClient._request": "28f6fb95c68cecd1"},
    ),
    "play_again_as_at_first": Patch(
        lambda given: replies.play_again_as_at_first(given.seeds),
        "an episode that is played again would have other seeds, beside its first play",
        "verifiers draws a seed for each request",
        {"verifiers.v1.serve.server:EnvServer._run": "934a3256b1bab913"},
    ),
    "read_every_tool_call": Patch(
        lambda _: replies.read_every_tool_call(),
        "a tool call that the model wrote badly would fail its episode, and ids would repeat",
        "verifiers reads each call and numbers it again",
        {f"{_TRAIN}response_from_generate": "df414e71baa3668e"},
    ),
    "note_policy_versions": Patch(
        lambda _: replies.note_policy_versions(),
        "nobody would know which version of the policy sampled a token",
        "verifiers keeps what an engine says of a reply",
        {"verifiers.v1.graph:PendingTurn.commit": "e7dd588a3ea2291d"},
    ),
    "sample_as_asked": Patch(
        lambda _: replies.sample_as_asked(),
        "a program could not say how its own calls are sampled",
        "a request can carry sampling parameters, and a turn say that it does not train",
        {
            f"{_TRAIN}TrainClient.get_response": "119c604871f8d038",
            "verifiers.v1.graph:PendingTurn.commit": "e7dd588a3ea2291d",
        },
    ),
    "keep_content_plain": Patch(
        lambda _: keep_content_plain(),
        "text of users and tools could become control tokens",
        "renderers keeps content text",
        {f"{_TRAIN}ElasticRendererPool.grow": "dc57edb5e6955894"},
    ),
    "leave_images_to_engine": Patch(
        lambda _: leave_images_to_engine(),
        "an episode that shows Gemma 4 an image would fail",
        "its renderer takes process_multimodal=False",
        {"renderers.gemma4:Gemma4Renderer._emit_image": "1b0268885ce5faad"},
    ),
    "render_inline": Patch(
        lambda _: shortcuts.render_inline(),
        "a thread hop for each render, which costs more than a short one",
        "verifiers decides by cost",
        _RENDERING,
        saves="4 %",
    ),
    "refuse_what_no_template_takes": Patch(
        lambda _: replies.refuse_what_no_template_takes(),
        "a request that cannot be rendered would look like a dead engine and be played again",
        "verifiers answers 400",
        _RENDERING,
    ),
    "cancel_left_calls": Patch(
        lambda _: replies.cancel_left_calls(),
        "replies that their program did not wait for would train",
        "verifiers cancels them",
        {f"{_SERVER}InterceptionServer.start": "84841ab6eab75547"},
    ),
    "gather_changes": Patch(
        lambda _: shortcuts.gather_changes(),
        "every change of a trace is a message",
        "verifiers has an interval",
        {"verifiers.v1.serve.delta:DeltaStreamer._changed": "41a6e1f4410d91e9"},
        saves="12 %",
    ),
    "survive_exits": Patch(
        lambda _: exits.survive_exits(),
        "exit() in a reward would end the worker with all its episodes",
        "verifiers catches SystemExit",
        {
            "verifiers.v1.errors:boundary": "3d5226f12c171e1a",
            f"{_DECORATORS}invoke_all": "6208bae46cf05355",
        },
    ),
    "run_plain_hooks_in_threads": Patch(
        lambda _: exits.run_plain_hooks_in_threads(),
        "a reward, stop or set-up without `async` would stop all episodes while it runs, or fail",
        "verifiers runs plain hooks in threads",
        {
            f"{_DECORATORS}invoke": "671215d82dfa27b1",
            "verifiers.v1.session:call_hook": "7b9ada6fd3bd98a3",
        },
    ),
    "drop_unreadable_requests": Patch(
        lambda _: exits.drop_unreadable_requests(),
        "a request whose number is not UTF-8 would end the worker with all its episodes",
        "verifiers reads numbers where it catches errors",
        {"verifiers.v1.serve.server:EnvServer.run": "32b6135a845d9553"},
    ),
    "bound_tool_servers": Patch(
        lambda given: bound_tool_servers(given.tool_servers),
        "tool servers would be neither bounded nor replaced",
        "verifiers looks at the processes of its tool servers",
        {
            f"{_LAUNCH}serve_in_runtime": "5e9c3aaf09a133ab",
            f"{_LAUNCH}_read_back_port": "d94c2209ccc3a962",
            f"{_LAUNCH}serve_shared": "38ffe7c715d0258d",
            f"{_LAUNCH}serve_tools": "912c1b3179949be9",
        },
    ),
    "end_servers_with_worker": Patch(
        lambda _: exits.end_servers_with_worker(),
        "tool servers would not find your modules, and would outlive a killed worker",
        "a server starts with its worker's import path and death signal",
        {f"{_SUBPROCESS}run_background": "5226d2792ce8474e"},
    ),
    "import_nested_plugins": Patch(
        lambda _: import_nested_plugins(),
        "a harness inside a package would not be found",
        "verifiers imports an id with dots as it is",
        {"verifiers.v1.utils.loaders:_import_plugin": "cecd073e13ed4cf2"},
    ),
    "move_episode_folders": Patch(
        lambda _: exits.move_episode_folders(Path(tempfile.gettempdir())),
        "a killed worker would leave folders in your home",
        "verifiers takes a folder",
        {f"{_SUBPROCESS}start": "24e33bbb9fbcecd9"},
    ),
    "send_task_headers": Patch(
        lambda given: send_task_headers(given.headers_from or ""),
        "`headers_from` would send nothing",
        "a task can name headers",
        {f"{_SERVER}InterceptionServer.register": "840e7346a77a962c"},
    ),
    "serve_in_process": Patch(
        lambda _: shortcuts.serve_in_process(),
        "HTTP between two coroutines of one process",
        "a harness of the process can call the interception server",
        {
            f"{_SERVER}InterceptionServer.start": "84841ab6eab75547",
            f"{_SERVER}InterceptionServer._handler_for": "981e30fad6f46928",
            f"{_SERVER}InterceptionServer.handle_request": "9ca91a941b9d5571",
            f"{_SERVER}InterceptionServer.handle_tool": "5d17ef1b83d8fa35",
            f"{_SERVER}_finish_idempotent_attempt": "e6b1df9f4ca071b5",
            f"{_SESSION}adopt": "4da19a87bbd30a17",
            f"{_SESSION}release": "3862349962838e91",
        },
        saves="28 %",
    ),
    "trim_memory_by_time": Patch(
        lambda _: shortcuts.trim_memory_by_time(),
        "the heap is walked after every 16th episode",
        "verifiers trims by time",
        {"verifiers.v1.utils.memory:trim_memory_periodically": "7f9cf65a70a4dea2"},
        saves="8 %",
    ),
    "remember_signatures": Patch(
        lambda _: shortcuts.remember_signatures(),
        "pydantic inspects default factories each time that it constructs a model",
        "pydantic remembers the answer",
        {"pydantic._internal._fields:takes_validated_data_argument": "7269cb52448ab144"},
        saves="8 %",
    ),
    "remove_empty_folders_inline": Patch(
        lambda _: shortcuts.remove_empty_folders_inline(),
        "a thread hop to remove an empty folder",
        "verifiers removes empty folders at once",
        {f"{_SUBPROCESS}teardown": "003d59113f940d4e"},
        saves="5 %",
    ),
    "remember_hooks": Patch(
        lambda _: shortcuts.remember_hooks(),
        "each class is searched for hooks five times an episode",
        "verifiers searches each class once",
        {f"{_DECORATORS}discover_decorated": "c0853e5025dec460"},
        saves="4 %",
    ),
    "remember_hook_signatures": Patch(
        lambda _: shortcuts.remember_hook_signatures(),
        "each hook is inspected at each call",
        "verifiers inspects each hook once",
        {f"{_DECORATORS}invoke": "671215d82dfa27b1"},
        saves="4 %",
    ),
    "remember_short_texts": Patch(
        lambda _: shortcuts.remember_short_texts(),
        "markers of a template are encoded in each turn",
        "renderers encodes its markers once",
        {
            "renderers.base:load_tokenizer": "3dfc43fe9c0d5301",
            "renderers.base:_get_offset_tokenizer": "48d5d56591343bc0",
        },
        saves="4 %",
    ),
    "kill_containers": Patch(
        lambda _: shortcuts.kill_containers(),
        "the first process of a container ignores SIGTERM and is waited for",
        "verifiers starts containers with an init, or kills them",
        {"verifiers.v1.runtimes.docker:DockerRuntime.cleanup": "7ecc175a583d87d6"},
        saves="10 s of waiting for each container",
    ),
    "keep_spare_containers": Patch(
        lambda given: keep_spare_containers(given.warm_containers),
        "`warm_containers` would do nothing: each episode would wait for its container",
        "verifiers starts containers ahead",
        {"verifiers.v1.runtimes.docker:DockerRuntime.start": "b82bd2c69634f222"},
    ),
    "defer_imports": Patch(
        lambda _: defer_imports(),
        "`import verifiers.v1` brings anthropic and sympy, which hardly any run uses",
        "verifiers imports them when they are asked for",
        dict(IMPORTERS.values()),
        saves="half of the time and memory of the import",
    ),
}
"""By the name of the function or class that does it, in the order of installation."""


def apply(given: ProcessSettings) -> list[str]:
    """Patch this process; the names of what is left out, also logged.

    Raises ConfigError where a library changed what an episode depends on.
    """
    chosen = _chosen(given.headers_from)
    _refuse_changed(chosen.values())
    left_out = []
    for name, patch in chosen.items():
        if changed := patch.changed():
            left_out.append(name)
            log.warning("%s is not used, episodes cost more: %s changed", name, ", ".join(changed))
        elif patch.install is not None:
            patch.install(given)
    return left_out


def check_libraries(headers_from: str | None = None) -> None:
    """Raise ConfigError where a library changed what an episode depends on."""
    _refuse_changed(_chosen(headers_from).values())


def _chosen(headers_from: str | None) -> dict[str, Patch]:
    is_asked = headers_from is not None
    return {name: row for name, row in TABLE.items() if is_asked or name != "send_task_headers"}


def _refuse_changed(patches: Iterable[Patch]) -> None:
    changed = [(patch.otherwise, patch.changed()) for patch in patches if not patch.saves]
    effects = dict.fromkeys(effect for effect, found in changed if found)
    names = sorted({name for _, found in changed for name in found})
    if not names:
        return
    package = names[0].partition(".")[0].partition(":")[0]
    raise ConfigError(
        f"{package} {importlib.metadata.version(package)} is not the version that gradus was made "
        f"for: {', '.join(names)} changed, so that {'; '.join(effects)}. "
        f"Install gradus again, which brings the version that it requires"
    )


def page(reports: str) -> str:
    """docs/upstream.md: the table, and below it the `reports` that somebody wrote."""
    rows = [
        f"| [`{name}`](#{name.lower()}) | {patch.otherwise} | {patch.saves or 'needed'} | "
        f"{patch.until} | {', '.join(f'`{_short(it)}`' for it in patch.relies_on)} |"
        for name, patch in TABLE.items()
    ]
    return "\n".join((_HEAD, *rows, "", reports))


def _short(name: str) -> str:
    return name.rpartition(":")[2]


_HEAD = """# What gradus changes in verifiers

The table is `gradus/environments/verifiers/table.py`, which also installs it. Each patch names
the functions that it was written for, by a digest of their source.
Where one changed, a patch that only saves time is left out with a warning, and one that is needed
keeps everything from starting. Shares are of the CPU time of an episode of one turn with the chat
harness. Below the table: what we ask of the projects, in the table's order.

| patch | without it | saves | can go when | changes or calls |
|---|---|---|---|---|"""
