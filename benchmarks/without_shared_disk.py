"""What a run pays where a node does not see its folder: batches, events and weights by TCP.

    python benchmarks/without_shared_disk.py --mebibytes 512 --output FILE

The launcher's end and two nodes on this machine, of a trainer and of a replica, each with a folder
of its own, over TLS on the loopback; beside it the same with one folder. Both take turns; medians.
Then everything is cut for `--cut-seconds`, while the trainer waits for its next batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradus.files import DurableFiles, read_json
from gradus.log import LogSettings
from gradus.nodes.certificates import LAUNCHER_NAME, read_node_token, tls_context
from gradus.nodes.folder import REPLICA, TRAINER, Done, Opening, Talk
from gradus.nodes.launcher import Nodes, NodeSettings
from gradus.nodes.link import Channel, Hello, Link, Welcome
from gradus.nodes.mirror import Mirror
from gradus.nodes.side import _first_body
from gradus.run.paths import RunDirectory
from gradus.run.ready import hand_over
from gradus.sealed import seal, stage
from gradus.transport import SpoolReceiver, SpoolSender
from gradus.weights.published import VersionLabel, verify_version
from gradus.wire.codec import decode
from gradus.wire.events import BatchReceived
from gradus.wire.micro_batch import Batch, MicroBatch
from gradus.wire.versions import VersionSpan

TOKENS = 262_144
FILES = DurableFiles()


class Node:
    """A node side without processes: its link, and its copy of the folder."""

    def __init__(self, home: RunDirectory, number: int, root: Path, wanted: str) -> None:
        self._home, self._number = home, number
        self._incarnation = f"{os.getpid()}.{number}"
        self._tls = tls_context(read_node_token(home.node_token), "node")
        self._open: list[Talk] = []
        self.is_cut = False
        self.link = Link()
        self._join()
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._beat)
        self._beats.start()
        self.run_dir = RunDirectory(root)
        self.mirror = Mirror(self.run_dir, self._connect)
        number = self.mirror.fetch(wanted)
        while not self.mirror.has_fetched(number):
            time.sleep(0.01)

    def _dial(self) -> socket.socket:
        if self.is_cut:
            raise ConnectionRefusedError
        where = read_json(self._home.launcher)
        plain = socket.create_connection((where["host"], where["port"]), timeout=5.0)
        return self._tls.wrap_socket(plain, server_hostname=LAUNCHER_NAME)

    def _join(self) -> None:
        import gradus

        version = ".".join(map(str, __import__("sys").version_info[:3]))
        channel = Channel(self._dial())
        root = str(self._home.root)
        hello = Hello(
            self._incarnation,
            self._number,
            *("host", root, gradus.__version__, version, "127.0.0.1", 0, 0),
            self.link.received,
        )
        channel.send(hello)
        answer: Welcome = decode(_first_body(channel), Welcome)
        self.link.open(channel, answer.received)

    def _beat(self) -> None:
        while not self._is_over.wait(0.2):
            self.link.take()
            self.link.beat()
            if self.link.channel is None and not self.is_cut:
                with contextlib.suppress(OSError):
                    self._join()

    def _connect(self, way: str) -> Talk:
        talk = Talk(self._dial())
        talk.send(Opening(self._incarnation, way))
        talk.receive(Done)
        self._open.append(talk)
        return talk

    def cut(self) -> None:
        self.is_cut = True
        self.link.drop()
        for talk in self._open:
            talk.end()

    def close(self) -> None:
        self._is_over.set()
        self._beats.join()
        self.mirror.close()
        self.link.drop()


def build_batch(step: int, micro_batch: MicroBatch) -> Batch:
    return Batch(step, 1, VersionSpan(0, 0), [[micro_batch]])


def publish(run_dir: RunDirectory, version: int, content: bytes) -> tuple[Path, str]:
    target = run_dir.version(version)
    with stage(target, FILES, term=1) as staging:
        FILES.stage(staging / "model.safetensors", content)
        sealed = seal(staging, target, VersionLabel(version, 1), files=FILES)
    return target, sealed.digest


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def time_weights(
    trainer: RunDirectory, replica: RunDirectory, versions: Iterator[int], content: bytes
) -> dict[str, float]:
    """Seconds until a version is announced, and until a replica has checked it."""
    version = next(versions)
    began = time.perf_counter()
    target, digest = publish(trainer, version, content)
    hand_over(trainer, target)
    announced = time.perf_counter() - began
    wait_for(replica.version(version))
    verify_version(replica.version(version), digest)
    checked = time.perf_counter() - began
    FILES.delete(target)
    return {"announced_seconds": announced, "checked_seconds": checked}


async def time_batches(
    sender: SpoolSender, receiver: SpoolReceiver, steps: range, micro_batch: MicroBatch
) -> list[float]:
    """Seconds of each batch from `send` to what the trainer has read, with its acknowledgement."""
    seconds = []
    for step in steps:
        began = time.perf_counter()
        await sender.send(build_batch(step, micro_batch))
        await asyncio.to_thread(receiver.receive, step, timeout_seconds=600)
        receiver.send_event(BatchReceived(step, 1))
        await sender.receive_event()
        seconds.append(time.perf_counter() - began)
        await sender.forget(step)
    return seconds


def made_up_batch() -> MicroBatch:
    """One row of TOKENS tokens, of the tests' builders."""
    import sys

    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from builders import build_micro_batch, build_sample

    return build_micro_batch([build_sample(length=4096, seed=n) for n in range(TOKENS // 4096)])


async def measure(root: Path, mebibytes: int, rounds: int, cut_seconds: float) -> dict[str, Any]:
    home, alone = RunDirectory(root / "home" / "run"), RunDirectory(root / "alone" / "run")
    for run_dir in (home, alone):
        for folder in (run_dir.spool, run_dir.weights, run_dir.ready):
            folder.mkdir(parents=True)
    settings = NodeSettings(1, "127.0.0.1", 600.0, 1.0, 600.0, LogSettings())
    content = np.random.default_rng(0).bytes(mebibytes << 20)
    micro_batch = made_up_batch()
    found: dict[str, Any] = {"files": [], "tcp": []}
    batches: dict[str, list[float]] = {"files": [], "tcp": []}
    with Nodes(home, settings) as nodes, contextlib.ExitStack() as stack:
        far = [
            Node(home, 1, root / "a" / "run", TRAINER),
            Node(home, 2, root / "b" / "run", REPLICA),
        ]
        for node in far:
            stack.callback(node.close)
        ways = {
            "files": (alone, alone, alone),
            "tcp": (home, far[0].run_dir, far[1].run_dir),
        }
        ends = {}
        for way, (orchestrator, trainer, _) in ways.items():
            trainer.weights.mkdir(exist_ok=True)
            ends[way] = SpoolSender(orchestrator, 1, capacity=2), SpoolReceiver(trainer, 1, 0)
        versions, step = iter(range(1, 1000)), 0
        for _ in range(rounds):
            for way, (_, trainer, replica) in ways.items():
                found[way].append(time_weights(trainer, replica, versions, content))
                steps = range(step, step + 5)
                batches[way] += await time_batches(*ends[way], steps, micro_batch)
            step += 5
        for node in far:
            node.cut()
        healing = threading.Timer(cut_seconds, lambda: [setattr(n, "is_cut", False) for n in far])
        healing.start()
        began = time.perf_counter()
        await time_batches(*ends["tcp"], range(step, step + 1), micro_batch)
        after_cut = time.perf_counter() - began
        lost = nodes.missing([1, 2])
        for sender, receiver in ends.values():
            await sender.close()
            receiver.close()
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "weights_mebibytes": mebibytes,
        "weights": {way: _medians(rows, mebibytes) for way, rows in found.items()},
        "tokens_of_a_batch": TOKENS,
        "batches": {
            way: {
                "median_seconds": round(statistics.median(times), 4),
                "worst_seconds": round(max(times), 4),
                "tokens_per_second": round(TOKENS / statistics.median(times)),
            }
            for way, times in batches.items()
        },
        "cut": {
            "seconds": cut_seconds,
            "next_batch_after_healing_seconds": round(after_cut - cut_seconds, 2),
            "nodes_lost": lost,
        },
    }


def _medians(rows: list[dict[str, float]], mebibytes: int) -> dict[str, float]:
    result = {}
    for key in rows[0]:
        seconds = statistics.median(row[key] for row in rows)
        result[key] = round(seconds, 3)
        result[key.replace("seconds", "mebibytes_per_second")] = round(mebibytes / seconds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cut-seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="without-shared-disk-"))
    try:
        result = asyncio.run(measure(root, options.mebibytes, options.rounds, options.cut_seconds))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
