"""Versions from memory to memory: the trainer's first rank broadcasts to every inference worker.

The collective runs over nccl between GPUs or over gloo through main memory, as the launch decided
and both ends were told. A version is a directory as with files, but in the place of tensors it
holds `stream.json`: what will be sent, in which order, with a checksum of each tensor. It has a
manifest and a digest like any other, so publishing, refusing and applying need no second way.

    trainer, rank 0     publish v: copy the tensors into buckets, write stream.json, train on
    orchestrator        POST /gradus/apply with the directory and the digest
    inference workers   post that they are ready for v, then receive, check, load
    sender thread       waits for all of them, then broadcasts v and forgets the copy

A version can be received once. The group is rank 0 = sender, then the workers by their rank. Where
no group can be formed, or one breaks, the sender writes the copies into files and says where, a
worker continues with the tensor that it lacks, and later versions are published as files.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from gradus.errors import DeadlineError, ProcessError
from gradus.files import DurableFiles, PatientFiles
from gradus.heartbeat import busy
from gradus.log import get_logger
from gradus.run.paths import RunDirectory
from gradus.sealed import Entries, content_entry, stage, sweep
from gradus.weights.buckets import (
    BUCKET_BYTES,
    PackedSnapshot,
    PackedTensors,
    StreamedTensor,
    pack,
)
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published
from gradus.weights.rendezvous import (
    SENDER,
    Backend,
    GroupError,
    GroupPlace,
    Member,
    Rendezvous,
    WeightGroup,
    form_group,
    group_obstacle,
)
from gradus.weights.stream import (
    STREAM_NAME,
    TIMEOUT_SECONDS,
    WeightStream,
    done_key,
    files_key,
    go_key,
    group_path,
    leave,
    ready_key,
    send_buckets,
)
from gradus.weights.tensor_files import write_tensors

_LOOK_SECONDS = 0.01

logger = get_logger(__name__)


@dataclass(frozen=True)
class BroadcastSettings:
    """Who takes part in a broadcast, and how it is sent."""

    num_receivers: int
    device: torch.device
    """The trainer's."""
    backend: Backend = "gloo"
    timeout_seconds: float = TIMEOUT_SECONDS
    bucket_bytes: int = BUCKET_BYTES

    @property
    def group_device(self) -> torch.device:
        """Where the copies lie: gloo sends from main memory."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def snapshot(self) -> PackedSnapshot | None:
        """Packs on the trainer's GPU; None for main memory, where packing would hold up a step."""
        if self.group_device.type == "cpu":
            return None
        return PackedSnapshot(self.device, self.bucket_bytes)


@dataclass(frozen=True)
class _Copy:
    """A version that is kept until it is sent."""

    packed: PackedTensors
    entries: list[StreamedTensor]


class BroadcastWeights:
    """The trainer's end: owns copies of the versions that were not fetched yet, and one thread."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        term: int,
        extra_files: Mapping[str, bytes],
        settings: BroadcastSettings,
        keep_published: int = 2,
        on_fallback: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A publish waits while `keep_published` copies are unsent; `on_fallback` hears why the
        weights go through files from then on."""
        self._settings = settings
        self._run_dir = run_dir
        self._term = term
        self._keep = keep_published
        self._on_fallback = on_fallback
        self._copies: dict[int, _Copy] = {}
        self._written: _Copy | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._reason: str | None = None
        self._is_closed = False
        self._group: WeightGroup | None = None
        self._left: list[WeightGroup] = []
        self._files = FilesystemWeights(
            run_dir,
            term=term,
            extra_files=extra_files,
            # The one that is served was sent.
            keep_published=keep_published + 1,
            write=self._write,
        )
        self._rendezvous = (run_dir.weights / f".rendezvous-{term}").absolute()
        self._remove_rendezvous()
        self._version = 0
        self._thread: threading.Thread | None = None

    def wait_for_room(self) -> None:
        self._wait_until(lambda: len(self._copies) < self._keep, "fetch older versions")

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Copy `version` and announce it; FencedError when a newer owner took the run.

        DeadlineError when inference fetches nothing for too long; ProcessError when a broadcast
        failed and files could not help.
        """
        self.wait_for_room()
        self._version = version
        # Before a worker can hear of a version, so that it knows whose end to look for.
        rendezvous = self._begin() if self._thread is None else None
        try:
            published = self._files.publish_version(version, tensors)
        finally:
            copy, self._written = self._written, None
        if copy is None:
            return published
        with self._changed:
            self._copies[version] = copy
            self._changed.notify_all()
        if rendezvous is not None:
            self._thread = threading.Thread(
                target=self._send_all, args=(rendezvous,), name="gradus-weights", daemon=True
            )
            # A thread that is inside torch while Python takes itself apart aborts the process.
            atexit.register(self.close)
            self._thread.start()
        return published

    def drain(self) -> None:
        self._wait_until(lambda: not self._copies, "fetch the last versions")

    def close(self) -> None:
        """Forget what was not fetched; directories of published versions stay."""
        with self._changed:
            self._is_closed = True
            self._copies.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            atexit.unregister(self.close)
        self._remove_rendezvous()

    def _remove_rendezvous(self) -> None:
        for path in (self._rendezvous, group_path(self._rendezvous)):
            path.unlink(missing_ok=True)

    def _write(
        self, directory: Path, tensors: Iterable[tuple[str, Tensor]], files: DurableFiles
    ) -> Entries:
        if self._reason is not None:
            return write_tensors(directory, _on_cpu(tensors), files)
        settings = self._settings
        if isinstance(tensors, PackedTensors):
            packed = tensors
        else:
            packed = pack(tensors, settings.group_device, settings.bucket_bytes)
        self._written = _Copy(packed, packed.entries())
        stream = WeightStream(
            self._version,
            settings.num_receivers,
            str(self._rendezvous),
            settings.bucket_bytes,
            self._written.entries,
        )
        content = msgspec.json.encode(stream)
        files.stage(directory / STREAM_NAME, content)
        return {STREAM_NAME: content_entry(content)}

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        seconds = self._settings.timeout_seconds
        with busy(f"waits for inference to {what}", seconds), self._changed:
            is_met = self._changed.wait_for(
                lambda: self._failure is not None or condition(), timeout=seconds
            )
            if self._failure is not None:
                raise ProcessError(
                    f"the broadcast of weights failed: {self._failure}"
                ) from self._failure
        if not is_met:
            raise DeadlineError(
                f"inference did not {what} in {seconds:g} s; see logs/inference.log"
            )

    def _begin(self) -> Rendezvous:
        settings = self._settings
        rendezvous = Rendezvous(
            self._rendezvous, settings.num_receivers, timeout_seconds=settings.timeout_seconds
        )
        rendezvous.register(SENDER, Member.current(settings.device, settings.backend))
        return rendezvous

    def _send_all(self, rendezvous: Rendezvous) -> None:
        """The sender thread: versions in their order, each when every worker asks for it."""
        try:
            with _own_stream(self._settings.group_device):
                while (version := self._next_asked(rendezvous)) is not None:
                    self._send(rendezvous, version)
                    self._forget(version)
        except BaseException as error:
            logger.exception("the broadcast of weights failed")
            # First of all: telling the workers may fail too, and the trainer must not wait for it.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            rendezvous.end(f"the sender of weights gave up: {error}")

    def _next_asked(self, rendezvous: Rendezvous) -> int | None:
        """The oldest copy, once all workers are ready for it; None when closed.

        ProcessError when a worker ended during the wait.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._copies))
                if self._is_closed:
                    return None
                # A version that inference never asked for is overtaken by a newer one.
                waiting = sorted(self._copies)
            for version in waiting:
                if rendezvous.have_all_posted(ready_key(version)):
                    return version
            rendezvous.look(needs_group=False)
            time.sleep(_LOOK_SECONDS)

    def _send(self, rendezvous: Rendezvous, version: int) -> None:
        copy = self._copies.get(version)
        if copy is None:
            return
        if self._reason is None:
            try:
                if self._group is None:
                    self._group = self._form_group(rendezvous, version)
                else:
                    rendezvous.post(go_key(version))
                send_buckets(rendezvous, self._group, copy.packed.buckets)
                return
            except GroupError as error:
                self._fall_back(rendezvous, str(error))
        self._hand_over(rendezvous, version, copy)

    def _form_group(self, rendezvous: Rendezvous, version: int) -> WeightGroup:
        settings = self._settings
        member = Member.current(settings.device, settings.backend)
        if obstacle := group_obstacle(member, rendezvous.workers()):
            raise GroupError(obstacle)
        rendezvous.post(go_key(version))
        place = GroupPlace(group_path(self._rendezvous), 0, settings.num_receivers + 1)
        return form_group(rendezvous, place, settings.backend, settings.group_device)

    def _fall_back(self, rendezvous: Rendezvous, reason: str) -> None:
        logger.warning("weights go through files from now on, no group of processes: %s", reason)
        self._reason = reason
        rendezvous.give_up_group(reason)
        if self._group is not None:
            self._left.append(leave(self._group))
            self._group = None
        self._on_fallback(reason)

    def _hand_over(self, rendezvous: Rendezvous, version: int, copy: _Copy) -> None:
        """Give the workers a version as files in a folder of this transfer alone."""
        files = PatientFiles()
        with stage(self._run_dir.weights / f"sent_{version:08d}", files, term=self._term) as folder:
            try:
                write_tensors(folder, _on_cpu(copy.packed), files)
                rendezvous.post(files_key(version), str(folder.absolute()))
                rendezvous.wait_until(
                    lambda: self._is_closed or rendezvous.have_all_posted(done_key(version)),
                    f"the reading of version {version} by inference",
                    needs_group=False,
                )
            finally:
                sweep(folder, files)

    def _forget(self, version: int) -> None:
        with self._changed:
            for sent in [v for v in self._copies if v <= version]:
                del self._copies[sent]
            self._changed.notify_all()


def _on_cpu(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.cpu()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a stream for this thread, so that a transfer does not wait for the training that is
    queued; what it sends is there, since its checksums were read."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        yield
