"""A node that does not see the run's folder has what its processes need, and the launcher has what
they made: whole, in order, once, whatever the connection does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from builders import build_micro_batch, build_sample
from commands import wait_until
from mirrored import Ends, damaged_once

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    DeadlineError,
    ExitCode,
    FencedError,
    FullDiskError,
    RunDirectoryError,
    StorageError,
)
from gradus.files import DurableFiles, write_json
from gradus.nodes import folder as folder_module
from gradus.nodes import mirror as mirror_module
from gradus.nodes.folder import (
    REPLICA,
    TRAINER,
    Append,
    AskStaged,
    Delete,
    Done,
    FileRange,
    Finish,
    Put,
    PutPiece,
    ReadRange,
    Request,
    Staged,
    Talk,
)
from gradus.nodes.link import AllEnded, Ended
from gradus.nodes.mirror import Mirror
from gradus.nodes.side import NodeSide
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.processes.started import Fault
from gradus.run.lease import open_run, reopen_run
from gradus.run.ready import await_version, hand_over
from gradus.sealed import MANIFEST_NAME, content_entry, open_sealed, seal, stage
from gradus.transport import SpoolReceiver, SpoolSender
from gradus.weights.published import VersionLabel, verify_version
from gradus.wire.events import BatchReceived, StepFinished
from gradus.wire.images import ImageSpan, ImageStore
from gradus.wire.micro_batch import Batch
from gradus.wire.versions import VersionSpan

FILES = DurableFiles()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(mirror_module, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(mirror_module, "_FULL_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(mirror_module, "_SELDOM_SECONDS", 0.02)
    monkeypatch.setattr(mirror_module, "_LISTING_SECONDS", 0.05)
    made = Ends.below(tmp_path)
    yield made
    made.close()


def wait(condition: Callable[[], bool], what: str = "the other end") -> None:
    wait_until(condition, timeout_seconds=60, what=what)


def fetched(mirror: Mirror, wanted: str = TRAINER) -> None:
    number = mirror.fetch(wanted)
    wait(lambda: mirror.has_fetched(number), "what is to be fetched")


def brought(mirror: Mirror) -> None:
    number = mirror.bring()
    wait(lambda: mirror.has_brought(number), "what is to be brought")


def publish(root: Path, version: int, *, size: int = 100_000, term: int = 1) -> Path:
    """A sealed version of the weights."""
    target = root / "weights" / f"version_{version:08d}"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with stage(target, FILES, term=term) as staging:
        FILES.stage(staging / "model.safetensors", bytes([version]) * size)
        FILES.stage(staging / "empty.json", b"")
        seal(staging, target, VersionLabel(version, term), files=FILES)
    return target


def build_batch(step: int, *images: str) -> Batch:
    spans = [ImageSpan(name, number, 1) for number, name in enumerate(images)]
    sample = msgspec.structs.replace(build_sample(seed=step), images=spans)
    return Batch(step, 1, VersionSpan(0, 0), [[build_micro_batch([sample])]])


async def train(ends: Ends, mirror: Mirror, *, steps: int) -> list[str]:
    """A run of steps from one folder to the other and back; the events as they came."""
    fetched(mirror)
    sender = SpoolSender(ends.here, 1, capacity=1)
    receiver = SpoolReceiver(ends.there, 1, 0)

    def learn() -> None:
        for step in range(steps):
            assert receiver.receive(step, timeout_seconds=60).step == step
            receiver.send_event(BatchReceived(step, 1))
            receiver.send_event(StepFinished(step, 1, {}))

    trainer = threading.Thread(target=learn)
    trainer.start()
    for step in range(steps):
        await asyncio.wait_for(sender.send(build_batch(step)), 60)
    events = [await asyncio.wait_for(sender.receive_event(), 60) for _ in range(2 * steps)]
    await asyncio.to_thread(trainer.join, 60)
    await sender.close()
    receiver.close()
    return [f"{type(it).__name__} {it.step}" for it in events if not hasattr(it, "version")]


EXPECTED = [f"{name} {step}" for step in range(3) for name in ("BatchReceived", "StepFinished")]


async def test_batches_go_and_events_come_once_and_in_order(ends: Ends) -> None:
    assert await train(ends, ends.mirror(), steps=3) == EXPECTED
    # What is trained goes on both ends.
    wait(lambda: [it.name for it in ends.there.spool.glob("batch_*")] == ["batch_00000002"])


@pytest.mark.parametrize("is_before", [True, False], ids=["request", "answer"])
@pytest.mark.parametrize("every", [4, 5, 7])
async def test_so_they_do_when_every_few_messages_are_lost(
    ends: Ends, every: int, is_before: bool
) -> None:
    """A cut or a reset of the connection at each kind of message in turn."""

    def is_lost(_: Request) -> bool:
        return ends.num_asked % every == 0

    if is_before:
        ends.lost_before = is_lost
    else:
        ends.lost_after = is_lost
    assert await train(ends, ends.mirror(), steps=3) == EXPECTED


async def test_so_they_do_when_a_range_arrives_damaged(ends: Ends) -> None:
    ends.change = damaged_once()
    mirror = ends.mirror()
    fetched(mirror, REPLICA)
    version = publish(ends.here.root, 1)
    arrived = ends.there.version(1)
    wait(arrived.exists)
    assert verify_version(arrived, open_sealed(version, VersionLabel).digest).label.version == 1
    asked = [it for it in ends.asked if isinstance(it, ReadRange) and "model" in it.path]
    assert len(asked) == 2, "the damaged one came again"


async def test_the_images_of_a_batch_are_there_before_it_and_come_once(ends: Ends) -> None:
    mirror, store = ends.mirror(), ImageStore(ends.here.images)
    first, second, unseen = (store.put(it) for it in (b"a", b"b" * 20_000, b"in no batch"))
    ends.lost_after = lambda request: ends.num_asked % 7 == 0
    fetched(mirror)
    sender = SpoolSender(ends.here, 1, capacity=2)
    receiver = SpoolReceiver(ends.there, 1, 0)

    def paths_asked() -> list[str]:
        return [it.path for it in ends.asked if isinstance(it, ReadRange) and "images" in it.path]

    for step, images in enumerate([(first,), (first, second)]):
        num_first = len(paths_asked())
        await asyncio.wait_for(sender.send(build_batch(step, *images)), 60)
        (batch,) = receiver.receive(step, timeout_seconds=60).micro_batches
        shown = [ImageStore(ends.there.images).read(span.sha256) for span in batch.images[0]]
        assert shown == [b"a", b"b" * 20_000][: step + 1]
        receiver.send_event(BatchReceived(step, 1))
    await sender.close()
    receiver.close()
    asked = paths_asked()
    assert {*asked} == {f"replay/images/{name}" for name in (first, second)}
    assert asked.count(f"replay/images/{first}") == num_first, "the second batch has it already"
    assert not (ends.there.images / unseen).exists()


async def test_a_batch_waits_for_an_image_that_was_removed_or_changed(ends: Ends) -> None:
    mirror, store = ends.mirror(), ImageStore(ends.here.images)
    name = store.put(b"a")
    (ends.here.images / name).unlink()
    fetched(mirror)
    sender = SpoolSender(ends.here, 1, capacity=1)
    await asyncio.wait_for(sender.send(build_batch(0, name)), 60)
    wait(lambda: len(mirror.lines) == 1)
    assert re.search(f"waits: the launcher says: .*{name} cannot be read: No such", mirror.lines[0])
    (ends.here.images / name).write_bytes(b"b")
    before = ends.num_asked
    wait(lambda: ends.num_asked > before + 20)
    assert not list(ends.there.spool.glob("batch_*"))
    assert not (ends.there.images / name).exists()
    (ends.here.images / name).write_bytes(b"a")
    wait(lambda: [it.name for it in ends.there.spool.glob("batch_*")] == ["batch_00000000"])
    assert ImageStore(ends.there.images).read(name) == b"a"
    await sender.close()


def test_no_other_file_goes_for_an_image(ends: Ends) -> None:
    """Nor does a batch write one beside the folder of images."""
    for path in ("replay/images/../../secrets/tracking", f"replay/images/{'a' * 63}", "replay/x"):
        with (
            contextlib.closing(ends.connect()) as talk,
            pytest.raises(CorruptStateError, match="not for a node"),
        ):
            talk.ask(ReadRange(path, 0), FileRange)


def test_weights_come_home_whole_before_they_are_announced(ends: Ends) -> None:
    mirror = ends.mirror()
    fetched(mirror)
    version = publish(ends.there.root, 1)
    hand_over(ends.there, version)
    assert verify_version(ends.here.version(1), open_sealed(version, VersionLabel).digest)
    FILES.delete(version)
    wait(lambda: not ends.here.version(1).exists(), "the trainer forgets a version")


@pytest.mark.parametrize("kind", [AskStaged, PutPiece, Finish])
@pytest.mark.parametrize("is_before", [True, False], ids=["request", "answer"])
def test_a_cut_while_weights_travel_repeats_no_range(
    ends: Ends, kind: type, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (folder_module, mirror_module):
        monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    num_lost = 0

    def is_lost(request: Request) -> bool:
        nonlocal num_lost
        is_it = isinstance(request, kind) and getattr(request, "offset", 50_000) == 50_000
        num_lost += is_it
        return is_it and num_lost == 1

    if is_before:
        ends.lost_before = is_lost
    else:
        ends.lost_after = is_lost
    mirror = ends.mirror()
    fetched(mirror)
    version = publish(ends.there.root, 1)
    hand_over(ends.there, version)
    assert num_lost >= 1
    assert verify_version(ends.here.version(1), open_sealed(version, VersionLabel).digest)
    ranges = [it.offset for it in ends.asked if isinstance(it, PutPiece) and "model" in it.file]
    repeated = [50_000] if kind is PutPiece and is_before else []
    assert sorted(ranges) == sorted([*range(0, 100_000, 10_000), *repeated])


def test_what_was_staged_with_other_content_is_not_taken_for_ours(ends: Ends) -> None:
    """A trainer that was killed had begun to publish the same version."""
    staging = ends.here.weights / ".version_00000001.tmp-1"
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(b"x" * 50_000)
    mirror = ends.mirror()
    fetched(mirror)
    version = publish(ends.there.root, 1)
    hand_over(ends.there, version)
    assert verify_version(ends.here.version(1), open_sealed(version, VersionLabel).digest)


def test_what_is_written_at_this_moment_is_not_read(ends: Ends) -> None:
    """A file that is replaced whole has another name until then."""
    mirror = ends.mirror()
    (ends.there.handed_over / ".1.a.json.tmp-7").write_text('{"folder": ')
    (ends.there.ready / ".trainer.json.tmp-7").write_text("{")
    brought(mirror)
    assert mirror.error is None
    assert os.listdir(ends.here.ready) == []


def test_a_request_that_is_none_ends_the_copy_and_not_only_a_thread(ends: Ends) -> None:
    mirror = ends.mirror()
    (ends.there.handed_over / "1.a.json").write_text('{"folder": ')
    wait(lambda: mirror.error is not None, "the end")
    assert "is given up" in str(mirror.error)


def test_weights_of_an_older_term_give_way(ends: Ends) -> None:
    publish(ends.here.root, 1)
    publish(ends.here.root, 2)
    ends.term = 2
    mirror = ends.mirror()
    fetched(mirror)
    hand_over(ends.there, publish(ends.there.root, 1, term=2))
    assert [it.name for it in ends.here.weights.iterdir()] == ["version_00000001"]
    assert open_sealed(ends.here.version(1), VersionLabel).label.term == 2


def test_a_full_disk_at_the_launcher_holds_what_is_handed_over(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_full, write = 3, folder_module.write_piece

    def is_full(path: Path, offset: int, content: bytes) -> None:
        nonlocal num_full
        if num_full:
            num_full -= 1
            raise FullDiskError("no room")
        write(path, offset, content)

    monkeypatch.setattr("gradus.nodes.folder_server.write_piece", is_full)
    mirror = ends.mirror()
    fetched(mirror)
    version = publish(ends.there.root, 1)
    hand_over(ends.there, version)
    assert num_full == 0
    assert verify_version(ends.here.version(1), open_sealed(version, VersionLabel).digest)


def test_a_full_disk_at_the_node_holds_what_is_fetched_and_then_ends_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(path: Path, offset: int, content: bytes) -> None:
        raise FullDiskError(f"no room for {path.name}")

    monkeypatch.setattr(mirror_module, "write_piece", is_full)
    monkeypatch.setattr(mirror_module, "FULL_DISK_SECONDS", 0.2)
    mirror = ends.mirror()
    publish(ends.here.root, 1)
    mirror.fetch(REPLICA)
    wait(lambda: mirror.error is not None, "the end")
    assert isinstance(mirror.error, StorageError)
    assert not ends.there.version(1).exists()


@pytest.mark.parametrize("what", ["fetched", "brought"])
def test_another_error_of_the_nodes_disk_is_told_once_and_ends_it_when_it_lasts(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It says the same errno as a broken connection may."""
    asked = []

    def fails(place: Path, *_: object, **__: object) -> bytes:
        asked.append(place)
        raise OSError(errno.EIO, "Input/output error", str(place))

    mirror = ends.mirror()
    fetched(mirror)
    monkeypatch.setattr(mirror_module, "FULL_DISK_SECONDS", 0.3)
    if what == "fetched":
        monkeypatch.setattr(mirror_module, "put_in_place", fails)
        publish(ends.here.root, 1)
        mirror.fetch(REPLICA)
    else:
        monkeypatch.setattr(mirror_module, "read_piece", fails)
        (ends.there.ready / "trainer.json").write_text("{}")
    wait(lambda: mirror.error is not None, "the end")
    assert isinstance(mirror.error, StorageError)
    assert mirror.error.exit_code == ExitCode.TRY_AGAIN
    assert len(asked) >= 2, "it is tried again"
    (line,) = mirror.lines
    assert line.startswith("the copy of the run's folder waits: cannot keep")
    assert "Input/output error" in line


def test_what_passes_is_not_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that went just as it was read."""
    is_first, read = True, mirror_module.read_piece

    def fails_once(path: Path, offset: int) -> bytes:
        nonlocal is_first
        if is_first:
            is_first = False
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))
        return read(path, offset)

    mirror = ends.mirror()
    fetched(mirror)
    monkeypatch.setattr(mirror_module, "read_piece", fails_once)
    (ends.there.logs / "trainer.log").write_text("a line\n")
    brought(mirror)
    assert (ends.here.logs / "trainer.log").read_text() == "a line\n"
    assert (mirror.lines, mirror.error, is_first) == ([], None, False)


def test_what_an_earlier_node_side_left_running_ends_before_its_copy_is_cleared(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write into the copy of this one."""
    ends.mirror().close()
    mark = "of an earlier launch"
    beats = ends.there.root / "alive" / "trainer.json"
    script = 'echo; while true; do mkdir -p "$1"; echo 1 > "$1/trainer.json"; done'
    left = subprocess.Popen(
        ["sh", "-c", script, "sh", str(beats.parent)],
        env={**os.environ, LAUNCH_VARIABLE: mark},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with left:
        try:
            assert left.stdout is not None
            left.stdout.readline()
            ends.there.nodes.mkdir(exist_ok=True)
            write_json(ends.there.nodes / "1.json", {"launch": mark, "processes": []})
            write_json(ends.there.nodes / "1.side.json", {"incarnation": "1.a"})
            monkeypatch.setattr(mirror_module, "LEFTOVERS_SECONDS", 0.0)
            ends.mirror()
            assert left.poll() == -signal.SIGKILL
            assert not beats.exists()
        finally:
            left.kill()


def test_a_launcher_that_is_fenced_answers_no_node(ends: Ends) -> None:
    mirror = ends.mirror()
    fetched(mirror)
    ends.is_fenced = True
    (ends.there.ready / "trainer.json").write_text("{}")
    number = mirror.bring()
    wait(lambda: ends.num_asked > 20)
    assert not mirror.has_brought(number)
    assert not (ends.here.ready / "trainer.json").exists()


def test_a_node_that_was_given_up_brings_nothing_any_more(ends: Ends) -> None:
    """The old incarnation returns after a cut; its trainer trained on."""
    mirror = ends.mirror()
    fetched(mirror)
    ends.is_joined = False
    (ends.there.spool / "events" / "0000000000.msgpack").write_bytes(b"late")
    number = mirror.bring()
    before = ends.num_asked
    wait(lambda: ends.num_asked > before + 20)
    assert not mirror.has_brought(number)
    assert os.listdir(ends.here.spool / "events") == []


def test_logs_grow_behind_what_stood_there(ends: Ends) -> None:
    log, far = ends.here.logs / "trainer.log", ends.there.logs / "trainer.log"
    log.write_text("of the last launch\n")
    ends.lost_after = lambda request: isinstance(request, Append) and ends.num_asked % 2 == 0
    mirror = ends.mirror()
    for number in range(4):
        with far.open("a") as file:
            file.write(f"line {number}\n")
        brought(mirror)
    assert log.read_text() == "of the last launch\n" + "".join(f"line {n}\n" for n in range(4))


def test_a_log_that_is_full_and_renamed_loses_no_line(ends: Ends) -> None:
    log, far = ends.here.logs / "trainer.log", ends.there.logs / "trainer.log"
    mirror = ends.mirror()
    far.write_text("first\n")
    brought(mirror)
    mirror.close()
    with far.open("a") as file:
        file.write("last of the full one\n")
    far.rename(f"{far}.1")
    far.write_text("new\n")
    talk = ends.connect()
    mirror._bring_growth(talk, "logs/trainer.log")
    talk.close()
    assert log.read_text() == "first\nlast of the full one\nnew\n"
    assert os.listdir(ends.here.logs) == ["trainer.log"]


def test_a_ready_file_comes_and_goes_with_the_process(ends: Ends) -> None:
    here, there = ends.here.ready_file("inference_0"), ends.there.ready_file("inference_0")
    mirror = ends.mirror()
    write_json(there, {"pid": 1})
    wait(here.exists)
    here.unlink()  # The launcher replaces the process.
    wait(lambda: not there.exists())
    write_json(there, {"pid": 2})
    brought(mirror)
    assert '"pid": 2' in here.read_text()
    there.unlink()
    wait(lambda: not here.exists())


def test_a_deletion_that_is_lost_with_the_connection_is_told_again(ends: Ends) -> None:
    mirror = ends.mirror()
    ready = ends.there.ready / "trainer.json"
    ready.write_text("{}")
    brought(mirror)
    assert (ends.here.ready / ready.name).exists()
    lost: list[Request] = []

    def lose_one(request: Request) -> bool:
        is_lost = isinstance(request, Delete) and not lost
        lost.extend([request] * is_lost)
        return is_lost

    ends.lost_before = lose_one
    ready.unlink()
    wait(lambda: not (ends.here.ready / ready.name).exists(), "the deletion")
    assert lost


def test_a_request_for_a_checkpoint_is_met_once(ends: Ends) -> None:
    here, there = ends.here.save_request, ends.there.save_request
    ends.mirror()
    here.parent.mkdir()
    here.touch()
    wait(there.exists)
    there.unlink()
    wait(lambda: not here.exists())
    assert not there.exists()


def test_parts_of_a_checkpoint_of_several_nodes_come_together(ends: Ends) -> None:
    mirror = ends.mirror()
    fetched(mirror)
    name = ".step_00000003.tmp-1/trainer"
    other, ours = ends.here.checkpoints / name, ends.there.checkpoints / name
    for part, rank in ((other, 0), (ours, 1)):
        part.mkdir(parents=True)
        (part / f"rank_{rank}.bin").write_bytes(bytes([rank]) * 5000)
    (ours / "half.bin").write_bytes(b"of a rank that still writes")
    hand_over(ends.there, ours, ["rank_1.bin"])
    assert sorted(os.listdir(other)) == ["rank_0.bin", "rank_1.bin"]
    assert (other / "rank_1.bin").read_bytes() == bytes([1]) * 5000
    assert os.listdir(ours) == ["half.bin"], "a step may be trained, and saved, again"


def test_a_node_side_that_starts_again_keeps_what_is_whole_and_nothing_else(ends: Ends) -> None:
    mirror = ends.mirror()
    publish(ends.here.root, 1)
    fetched(mirror, REPLICA)
    mirror.close()
    publish(ends.there.root, 2)
    (ends.there.version(1) / MANIFEST_NAME).read_bytes()
    (ends.there.ready / "trainer.json").write_text("{}")
    asked = len(ends.asked)
    fetched(ends.mirror(), REPLICA)
    assert [it.name for it in ends.there.weights.iterdir()] == ["version_00000001"]
    assert not [
        it for it in ends.asked[asked:] if isinstance(it, ReadRange) and "weights" in it.path
    ]
    assert not list(ends.here.ready.iterdir())


def test_a_node_side_does_not_wait_while_what_it_keeps_is_compared(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, goes_on = mirror_module._sealed_here, threading.Event()

    def slowly(root: Path) -> dict[str, str]:
        assert goes_on.wait(20)
        return compare(root)

    monkeypatch.setattr(mirror_module, "_sealed_here", slowly)
    mirror = ends.mirror()
    number = mirror.fetch(TRAINER)
    assert not mirror.has_fetched(number)
    goes_on.set()
    wait(lambda: mirror.has_fetched(number))


def test_an_event_that_another_node_sent_gives_the_next_its_number(ends: Ends) -> None:
    SpoolReceiver(ends.here, 1, 0).send_event(BatchReceived(0, 1))
    fetched(ends.mirror())
    SpoolReceiver(ends.there, 2, 0).send_event(BatchReceived(0, 2))
    names = ["0000000000.msgpack", "0000000001.msgpack"]
    wait(lambda: sorted(os.listdir(ends.here.spool / "events")) == names)


def test_a_version_that_is_on_its_way_is_waited_for(ends: Ends) -> None:
    mirror = ends.mirror()
    fetched(mirror, REPLICA)
    arriving = threading.Timer(0.2, publish, (ends.here.root, 1))
    arriving.start()
    await_version(ends.there.version(1))
    assert ends.there.version(1).exists()
    await_version(ends.there.version(0))  # A newer one is here: it never comes.
    arriving.join()


FORBIDDEN = [
    "secrets/node_token",
    "secrets/../secrets/node_token",
    "../other/lease.json",
    "/etc/passwd",
    "config/../journal.jsonl",
    "config//run.json",
    "config/.hidden",
    "journal.jsonl",
    "weights/version_00000001/../../journal.jsonl",
    "lease.json\n",
    "",
]


@pytest.mark.parametrize("path", FORBIDDEN)
@pytest.mark.parametrize("kind", ["read", "put", "append", "stage", "piece", "finish", "delete"])
def test_a_node_asks_for_nothing_but_its_own(ends: Ends, kind: str, path: str) -> None:
    (ends.here.root / "journal.jsonl").write_text("decisions")
    entry = content_entry(b"x")
    requests: dict[str, Request] = {
        "read": ReadRange(path, 0),
        "put": Put(path, 0, b"x", True),
        "append": Append(path, 0, b"x"),
        "stage": AskStaged(path, {"a": entry}),
        "piece": PutPiece(path, "a", 0, b"x"),
        "finish": Finish(path, {"a": entry}),
        "delete": Delete(path),
    }
    talk = ends.connect()
    with pytest.raises(CorruptStateError, match="is not for a node"):
        talk.ask(requests[kind], Done)
    talk.close()
    assert (ends.here.root / "journal.jsonl").read_text() == "decisions"


@pytest.mark.parametrize("file", ["../a", "/a", ".a", "a/../../b", ""])
def test_a_node_stages_nothing_beside_its_folder(ends: Ends, file: str) -> None:
    talk = ends.connect()
    for request in (PutPiece("model", file, 0, b"x"), Finish("model", {file: content_entry(b"x")})):
        with pytest.raises(CorruptStateError, match="is not for a node"):
            talk.ask(request, Done)
    talk.close()


def test_a_range_that_leaves_a_gap_is_refused(ends: Ends) -> None:
    talk = ends.connect()
    for request in (
        PutPiece("model", "a", 7, b"x"),
        Append("logs/a.log", 7, b"x"),
        Put("tokens/step_1/rank_0.bin", 7, b"x", True),
    ):
        with pytest.raises(CorruptStateError, match="missing"):
            talk.ask(request, Done)
    talk.close()


def test_a_long_file_appears_with_its_last_range(ends: Ends) -> None:
    path = "tokens/step_1/rank_0.bin"
    talk = ends.connect()
    talk.ask(Put(path, 0, b"one ", False), Done)
    assert not (ends.here.root / path).exists()
    talk.ask(Put(path, 4, b"two", True), Done)
    assert (ends.here.root / path).read_bytes() == b"one two"
    talk.close()


def test_a_link_in_the_place_of_a_file_is_not_followed(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (ends.here.root / "lease.json").symlink_to(tmp_path / "secret")
    (ends.here.logs / "a.log").symlink_to(tmp_path / "secret")
    talk = ends.connect()
    with pytest.raises(CorruptStateError):
        talk.ask(ReadRange("lease.json", 0), FileRange)
    with pytest.raises(StorageError):
        talk.ask(Append("logs/a.log", 0, b"x"), Done)
    talk.close()
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_folder_that_arrived_otherwise_than_announced_gets_no_name(ends: Ends) -> None:
    talk = ends.connect()
    files = {"a": content_entry(b"right")}
    assert talk.ask(AskStaged("model", files), Staged) == Staged({"a": 0}, False)
    talk.ask(PutPiece("model", "a", 0, b"wrong"), Done)
    with pytest.raises(StorageError, match="arrived damaged"):
        talk.ask(Finish("model", files), Done)
    assert not ends.here.model.exists()
    talk.ask(PutPiece("model", "a", 0, b"right"), Done)
    for _ in range(2):  # The answer to the first may be lost.
        talk.ask(Finish("model", files), Done)
    talk.close()
    assert (ends.here.model / "a").read_bytes() == b"right"


@pytest.mark.parametrize("is_hidden", [False, True], ids=["seen", "remembered as absent"])
def test_a_folder_of_something_else_is_left_alone(
    ends: Ends, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a network disk remembers for a while that it was absent."""
    root, exists = ends.there.root, Path.exists
    root.mkdir(parents=True)
    (root / "thesis.tex").touch()
    monkeypatch.setattr(Path, "exists", lambda it: not (is_hidden and it == root) and exists(it))
    with pytest.raises(ConfigError, match=r"holds 'thesis\.tex'; move it away"):
        ends.mirror()
    assert os.listdir(root) == ["thesis.tex"]


def test_two_node_sides_with_one_disk_do_not_share_a_copy(ends: Ends) -> None:
    first = ends.mirror()
    (ends.there.logs / "trainer.log").touch()
    with pytest.raises(DeadlineError, match="another node side keeps its copy"):
        ends.mirror()
    assert (ends.there.logs / "trainer.log").exists()
    first.close()
    ends.mirror()


def test_batches_come_in_their_order_however_the_disk_lists_them(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer refuses to wait for one behind which another lies already."""
    names = [f"batch_{step:08d}" for step in range(3)]
    for name in names:
        with stage(ends.here.spool / name, FILES) as staging:
            seal(staging, ends.here.spool / name, 0, files=FILES)
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(real(path), reverse=True))
    fetched(ends.mirror())
    read = [it.path for it in ends.asked if isinstance(it, ReadRange) and "batch" in it.path]
    assert read == [f"spool/{name}/{MANIFEST_NAME}" for name in names]


def test_what_waits_for_the_copy_holds_up_nothing_that_may_not(ends: Ends) -> None:
    """A launcher that hears of no end in time says that processes cannot be killed."""
    ends.is_cut = True
    side = NodeSide(ends.there)
    side._mirror = ends.mirror()
    side._send_when_brought(Ended(1, 75, "", 75, Fault("trainer", "exit"), []))
    side._look_at_mirror()
    assert side._link.num_unacknowledged == 0
    side._send_when_brought(AllEnded(1), 0.0)
    side._look_at_mirror()
    assert side._link.num_unacknowledged == 2


def test_a_copy_is_no_run_to_start_or_to_resume(ends: Ends) -> None:
    ends.mirror()
    root = ends.there.root
    with pytest.raises(RunDirectoryError, match="a node's copy of a run"):
        reopen_run(root.parent, root.name, kind="rl")
    with pytest.raises(RunDirectoryError, match="a node's copy of a run"):
        open_run(root.parent, root.name, kind="rl", clean=True)


def test_a_frame_that_is_longer_than_any_is_not_read(ends: Ends) -> None:
    talk = ends.connect()
    talk._socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError):
        talk.receive(Done)
    talk.close()


def test_a_fenced_end_is_said_nothing(ends: Ends) -> None:
    ends.is_fenced = True
    talk: Talk = ends.connect()
    with pytest.raises(ConnectionError):
        talk.ask(ReadRange("lease.json", 0), FileRange)
    talk.close()
    assert issubclass(FencedError, Exception)
