"""The link to the trainer: batches go out, events come in, and it knows who owes whom.

    send(batch)                              the trainer owes an answer
    every batch sent is trained and served   it owes nothing, and may be silent

While it owes an answer, silence beyond the deadline ends the run. A version frees slots only once
inference serves it: earlier, a group could start on weights that are already too old. Next page:
`../trainer/ladder.py`, what the trainer does with a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradus.errors import DeadlineError, ProtocolError
from gradus.log import get_logger
from gradus.orchestrator.groups.batcher import SampleBatch
from gradus.orchestrator.groups.packing import Layout, build_batch, digest_samples
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.play.inference_client import AppliedPolicy, PolicyClient
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.metrics import Metrics, PendingStepMetrics
from gradus.orchestrator.records.watchdog import WaitBoard, WaitFor
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.standing import TrainerProgress
from gradus.run.deadlines import LONGEST_WAIT_SECONDS
from gradus.run.model_files import weights_digest
from gradus.transport import SpoolSender
from gradus.wire.events import Event, PolicyPublished, StepFinished
from gradus.wire.micro_batch import Batch

log = get_logger(__name__)


@dataclass
class TrainerLink:
    """Owns the progress of trainer and inference, and the metrics of unfinished steps."""

    sender: SpoolSender
    policy: PolicyClient
    slots: GroupSlots
    journal: Journal
    records: RecordWriter
    board: WaitBoard
    check_lease: Callable[[], None]
    """FencedError when this process must stop writing."""
    clock: Callable[[], float]
    layout: Layout
    term: int
    max_steps: int
    step_metrics: PendingStepMetrics
    served_at: float
    """When inference began to serve its present version."""
    answer_seconds: float = LONGEST_WAIT_SECONDS
    """How long the trainer may be silent while it owes an answer."""
    to_send_again: list[SampleBatch] = field(default_factory=list)
    """Batches that were sent before a restart and are not trained."""
    is_ending: bool = False
    first_step: int = 0
    """Steps that the weights of the run's checkpoint contain; 0 for a fresh run."""
    num_shipped: int = 0
    """Batches sent; like the other counts, those before a restart count too."""
    num_noted: int = 0
    """Those of which the journal says so."""
    num_finished: int = 0
    num_served: int = 0
    is_serving: bool = True
    """Whether inference serves what the run trains; not so after a resume, until it is told."""
    told_until: int = 0
    """A process before this one in its term sent batches up to here at most; the trainer may speak
    of them before the journal says again that they were sent."""
    _noted: asyncio.Event = field(default_factory=asyncio.Event)
    _owes_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_all_batches(self) -> bool:
        """Whether the last batch of the run was sent."""
        return self.is_ending or self.num_shipped >= self.max_steps

    async def end_early(self) -> None:
        """Tell the trainer that no other batch comes: it saves, and then it is done."""
        self.is_ending = True
        self._owes_answer.set()
        await self.sender.end(self.num_shipped)

    async def send(self, batch: SampleBatch) -> None:
        """Pack a batch and put it into the spool."""
        packed, digests = await asyncio.to_thread(self._pack, batch)
        self.check_lease()
        self.num_shipped = batch.step + 1
        self._owes_answer.set()
        with self.board.waiting("ship", WaitFor("room on the disk", on="disk")):
            await self.sender.send(packed)
        self.journal.write(
            JournalEvent.BATCH_SHIPPED,
            step=batch.step,
            groups=batch.group_ids,
            samples=[sample.id for sample in batch.samples],
            digests=digests,
        )
        self.num_noted = batch.step + 1
        self._noted.set()

    def _pack(self, batch: SampleBatch) -> tuple[Batch, dict[str, str]]:
        """Runs on a thread: it can take seconds, and the loops would stand still."""
        samples = batch.samples
        packed = build_batch(samples, step=batch.step, term=self.term, layout=self.layout)
        return packed, digest_samples(samples)

    async def next_event(self) -> Event:
        """The trainer's next event that is news, noted in the journal and the metrics.

        A trainer that was started again says some things a second time. DeadlineError when it owes
        an answer and says nothing for too long.
        """
        while True:
            event = await self._receive()
            # What follows from a batch must not stand in the journal without it.
            while self.num_noted < min(num_told(event), max(self.told_until, self.num_shipped)):
                self._noted.clear()
                await self._noted.wait()
            if not is_known(event, self):
                break
            log.info("the trainer says again: %s", event)
        match event:
            case StepFinished(step=step, metrics=metrics):
                self.journal.write(JournalEvent.STEP_FINISHED, step=step)
                self.num_finished = step + 1
                self._note_answer()
                self.records.add_metrics(self.step_metrics.finished(step, metrics), step=step)
        return event

    async def _receive(self) -> Event:
        receiving = asyncio.ensure_future(self.sender.receive_event())
        owes = asyncio.ensure_future(self._owes_answer.wait())
        try:
            nothing_owed = WaitFor(f"batch {self.num_shipped} to be sent", on="ship")
            with self.board.waiting("refresh", nothing_owed, is_progress=False):
                await asyncio.wait({receiving, owes}, return_when=asyncio.FIRST_COMPLETED)
            with self.board.waiting("refresh", WaitFor("the trainer's next word", on="trainer")):
                async with asyncio.timeout(self.answer_seconds):
                    return await receiving
        except TimeoutError as error:
            raise DeadlineError(
                f"the trainer said nothing for {self.answer_seconds:g} s although batch "
                f"{self.num_shipped - 1} was sent; see logs/trainer.log"
            ) from error
        finally:
            owes.cancel()
            receiving.cancel()

    def _note_answer(self) -> None:
        answered = min(self.num_finished, self.num_served)
        if answered == self.num_shipped and not self.has_all_batches:
            self._owes_answer.clear()

    async def serve_first(self) -> None:
        """Inference starts from the initial weights: serve the checkpoint's before any episode."""
        self._owes_answer.set()
        event = await self.next_event()
        if not isinstance(event, PolicyPublished) or event.version != self.first_step:
            raise ProtocolError(
                f"a resumed trainer must publish version {self.first_step} first, not {event}"
            )
        applied = await self._apply(event)
        self.is_serving = True
        metrics = self.step_metrics.applied_again(applied, now=self.served_at)
        self.records.add_metrics(metrics, step=applied.version - 1)

    def refuse_untrained(self, published: PolicyPublished) -> None:
        """ProtocolError for a version that is ahead of the batches sent."""
        if published.version > self.num_shipped:
            raise ProtocolError(
                f"the trainer published version {published.version}, "
                f"but only {self.num_shipped} batches were sent"
            )

    async def serve(
        self, published: PolicyPublished, engine_metrics: Callable[[], Metrics]
    ) -> AppliedPolicy:
        """Let inference serve a version, and free the slots of the groups that it was trained on.

        `engine_metrics` is asked once the version is served.
        """
        applied = await self._apply(published)
        step = applied.version - 1
        self.step_metrics.shipped(step, engine_metrics())
        self.records.add_metrics(self.step_metrics.applied(applied, now=self.served_at), step=step)
        return applied

    async def _apply(self, published: PolicyPublished) -> AppliedPolicy:
        to_serve = WaitFor(f"version {published.version} to be served", on="inference")
        weights = weights_digest(Path(published.directory))
        with self.board.waiting("refresh", to_serve):
            if published.version < self.policy.version:
                # Told again to an orchestrator that was started again: inference is further.
                applied = AppliedPolicy(published.version, 0.0, 0.0, await self.policy.status())
            else:
                applied = await self.policy.apply(published)
        self.journal.write(
            JournalEvent.POLICY_APPLIED,
            version=applied.version,
            slots_freed=self.slots.release_trained(version=applied.version),
            weights=weights,
        )
        self.served_at = self.clock()
        self.num_served = applied.version
        self._note_answer()
        return applied


def num_told(event: Event) -> int:
    """Of how many batches an event of the trainer speaks; 0 where it speaks of none."""
    match event:
        case StepFinished(step=step):
            return step + 1
        case PolicyPublished(version=version):
            return version
    return 0


def is_known(event: Event, link: TrainerLink) -> bool:
    """Whether it was told before, by a trainer that another one replaced."""
    match event:
        case StepFinished():
            return num_told(event) <= link.num_finished
        case PolicyPublished():
            return link.is_serving and num_told(event) <= link.num_served
    return False


def progress_of_link(link: TrainerLink) -> TrainerProgress:
    """What the trainer had told, as it was handled."""
    return TrainerProgress(
        link.first_step,
        link.num_finished,
        link.num_served,
        link.sender.last_handled,
    )


def continue_from(before: TrainerProgress, link: TrainerLink, *, next_step: int) -> None:
    """Let a link begin where a checkpoint, or a process before this one in its term, was;
    `next_step` is the next one to fill."""
    link.first_step = before.first_step
    link.num_finished, link.num_served = before.num_finished, before.num_served
    link.num_shipped = min((it.step for it in link.to_send_again), default=next_step)
    link.num_noted = link.num_shipped
    is_same_term = before.last_event is not None
    link.is_serving = is_same_term or not link.first_step
    # Before each batch that is cut its groups are on disk, so only one may be missing there.
    link.told_until = next_step + 1 if is_same_term else 0
