"""Servers of a watched file join, leave and are lost while a run plays."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from secured_servers import OwnAuthority

from gradus.errors import ConfigError
from gradus.files import write_atomically
from gradus.orchestrator.play import replicas as policy_replicas
from gradus.orchestrator.play.inference_client import NoServer
from gradus.orchestrator.play.replicas import PolicyPool
from gradus.processes.secured import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE, server_context
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Stuck
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import EngineStatus, ServedPolicy

MODEL = "tiny"
CONFIG = "gradus inference @"


class Pool:
    """Two engines of one run, a file that may name them, and what the user was told."""

    def __init__(self, run_dir: RunDirectory, file: Path, engines: list[ScriptedEngine]) -> None:
        self.run_dir = run_dir
        self.file = file
        self.engines = engines
        self.told: list[str] = []
        self.has_told = asyncio.Event()

    def tell(self, text: str) -> None:
        self.told.append(text)
        self.has_told.set()

    def write(self, *lines: str) -> None:
        write_atomically(self.file, "".join(f"{line}\n" for line in lines).encode())

    def names(self, *numbers: int) -> list[str]:
        return [self.engines[number].base_url for number in numbers]

    async def open(self, *lines: str) -> PolicyPool:
        self.write(*lines)
        pool = PolicyPool(self.file, self.run_dir, term=2, model=MODEL, tell=self.tell)
        return await pool.begin()

    async def line(self, text: str) -> str:
        """The first line that was told and holds the text."""
        async with asyncio.timeout(20):
            while not (found := [line for line in self.told if text in line]):
                self.has_told.clear()
                await self.has_told.wait()
        return found[0]

    def published(self, version: int) -> PolicyPublished:
        directory = self.run_dir.version(version)
        directory.mkdir(parents=True, exist_ok=True)
        return PolicyPublished(version, 2, str(directory), f"digest-{version}")

    def listed(self) -> list[str]:
        return self.run_dir.servers.read_text().split()


@asynccontextmanager
async def opened_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    for name in ("FIRST_DELAY_SECONDS", "LONGEST_DELAY_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(policy_replicas, name, 0.02)
    run_dir = RunDirectory(tmp_path / "demo")
    run_dir.secrets.mkdir(parents=True)
    run_dir.admin_token.write_text("admin\n")
    run_dir.inference_token.write_text("data\n")
    async with AsyncExitStack() as stack:
        made = [ScriptedEngine(run_dir=run_dir.root, term=2) for _ in range(2)]
        for engine in made:
            engine.check_weights, engine.model = None, MODEL
            await stack.enter_async_context(engine.await_version())
        yield Pool(run_dir, tmp_path / "servers.txt", made)


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    async with opened_pool(tmp_path, monkeypatch) as pool:
        yield pool


@pytest.fixture
async def policy(pool: Pool) -> AsyncIterator[PolicyPool]:
    opened = await pool.open(*pool.names(0))
    await opened.serve_initial()
    await pool.line("joins")
    yield opened
    await opened.close()


async def test_a_server_that_is_added_is_told_the_live_version_before_workers_know_of_it(
    pool: Pool, policy: PolicyPool
) -> None:
    await policy.apply(pool.published(3))
    assert (pool.engines[1].served.is_stale, pool.listed()) == (True, pool.names(0))
    pool.write(*pool.names(0, 1))
    joined = await pool.line(f"{pool.names(1)[0]} joins")
    assert joined.endswith("joins at version 3, 2 of 2 servers serve the policy")
    assert (pool.engines[1].version, pool.engines[1].served.is_stale) == (3, False)
    assert pool.listed() == pool.names(0, 1)
    assert (await policy.status()).version == 3
    applied = await policy.apply(pool.published(4))
    assert (applied.version, [it.version for it in pool.engines]) == (4, [4, 4])


async def test_a_server_that_joins_while_the_disk_is_full_is_noted_once_there_is_room(
    pool: Pool, policy: PolicyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    noted = asyncio.Event()

    def write(path: Path, content: bytes) -> None:
        write_atomically(path, content)
        noted.set()

    monkeypatch.setattr(policy_replicas, "write_atomically", full)
    pool.write(*pool.names(0, 1))
    await pool.line(f"{pool.names(1)[0]} joins")
    assert pool.listed() == pool.names(0)
    monkeypatch.setattr(policy_replicas, "write_atomically", write)
    async with asyncio.timeout(20):
        await noted.wait()
    assert pool.listed() == pool.names(0, 1)


async def test_nothing_is_served_before_the_run_said_what(pool: Pool) -> None:
    policy = await pool.open(*pool.names(0, 1))
    with pytest.raises(NoServer):
        await policy.status()
    assert (pool.listed(), policy.base_url) == ([], f"file://{pool.run_dir.servers}")
    await policy.apply(pool.published(7))
    assert pool.told
    assert all("joins at version 7" in line for line in pool.told)
    await policy.close()


async def test_a_server_that_is_taken_out_is_asked_nothing_more_and_its_counts_stay(
    pool: Pool, policy: PolicyPool
) -> None:
    pool.write(*pool.names(0, 1))
    await pool.line(f"{pool.names(1)[0]} joins")
    for engine in pool.engines:
        engine.load = {"generated_tokens": 100}
    assert (await policy.status()).generated_tokens == 200
    pool.write(*pool.names(1))
    gone = await pool.line("leaves")
    assert gone == f"{pool.names(0)[0]} leaves, 1 of 1 servers serve the policy"
    assert pool.listed() == pool.names(1)
    assert (await policy.status()).generated_tokens == 200
    await policy.apply(pool.published(1))
    assert [it.version for it in pool.engines] == [0, 1]


async def test_of_a_server_that_was_taken_out_nothing_more_is_said(
    pool: Pool, policy: PolicyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, before = policy._servers[0], set(policy._tasks)
    is_asked, answers = asyncio.Event(), asyncio.Event()
    status = await server.client.status()

    async def brought(_: object) -> EngineStatus:
        is_asked.set()
        await answers.wait()
        return status

    monkeypatch.setattr(policy, "_brought", brought)
    policy._leave_out(server, "for a while")
    (bringing,) = policy._tasks - before
    async with asyncio.timeout(20):
        await is_asked.wait()
        pool.write()
        await pool.line("leaves")
        answers.set()
        await bringing
    policy._leave_out(server, "too late")
    assert not [line for line in pool.told if "again" in line or "too late" in line]


async def test_the_run_waits_while_there_is_no_server_and_says_so(
    pool: Pool, policy: PolicyPool
) -> None:
    pool.write()
    await pool.line("the run waits for a server: none of ")
    with pytest.raises(NoServer):
        await policy.status()
    applying = asyncio.ensure_future(policy.apply(pool.published(1)))
    pool.write(*pool.names(1))
    async with asyncio.timeout(10):
        await applying
    assert (pool.engines[1].version, policy.addresses()) == (1, pool.names(1))


async def test_an_empty_file_is_a_run_that_waits(pool: Pool) -> None:
    policy = await pool.open("# nobody yet", "")
    assert pool.told == [f"the run waits for a server: none of {pool.file} serves the policy"]
    await policy.close()


@pytest.mark.parametrize(
    ("served", "model", "text"),
    [
        (ServedPolicy("other", 2, 0, None), MODEL, "run 'other', and this is run 'demo'"),
        (ServedPolicy("demo", 3, 0, None), MODEL, "term 3 of the run, and this is term 2"),
        (ServedPolicy("demo", 2, 0, None), "big", "model 'big', and the run trains 'tiny'"),
    ],
    ids=["run", "term", "model"],
)
async def test_a_server_of_something_else_does_not_join(
    pool: Pool, policy: PolicyPool, served: ServedPolicy, model: str, text: str
) -> None:
    pool.engines[1].served, pool.engines[1].model = served, model
    pool.write(*pool.names(0, 1))
    assert text in await pool.line(f"{pool.names(1)[0]} does not join: ")
    assert (policy.addresses(), pool.engines[1].applied) == (pool.names(0), [])
    # It is asked on: whoever started it may end it and start the right one there.
    pool.engines[1].served, pool.engines[1].model = ServedPolicy("demo", 1, 0, None), MODEL
    await pool.line(f"{pool.names(1)[0]} joins at version 0")


@pytest.mark.shows("F44")
async def test_a_server_whose_files_write_texts_otherwise_is_told_which(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"vocabulary": "a", "chat template": "b", "set of special tokens": "c"}
    monkeypatch.setattr(policy_replicas, "text_digests", lambda *_: own)
    pool.engines[0].text_digests = dict(own)
    pool.engines[1].text_digests = {**own, "chat template": "x", "set of special tokens": "y"}
    policy = await pool.open(*pool.names(0, 1))
    await policy.serve_initial()
    await pool.line(f"{pool.names(0)[0]} joins")
    told = await pool.line(f"{pool.names(1)[0]} does not join: ")
    assert "another chat template, set of special tokens; start it with a copy of them" in told
    assert policy.addresses() == pool.names(0)
    await policy.close()


async def test_a_server_without_the_run_s_token_is_told_how_to_start(
    pool: Pool, policy: PolicyPool
) -> None:
    del policy
    pool.engines[1].admin_token = "another"
    pool.write(*pool.names(0, 1))
    config = pool.run_dir.config / "server.json"
    assert f"gradus inference @ {config} --process" in await pool.line("does not join: ")


async def test_a_server_that_does_not_see_the_weights_stays_out_and_the_others_go_on(
    pool: Pool, policy: PolicyPool
) -> None:
    pool.engines[1].run_dir = RunDirectory(Path("/elsewhere/demo"))
    pool.write(*pool.names(0, 1))
    await pool.line(f"{pool.names(1)[0]} joins")
    await policy.apply(pool.published(1))
    told = await pool.line("is left out, 1 of 2 servers")
    assert "is not inside the run's weights directory /elsewhere/demo/weights" in told
    assert policy.addresses() == pool.names(0)


async def test_one_server_under_two_names_joins_once(pool: Pool, policy: PolicyPool) -> None:
    twice = pool.names(0)[0].replace("127.0.0.1", "localhost")
    pool.write(*pool.names(0), twice)
    assert await pool.line(f"{twice} does not join") == (
        f"{twice} does not join: it is the server at {pool.names(0)[0]}"
    )
    assert policy.addresses() == pool.names(0)


async def test_an_address_where_nobody_answers_keeps_nobody_waiting(
    pool: Pool, policy: PolicyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_replicas, "STATUS_SECONDS", 0.1)
    pool.engines[1].inject(Stuck(), path="/gradus/status", times=2)
    pool.write(*pool.names(0, 1), "http://127.0.0.1:9")
    await pool.line("http://127.0.0.1:9 does not join: it does not answer yet")
    await policy.apply(pool.published(1))
    assert policy.version == 1
    await pool.line(f"{pool.names(1)[0]} joins at version 1")


async def test_a_lost_server_is_left_out_and_comes_back(pool: Pool, policy: PolicyPool) -> None:
    pool.write(*pool.names(0, 1))
    await pool.line(f"{pool.names(1)[0]} joins")
    port = int(pool.names(1)[0].rpartition(":")[2])
    await pool.engines[1].close()
    await policy.status()
    assert "is left out, 1 of 2 servers serve the policy" in pool.told[-1]
    await pool.engines[1].start(port=port)
    await pool.line("serves version 0 again, 2 of 2 servers")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "it cannot be read any more; the servers that are known stay"),
        ("no address\n", "line 1: 'no address' is not the address of a server, such as http"),
        ("http://a:1\nhttp://a:1/\n", "line 2: http://a:1 stands on line 1 already"),
        ("http://10.0.0.7:80", "line 1 does not end: write a newline"),
    ],
    ids=["gone", "malformed", "twice", "half written"],
)
async def test_a_file_with_a_mistake_leaves_all_as_it_was(
    pool: Pool, policy: PolicyPool, content: str | None, text: str
) -> None:
    if content is None:
        pool.file.unlink()
    else:
        write_atomically(pool.file, content.encode())
    assert (await pool.line(text)).startswith(f"{pool.file}: ")
    assert policy.addresses() == pool.names(0)
    pool.write(*pool.names(0, 1))
    await pool.line(f"{pool.names(1)[0]} joins")


# ------------------------------------------------------------------ over HTTPS

OWN, OF_THE_SYSTEM = OwnAuthority(), OwnAuthority()
SERVER = OWN.server()


@pytest.fixture
def serve_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets engines serve with a key and its certificate, and the run trust OWN."""

    def certify(pem: bytes, trusted: bytes = OWN.certificate) -> None:
        for variable, content in (
            (CERTIFICATE_VARIABLE, pem),
            (AUTHORITY_VARIABLE, trusted),
            ("SSL_CERT_FILE", OF_THE_SYSTEM.certificate),
        ):
            file = tmp_path / f"{variable}.pem"
            file.write_bytes(content)
            monkeypatch.setenv(variable, str(file))

    return certify


@pytest.mark.parametrize(
    "trusted",
    [OWN.certificate, SERVER[SERVER.index(b"-----BEGIN CERT") :]],
    ids=["who signed it", "itself, without who signed it"],
)
async def test_a_server_whose_certificate_the_named_authority_signed_joins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve_with: Callable[..., None],
    trusted: bytes,
) -> None:
    serve_with(SERVER, trusted)
    async with opened_pool(tmp_path, monkeypatch) as pool:
        policy = await pool.open(*pool.names(0))
        await policy.serve_initial()
        await pool.line("joins")
        assert pool.listed() == pool.names(0)
        assert pool.names(0)[0].startswith("https://127.0.0.1:")
        pool.write(*pool.names(0, 1), pool.names(0)[0].replace("https", "http"))
        assert "line 3" in await pool.line("in the clear")
        assert pool.listed() == pool.names(0)
        await policy.close()


@pytest.mark.shows("SEC7")
@pytest.mark.parametrize(
    ("pem", "text"),
    [
        (OwnAuthority().server(), "signed by nobody whom this run trusts"),
        (OF_THE_SYSTEM.server(), "signed by nobody whom this run trusts"),
        (OWN.server("127.0.0.2"), "is for another name"),
        (OWN.server(days=(-3, -2)), "has expired"),
        (OWN.server(days=(2, 3)), "not valid yet"),
    ],
    ids=["another authority", "one of the system", "another name", "expired", "not yet valid"],
)
async def test_a_server_with_a_wrong_certificate_does_not_join_and_it_is_said_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve_with: Callable[..., None],
    pem: bytes,
    text: str,
) -> None:
    serve_with(pem)
    async with opened_pool(tmp_path, monkeypatch) as pool:
        policy = await pool.open(*pool.names(0))
        told = await pool.line("does not join")
        await policy.close()
        assert text in told, told


async def test_an_address_with_https_where_a_server_speaks_http_does_not_join(pool: Pool) -> None:
    policy = await pool.open(pool.names(0)[0].replace("http:", "https:"))
    assert "is it http://?" in await pool.line("does not join")
    await policy.close()


KEY = OWN.server().partition(b"-----BEGIN CERT")[0]


@pytest.mark.parametrize(
    "pem",
    [b"", OWN.certificate, KEY, OWN.server(password="secret"), KEY + OWN.certificate],
    ids=["nothing", "no key", "no certificate", "a key with a password", "the key of another"],
)
def test_a_file_with_which_no_server_can_speak_https_is_refused(
    serve_with: Callable[..., None], pem: bytes
) -> None:
    serve_with(pem)
    with pytest.raises(ConfigError, match="into one file"):
        server_context()
