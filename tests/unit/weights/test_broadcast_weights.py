"""Broadcast weights arrive as they were published, once, and a silent receiver is an error."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradus.errors import CorruptStateError, DeadlineError, ProcessError
from gradus.run.paths import RunDirectory
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights
from gradus.weights.buckets import BUCKETS_IN_FLIGHT, checksum
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published, verify_version
from gradus.weights.receiver import StreamReceiver
from gradus.weights.rendezvous import Member, Rendezvous, WeightGroup
from gradus.weights.stream import STREAM_NAME, is_stream, read_stream

pytestmark = pytest.mark.torch

Tensors = dict[str, Tensor]
Build = Callable[..., BroadcastWeights]

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "num_receivers": 1,
    "device": CPU,
    "timeout_seconds": 20.0,
    "bucket_bytes": 32,
}
"""Buckets so small that tensors share one, fill one, and cross from one to the next."""


def tensors(value: float) -> Tensors:
    """Every dtype that models have, a scalar and an empty tensor among them."""
    return {
        "norm": torch.full((7,), value),
        "layer": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) * value,
        "scale": torch.tensor(value),
        "empty": torch.zeros(0, 4),
        "steps": torch.tensor([int(value)] * 3),
    }


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    built: list[BroadcastWeights] = []

    def build_one(keep_published: int = 2, **options: Any) -> BroadcastWeights:
        weights = BroadcastWeights(
            RunDirectory(tmp_path),
            term=0,
            extra_files={},
            settings=BroadcastSettings(**(SETTINGS | options)),
            keep_published=keep_published,
            on_fallback=lambda reason: (tmp_path / "reason").write_text(reason),
        )
        built.append(weights)
        return weights

    yield build_one
    for weights in built:
        weights.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def receiver(rank: int = 0, **options: Any) -> StreamReceiver:
    return StreamReceiver(rank, CPU, **({"timeout_seconds": 20.0} | options))


def receive(
    pool: ThreadPoolExecutor, worker: StreamReceiver, published: Published
) -> Future[Tensors]:
    return pool.submit(lambda: dict(worker.receive(published.directory)))


def are_equal(left: Tensors, right: Tensors) -> bool:
    return [*left] == [*right] and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def test_every_worker_gets_every_version(build: Build, threads: ThreadPoolExecutor) -> None:
    weights = build(num_receivers=2)
    workers = [receiver(0), receiver(1)]
    for version in (1, 2, 3):
        published = weights.publish_version(version, tensors(version).items())
        assert verify_version(published.directory, published.digest).label.version == version
        arrived = [receive(threads, worker, published) for worker in workers]
        assert all(are_equal(future.result(60), tensors(version)) for future in arrived)
    weights.drain()


def test_training_on_does_not_change_what_was_published(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build()
    parameter = torch.ones(4)
    published = weights.publish_version(1, [("w", parameter)])
    parameter.zero_()
    assert torch.equal(receive(threads, receiver(), published).result(60)["w"], torch.ones(4))


def test_a_stream_is_known_by_its_file(build: Build, tmp_path: Path) -> None:
    streamed = build().publish_version(1, tensors(1).items())
    stored = FilesystemWeights(RunDirectory(tmp_path / "other"), term=0, extra_files={})
    assert is_stream(streamed.directory)
    assert not is_stream(stored.publish_version(1, tensors(1).items()).directory)
    assert not list(streamed.directory.glob("*.safetensors"))
    shapes = {entry.name: entry.shape for entry in read_stream(streamed.directory).tensors}
    assert shapes == {name: list(tensor.shape) for name, tensor in tensors(1).items()}


def test_versions_that_nobody_asked_for_are_forgotten_when_a_newer_one_is_sent(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build(keep_published=2)
    weights.publish_version(1, tensors(1).items())
    newer = weights.publish_version(2, tensors(2).items())
    assert are_equal(receive(threads, receiver(), newer).result(60), tensors(2))
    weights.drain()


def test_a_version_is_received_once(build: Build, threads: ThreadPoolExecutor) -> None:
    published = build().publish_version(1, tensors(1).items())
    worker = receiver()
    receive(threads, worker, published).result(60)
    with pytest.raises(CorruptStateError, match="was sent once"):
        receive(threads, worker, published).result(60)


def test_a_tensor_that_is_not_the_announced_one_is_refused(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build()
    published = weights.publish_version(1, tensors(1).items())
    path = published.directory / STREAM_NAME
    stream = read_stream(published.directory)
    wrong = [
        msgspec.structs.replace(entry, checksum=entry.checksum + 1) for entry in stream.tensors
    ]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(stream, tensors=wrong)))
    with pytest.raises(CorruptStateError, match="norm of version 1 arrived with another checksum"):
        receive(threads, receiver(), published).result(60)
    with pytest.raises(ProcessError, match="inference worker 0: norm of version 1 arrived with"):
        weights.drain()


def test_weights_that_are_not_finite_are_not_published(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError, match="w holds a value that is not finite"):
        build().publish_version(1, [("w", torch.tensor([1.0, float("nan")]))])
    assert not RunDirectory(tmp_path).version(1).exists()


def test_a_publish_waits_for_a_slow_receiver_and_then_says_so(build: Build) -> None:
    weights = build(keep_published=1, timeout_seconds=0.2)
    weights.publish_version(1, tensors(1).items())
    with pytest.raises(DeadlineError, match=r"did not fetch older versions in 0\.2 s"):
        weights.publish_version(2, tensors(2).items())
    with pytest.raises(DeadlineError, match="did not fetch the last versions"):
        weights.drain()


def test_a_receiver_that_never_comes_to_the_group_is_an_error_of_the_sender(build: Build) -> None:
    weights = build(timeout_seconds=0.5)
    stream = read_stream(weights.publish_version(1, tensors(1).items()).directory)
    rendezvous = Rendezvous(Path(stream.rendezvous), 1, timeout_seconds=0.5)
    rendezvous.register("0", Member.current(CPU, "gloo"))
    rendezvous.post("ready/1/0")
    assert weights._thread is not None
    weights._thread.join(60)
    with pytest.raises(ProcessError, match=r"the reading of version 1 by inference did not happen"):
        weights.drain()
    for thread in threading.enumerate():
        if thread.name == "gradus-group":  # left behind, until its store gives up
            thread.join(60)


def test_a_damaged_description_is_refused(build: Build) -> None:
    published = build().publish_version(1, tensors(1).items())
    (published.directory / STREAM_NAME).write_text('{"version": 1}')
    with pytest.raises(CorruptStateError, match=STREAM_NAME):
        read_stream(published.directory)


def test_the_checksum_tells_values_and_dtypes_apart() -> None:
    value = torch.tensor([1.0, -2.0, 3.5])
    assert checksum(value) == checksum(value.clone())
    assert checksum(value) != checksum(-value)
    assert checksum(value) != checksum(value.bfloat16())


FORGETS_TO_CLOSE = """
import atexit, sys, threading
from pathlib import Path
import torch
from gradus.run.paths import RunDirectory
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights

def say() -> None:
    print("sender" if any(t.name == "gradus-weights" for t in threading.enumerate()) else "none")

run_dir = RunDirectory(Path(sys.argv[1]))
settings = BroadcastSettings(num_receivers=1, device=torch.device("cpu"))
weights = BroadcastWeights(run_dir, term=0, extra_files={}, settings=settings)
atexit.register(say)  # what is registered first is called last
weights.publish_version(1, [("w", torch.ones(2))])
say()
"""


def test_the_sender_ends_before_python_does(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORGETS_TO_CLOSE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("sender\nnone\n", 0), ended.stderr


WORKER = """
import os, sys
from pathlib import Path
import torch
from gradus.weights.receiver import StreamReceiver

rank, is_to_die = int(sys.argv[1]), sys.argv[2] == "dies"
worker = StreamReceiver(rank, torch.device("cpu"), timeout_seconds=120.0)
for line in sys.stdin:
    if is_to_die and worker._last_version == 1:
        os._exit(3)
    try:
        dict(worker.receive(Path(line.strip())))
    except Exception as error:
        print("let go:", type(error).__name__, error, flush=True)
        sys.exit(1)
    print("received", flush=True)
"""


def test_the_end_of_a_worker_ends_the_waits_of_the_others_and_of_the_trainer(build: Build) -> None:
    weights = build(num_receivers=2, timeout_seconds=120.0)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), fate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, fate in enumerate(["lives", "dies"])
    ]
    try:
        heard: list[str] = []
        for version in (1, 2):
            published = weights.publish_version(version, tensors(1.0).items())
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(f"{published.directory}\n")
                worker.stdin.flush()
            assert workers[0].stdout is not None
            heard.append(workers[0].stdout.readline())
        assert heard[0] == "received\n"
        assert heard[1].startswith("let go: ")
        with pytest.raises(ProcessError, match=r"inference worker 1 \(pid \d+\) ended before"):
            weights.drain()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=60)


def test_a_worker_that_waits_for_the_group_hears_that_another_ended(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build(num_receivers=2)
    published = weights.publish_version(1, tensors(1.0).items())
    stream = read_stream(published.directory)
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = msgspec.structs.replace(Member.current(CPU, "gloo"), pid=int(ended.stdout))
    Rendezvous(Path(stream.rendezvous), 2, timeout_seconds=20.0).register("1", dead)
    waiting = receive(threads, receiver(0), published)
    with pytest.raises(ProcessError, match=r"inference worker 1 \(pid \d+\) ended before"):
        waiting.result(timeout=60)


def test_where_no_group_can_be_formed_the_versions_come_through_files(
    build: Build, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    weights = build(backend="nccl")  # which no CPU has
    worker = receiver(backend="nccl")
    streamed = weights.publish_version(1, tensors(1).items())
    assert are_equal(receive(threads, worker, streamed).result(60), tensors(1))
    weights.drain()
    assert (tmp_path / "reason").read_text() == "the torch of the trainer was built without nccl"
    stored = weights.publish_version(2, tensors(2).items())
    assert not is_stream(stored.directory)
    found = load_file(stored.directory / "model.safetensors")
    assert are_equal({name: found[name] for name in tensors(2)}, tensors(2))
    assert [path.name for path in RunDirectory(tmp_path).weights.glob(".sent*")] == []


def test_a_version_that_was_announced_before_the_group_broke_comes_through_files_too(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build(backend="nccl")
    published = [weights.publish_version(v, tensors(v).items()) for v in (1, 2)]
    worker = receiver(backend="nccl")
    for version, it in enumerate(published, 1):
        assert are_equal(receive(threads, worker, it).result(60), tensors(version))
    weights.drain()


def test_ends_with_different_backends_say_so_at_once(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build(backend="gloo")
    published = weights.publish_version(1, tensors(1).items())
    told = "told to broadcast weights over gloo and inference worker 0 over nccl"
    with pytest.raises(ProcessError, match=told):
        receive(threads, receiver(backend="nccl"), published).result(60)
    with pytest.raises(ProcessError, match=told):
        weights.drain()


class Recorded:
    """A group that notes what passes, and breaks after some transfers when it is told so."""

    def __init__(self, group: WeightGroup, *, breaks_after: int | None = None) -> None:
        self.group = group
        self.breaks_after = breaks_after
        self.sizes: list[int] = []
        self.most_under_way = 0
        self._under_way: list[Any] = []

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        if self.breaks_after is not None and len(self.sizes) == self.breaks_after:
            raise RuntimeError("the link is down")
        self.sizes.append(tensor.numel())
        transfer = Transfer(self.group.broadcast(tensor, root), self._under_way)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        return transfer

    def abort(self) -> None:
        self.group.abort()


class Transfer:
    """One of a recorded group."""

    def __init__(self, transfer: Any, under_way: list[Any]) -> None:
        self._transfer = transfer
        self._under_way = under_way
        under_way.append(self)

    def is_completed(self) -> bool:
        return bool(self._transfer.is_completed())

    def wait(self) -> bool:
        self._under_way.remove(self)
        return bool(self._transfer.wait())


def test_no_transfer_is_larger_than_a_bucket_and_few_are_under_way(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights, worker = build(bucket_bytes=32), receiver()
    receive(threads, worker, weights.publish_version(1, tensors(1).items())).result(60)
    assert worker._group is not None
    recorded = worker._group = Recorded(worker._group)
    large = {"w": torch.arange(100, dtype=torch.float32)}
    published = weights.publish_version(2, large.items())
    assert are_equal(receive(threads, worker, published).result(60), large)
    assert recorded.sizes == [32] * 12 + [16]
    assert recorded.most_under_way == BUCKETS_IN_FLIGHT


def test_a_worker_goes_on_from_files_with_the_tensor_that_it_lacks(
    build: Build, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    weights = build(bucket_bytes=16, timeout_seconds=4.0)
    worker = receiver(timeout_seconds=4.0)
    receive(threads, worker, weights.publish_version(1, tensors(1).items())).result(60)
    assert worker._group is not None
    worker._group = Recorded(worker._group, breaks_after=4)
    published = weights.publish_version(2, tensors(2).items())
    assert are_equal(receive(threads, worker, published).result(60), tensors(2))
    weights.drain()
    assert (tmp_path / "reason").read_text() == "a transfer failed: the link is down"


DIES = """
import os, sys, threading
from pathlib import Path
import torch
from gradus.run.paths import RunDirectory
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights

settings = BroadcastSettings(num_receivers=2, device=torch.device("cpu"))
weights = BroadcastWeights(
    RunDirectory(Path(sys.argv[1])), term=0, extra_files={}, settings=settings
)
# The end comes before the thread that sends has begun.
start = threading.Thread.start
threading.Thread.start = lambda it: None if it.name == "gradus-weights" else start(it)
print(weights.publish_version(1, [("w", torch.ones(2))]).directory, flush=True)
os._exit(9)
"""


def test_a_worker_hears_at_once_that_the_trainer_was_killed(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    directory = Path(trainer.stdout.readline().strip())
    waiting = threads.submit(lambda: dict(receiver(0).receive(directory)))
    trainer.communicate(timeout=60)
    with pytest.raises(ProcessError, match=rf"the trainer \(pid {trainer.pid}\) ended before"):
        waiting.result(timeout=60)
