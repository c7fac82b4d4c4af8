"""Broadcast weights arrive as they were published, once, and a silent receiver is an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from gradus.errors import CorruptStateError, DeadlineError, ProcessError
from gradus.run.paths import RunDirectory
from gradus.weights.broadcast import (
    STREAM_NAME,
    BroadcastWeights,
    StreamReceiver,
    agree_on_device,
    checksum,
    group_device_type,
    is_stream,
    read_stream,
)
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published, verify_version

pytestmark = pytest.mark.torch

Tensors = dict[str, Tensor]
Build = Callable[..., BroadcastWeights]


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

    def build_one(**options: int | float) -> BroadcastWeights:
        settings = {"num_receivers": 1, "timeout_seconds": 20.0} | options
        weights = BroadcastWeights(
            RunDirectory(tmp_path), term=0, extra_files={}, device=torch.device("cpu"), **settings
        )  # type: ignore[arg-type]
        built.append(weights)
        return weights

    yield build_one
    for weights in built:
        weights.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def receiver(rank: int = 0) -> StreamReceiver:
    return StreamReceiver(rank, torch.device("cpu"), timeout_seconds=20.0)


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
        assert all(are_equal(future.result(20), tensors(version)) for future in arrived)
    weights.drain()


def test_training_on_does_not_change_what_was_published(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    weights = build()
    parameter = torch.ones(4)
    published = weights.publish_version(1, [("w", parameter)])
    parameter.zero_()
    assert torch.equal(receive(threads, receiver(), published).result(20)["w"], torch.ones(4))


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
    assert are_equal(receive(threads, receiver(), newer).result(20), tensors(2))
    weights.drain()


def test_a_version_is_received_once(build: Build, threads: ThreadPoolExecutor) -> None:
    published = build().publish_version(1, tensors(1).items())
    worker = receiver()
    receive(threads, worker, published).result(20)
    with pytest.raises(CorruptStateError, match="was sent once"):
        receive(threads, worker, published).result(20)


def test_a_tensor_that_is_not_the_announced_one_is_refused(
    build: Build, threads: ThreadPoolExecutor
) -> None:
    published = build().publish_version(1, tensors(1).items())
    path = published.directory / STREAM_NAME
    stream = read_stream(published.directory)
    wrong = [
        msgspec.structs.replace(entry, checksum=entry.checksum + 1) for entry in stream.tensors
    ]
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(stream, tensors=wrong)))
    with pytest.raises(CorruptStateError, match="norm of version 1 arrived with another checksum"):
        receive(threads, receiver(), published).result(20)


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
    published = weights.publish_version(1, tensors(1).items())
    stream = read_stream(published.directory)
    store = FileStore(stream.meeting, 2)
    store.set("device/0", "cpu")
    store.set("ready/1/0", "ready")
    assert weights._thread is not None
    weights._thread.join(20)
    with pytest.raises(ProcessError, match="the broadcast of weights failed"):
        weights.drain()


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
from gradus.weights.broadcast import BroadcastWeights

def say() -> None:
    print("sender" if any(t.name == "gradus-weights" for t in threading.enumerate()) else "none")

run_dir = RunDirectory(Path(sys.argv[1]))
weights = BroadcastWeights(
    run_dir, term=0, extra_files={}, num_receivers=1, device=torch.device("cpu")
)
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


@pytest.mark.parametrize(
    ("devices", "group"),
    [
        (["cuda", "cuda", "cuda"], "cuda"),
        (["cuda", "cpu"], "cpu"),
        (["cpu", "cuda"], "cpu"),
        (["cpu", "cpu"], "cpu"),
    ],
)
def test_a_group_uses_gpus_only_when_every_side_has_one(devices: list[str], group: str) -> None:
    assert group_device_type(devices) == group


def test_a_trainer_with_a_gpu_meets_a_worker_without_one_in_main_memory() -> None:
    store = HashStore()
    store.set("device/0", "cuda")
    store.set("device/1", "cpu")
    assert agree_on_device(store, torch.device("cuda", 3), 2) == torch.device("cpu")
    assert store.get("group") == b"cpu"
    store.set("device/1", "cuda")
    assert agree_on_device(store, torch.device("cuda", 3), 2) == torch.device("cuda", 3)
    assert store.get("group") == b"cuda"


WORKER = """
import os, sys
from pathlib import Path
import torch
from gradus.weights.broadcast import StreamReceiver

rank, is_to_die = int(sys.argv[1]), sys.argv[2] == "dies"
worker = StreamReceiver(rank, torch.device("cpu"), timeout_seconds=120.0)
for line in sys.stdin:
    if is_to_die and worker._last_version == 1:
        os._exit(3)
    try:
        dict(worker.receive(Path(line.strip())))
    except Exception as error:
        print("let go:", type(error).__name__, flush=True)
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
            worker.communicate(timeout=30)


def test_a_worker_that_waits_for_the_group_hears_that_the_sender_gave_up(
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
    store = FileStore(stream.meeting, 3)
    store.set("process/1", f"{int(ended.stdout)} 1")
    waiting = receive(threads, receiver(0), published)
    with pytest.raises(ProcessError, match="the sender of weights gave up"):
        waiting.result(timeout=15)
