"""Supervised fine-tuning, from conversations to a model directory: one rank.

Every rank reads the same data in the same order, so a resumed run only needs to know how far it had
read. Versions are published only to be evaluated, and training does not wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradus.config import SftConfig, SftProcessConfig, TrainerConfig
from gradus.errors import ConfigError, StalledError
from gradus.files import write_atomically
from gradus.heartbeat import FIRST_STEP_SECONDS, beat, busy
from gradus.log import get_logger
from gradus.monitor import SFT_COLUMNS, Monitor
from gradus.run.checkpoints import CheckpointStore
from gradus.run.model_files import (
    image_tokens,
    model_config,
    model_folder,
    reads_images,
    text_part,
)
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records
from gradus.tokenizing import reply_end
from gradus.trainer.batches import ReadAhead, StepBatch, pack_own_share
from gradus.trainer.checkpoint.saving import CheckpointSaver, check_space, resume
from gradus.trainer.checkpoint.training_state import PART, TrainingState
from gradus.trainer.data.conversation_files import load_conversations, load_data_sets
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.conversations import Conversation, PlainText
from gradus.trainer.data.images import DataImages, Placeholders
from gradus.trainer.data.mixture import Mixture
from gradus.trainer.data.stream import ConversationStream, RowsAhead
from gradus.trainer.distributed import World, join_world, named_failures, training_device
from gradus.trainer.entry.evaluated_versions import EvaluatedVersions
from gradus.trainer.images.pixels import Pixels, RowRule, load_processor
from gradus.trainer.ladder import Ladder, StepReport, build_monitor, write_ready_file
from gradus.trainer.learner import Learner
from gradus.trainer.model.load import load_tokenizer
from gradus.trainer.model.probe import refuse_inexact
from gradus.trainer.publish import model_files
from gradus.trainer.tensors import ReadyMicroBatch, TrainTensors
from gradus.transport import BatchesEnded
from gradus.weights.publishing_thread import PublishingThread
from gradus.wire.control_tokens import read_stop_token_ids
from gradus.wire.micro_batch import MicroBatch

logger = get_logger(__name__)

_LOSSES = ("validation/loss/before", "validation/loss/mean")

_ROWS_SECONDS = 20.0
"""How long the first step waits until every row was encoded; then that goes on beside it."""


def run(config: SftProcessConfig) -> None:
    """Train all steps of a supervised run; under torchrun, as one of its ranks."""
    with join_world(
        training_device(), deterministic=config.deterministic, parallel=config.parallel
    ) as world:
        torch.manual_seed(config.seed)
        run_dir = RunDirectory(Path(config.run_dir).absolute())
        monitor = build_monitor(run_dir, world, max_steps=config.max_steps, columns=SFT_COLUMNS)
        with closing(monitor), PublishingThread() as thread:
            _train(config, world, monitor, thread)


def _train(
    config: SftProcessConfig, world: World, monitor: Monitor, thread: PublishingThread
) -> None:
    run_dir = RunDirectory(Path(config.run_dir).absolute())
    conversations, mixture = load_data_sets(config.data, images := DataImages(world))
    held_out = load_held_out(config, images)
    images.exchange()
    processor, tokenizer = image_processor(config, images), load_tokenizer(config.model)
    encoder = build_encoder(config, tokenizer, images, processor)
    stream = _build_stream(config, conversations, mixture, encoder)
    rows = RowsAhead(stream)
    learner = Learner.build(
        config.model,
        config,
        TrainerConfig().loss,
        max_steps=config.max_steps,
        world=world,
        is_resumed=config.resume_step is not None,
    )
    files = model_files(learner.model, tokenizer, learner.dtype)
    pixels = _pixels(processor, learner, images)
    validation = _build_validation(config, learner, stream, held_out, pixels)
    versions = EvaluatedVersions.build(config, learner, run_dir, files, thread)
    batches = ConversationBatches(stream, config, world, learner.vocabulary, pixels, rows)
    batches.validation = validation
    saver = _build_saver(config, learner.state, run_dir, batches)

    def record(report: StepReport) -> None:
        monitor.record({**report.metrics, **before.get(report.step, {})}, step=report.step)
        if versions is not None:
            versions.announce(report.published)

    ladder = Ladder(
        learner,
        batches,
        record=record,
        validate=None if validation is None else validation.run_when_due,
        publish_version=None if versions is None else versions.publish_when_due,
        saver=saver,
    )
    write_ready_file(run_dir, config.term, world)
    logger.info("learns from %d conversations", len(conversations))
    first_step = _first_step(config, saver, stream)
    if config.resume_step is not None:
        refuse_inexact(learner.policy, world)
    if versions is not None and config.resume_step is not None:
        versions.resume_at(first_step)
    before = {} if validation is None else validation.begin_at(first_step, run_dir)
    with closing(batches):
        rows.wait(_ROWS_SECONDS, goes_on=world.is_first)
        end = ladder.train(first_step, config.max_steps)
    if validation is not None and end < config.max_steps:
        validation.note_end(run_dir)
        versions = versions and versions.ended_at(end)
    if versions is not None:  # where the final model lies, the last version does too
        versions.publisher.settle()
    learner.save(run_dir, files)
    if versions is not None:
        versions.finish()


def _build_stream(
    config: SftConfig,
    conversations: Sequence[Conversation | PlainText],
    mixture: Mixture,
    encoder: ConversationEncoder,
) -> ConversationStream:
    return ConversationStream(
        conversations,
        encoder,
        max_tokens=most_tokens(config),
        seed=config.seed,
        shuffle=config.data.shuffle,
        mixture=mixture,
    )


def _pixels(processor: Any, learner: Learner, images: DataImages) -> Pixels | None:
    """What makes them where the data shows images."""
    if processor is None:
        return None
    return Pixels.made_by(processor, RowRule.of(learner.model), images.read, learner.dtype)


class ConversationBatches:
    """The next conversations, of which each rank trains its own share; encoded a step ahead."""

    def __init__(
        self,
        stream: ConversationStream,
        config: SftConfig,
        world: World,
        vocabulary: int,
        pixels: Pixels | None = None,
        rows: RowsAhead | None = None,
    ) -> None:
        self.stream = stream
        self.rows = rows
        self.validation: Validation | None = None
        """What may end the run before its last step."""
        self.config = config
        self.world = world
        self.vocabulary = vocabulary
        self.pixels = pixels
        self.counters = stream.counters()
        """Where the stream stood behind the batches received; it may have read more."""
        self._ahead = ReadAhead(self._prepare, end_step=config.max_steps)

    def receive(self, step: int) -> StepBatch:
        """The next batch, whatever the step: the stream knows what was read before; BatchesEnded
        where the validation loss fell long ago."""
        if self.validation is not None and self.validation.end:
            raise BatchesEnded
        if self.rows is not None:
            self.rows.check()
        batch, self.counters = self._ahead.take(step)
        return batch

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()
        self._ahead.close()

    def _prepare(self, _: int) -> tuple[StepBatch, dict[str, int]]:
        """The next batch, and where the stream stands behind it."""
        samples = self.stream.take(self.config.batch_conversations)
        max_tokens = self.config.micro_batch_tokens
        packed = pack_own_share(
            samples,
            self.world,
            max_tokens=max_tokens,
            vocabulary=self.vocabulary,
            max_image_tokens=image_tokens(self.config.micro_batch_patches, self.config.model.name),
        )
        mine = [ReadyMicroBatch.of(it, self.world.device, self.pixels) for it in packed]
        metrics = {
            "batch/samples/sum": float(len(samples)),
            "batch/tokens/sum": float(sum(map(len, samples))),
            "batch/trainable_tokens/sum": float(
                sum(int(s.arrays.loss_mask.sum()) for s in samples)
            ),
            "batch/epoch": self.stream.epoch,
            "sample/skipped/total": float(self.stream.num_skipped),
            "sample/skipped/share": self.stream.skipped_share,
            "sample/cut/total": float(self.stream.num_cut),
        }
        return StepBatch([mine], metrics), self.stream.counters()


@dataclass
class Validation:
    """The loss on conversations that are never learned, per token and without gradients."""

    interval_steps: int
    patience: int | None
    max_steps: int
    learner: Learner
    micro_batches: Sequence[MicroBatch]
    """This rank's share."""
    pixels: Pixels | None
    """Makes their images, each time again: together they would fill main memory."""
    losses: list[float] = field(default_factory=list)
    """All so far, nats per learned token."""

    @property
    def end(self) -> str:
        """Why the run ends now; empty while the last `patience` losses include the lowest."""
        patience, losses = self.patience, self.losses
        if patience is None or len(losses) <= patience or min(losses) not in losses[:-patience]:
            return ""
        lowest = f"the validation loss was {min(losses):.3f}"
        return f"{lowest} and did not fall in {patience} validations\n"

    def begin_at(self, first_step: int, run_dir: RunDirectory) -> dict[int, dict[str, float]]:
        """Take up the losses of the steps before; where there are none, step 0 → the loss of the
        model that the run begins with."""
        run_dir.good_ends[StalledError.outcome].unlink(missing_ok=True)
        if first_step == 0:
            return {0: self.before()}
        for record in read_records(run_dir.metrics):
            if record.step < first_step:
                known = (key for key in _LOSSES if key in record.metrics)
                self.losses += [record.metrics[key] for key in known]
        return {}

    def note_end(self, run_dir: RunDirectory) -> None:
        """Write why the run ended before its last step."""
        if self.learner.world.is_first:
            write_atomically(run_dir.good_ends[StalledError.outcome], self.end.encode())

    def run_when_due(self, version: int) -> dict[str, float]:
        is_due = version % self.interval_steps == 0 or version == self.max_steps
        return self.run() if is_due else {}

    @busy("the first validation", FIRST_STEP_SECONDS)
    def before(self) -> dict[str, float]:
        """The loss of the model that the run begins with."""
        return {"validation/loss/before": self.run()["validation/loss/mean"]}

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Nats per learned token over all ranks, summed in float64; all ranks call it together."""
        world = self.learner.world
        nothing = torch.zeros((), dtype=torch.float64, device=world.device)
        sums = {"loss": nothing, "tokens": nothing}
        for number, micro_batch in enumerate(self.micro_batches, 1):
            beat(f"validating micro batch {number}")
            ready = ReadyMicroBatch.of(micro_batch, world.device, self.pixels)
            tensors = TrainTensors.build(ready, world.device)
            with named_failures("validate a micro batch"):
                scores = self.learner.policy(tensors)
            members = tensors.members("ce")
            losses = torch.where(members, -scores.logprobs, 0.0)
            # Out of place: both begin as one tensor. Nothing is read before the end.
            sums["loss"] = sums["loss"] + losses.sum(dtype=torch.float64)
            sums["tokens"] = sums["tokens"] + members.sum(dtype=torch.float64)
        totals = world.sums(sums)
        self.losses.append(totals["loss"] / max(1.0, totals["tokens"]))
        return {
            "validation/loss/mean": self.losses[-1],
            "validation/tokens/sum": totals["tokens"],
        }


def image_processor(config: SftConfig, images: DataImages) -> Any:
    """What makes pixels of the images of the data; None where it has none. ConfigError for a model
    that reads text alone, and for a tower that would learn from nothing."""
    name = config.model.name
    if not images.first:
        if config.train_vision:
            raise ConfigError(
                f"train_vision: no conversation of {config.data.path!r} shows an image to learn "
                "from; remove the key, or look at the data"
            )
        return None
    if model_folder(name) is None:
        raise ConfigError(
            f"{images.first} shows an image, and model {name!r} is not on this machine: whether it "
            f"reads images is not known; hf download {name}"
        )
    if not reads_images(name):
        raise ConfigError(
            f"{images.first} shows an image, and model {name!r} reads text alone; train a model "
            "that reads images (docs/models.md), or take the image out of the row"
        )
    return load_processor(config.model)


def build_encoder(
    config: SftConfig, tokenizer: Any, images: DataImages, processor: Any
) -> ConversationEncoder:
    """What makes samples of the conversations, whose `images` the processor reads if there is
    one."""
    stops = read_stop_token_ids(config.model.name, config.model.tokenizer)
    if warning := reply_end(tokenizer, stops).warning:
        logger.warning("%s", warning)
    rows = text_part(model_config(config.model.name)).get("vocab_size")
    if processor is None:
        return ConversationEncoder(tokenizer, stops, num_rows=rows)
    placeholders = Placeholders.of(config.model, images, processor)
    limit = image_tokens(config.micro_batch_patches, config.model.name)
    return ConversationEncoder(tokenizer, stops, placeholders, limit, rows)


def load_held_out(sft: SftConfig, images: DataImages) -> list[Conversation | PlainText]:
    """The conversations of `validation`."""
    validation = sft.validation
    if validation is None:
        return []
    keys = {"path", "split", "subset"}
    data = sft.data.model_copy(update=validation.model_dump(include=keys))
    return load_conversations(data, images)[: validation.max_conversations]


def _build_validation(
    sft: SftConfig,
    learner: Learner,
    stream: ConversationStream,
    held_out: Sequence[Conversation | PlainText],
    pixels: Pixels | None,
) -> Validation | None:
    if sft.validation is None:
        return None
    samples = [sample for it in held_out for sample in stream.encoded(it).samples]
    if not samples:
        raise ConfigError(
            f"validation.path {sft.validation.path!r}: none of {len(held_out)} conversations has "
            f"tokens to learn within {most_tokens(sft)} tokens"
        )
    mine = pack_own_share(
        samples,
        learner.world,
        max_tokens=sft.micro_batch_tokens,
        vocabulary=learner.vocabulary,
        max_image_tokens=image_tokens(sft.micro_batch_patches, sft.model.name),
    )
    every, patience = sft.validation.interval_steps, sft.validation.patience
    return Validation(every, patience, sft.max_steps, learner, mine, pixels)


def most_tokens(sft: SftConfig) -> int:
    """Of a row that is learned."""
    return min(sft.model.max_length_tokens, sft.micro_batch_tokens)


def _build_saver(
    config: SftProcessConfig,
    state: TrainingState,
    run_dir: RunDirectory,
    batches: ConversationBatches,
) -> CheckpointSaver:
    """Rank 0 commits by itself: a supervised run has no other part."""
    settings = config.checkpoint
    check_space(state, run_dir, settings, is_fresh=config.resume_step is None)
    checkpoints = CheckpointStore(run_dir, config.term)
    if state.world.is_first:
        checkpoints.discard_stale()

    def seal(step: int) -> None:
        checkpoints.commit(step, [PART])
        checkpoints.prune(settings.keep_last, settings.keep_interval_steps)

    return CheckpointSaver(
        state=state,
        checkpoints=checkpoints,
        config=settings,
        max_steps=config.max_steps,
        announce=lambda step: logger.info("checkpoint %d is saved", step),
        seal=seal,
        counters=lambda: batches.counters,
    )


def _first_step(
    config: SftProcessConfig, saver: CheckpointSaver, stream: ConversationStream
) -> int:
    """0, or the step of the checkpoint that was loaded."""
    if config.resume_step is None:
        return 0
    progress = resume(saver.state, saver.checkpoints, config.resume_step)
    if not stream.resume_at(progress.counters):
        raise ConfigError(
            f"data.path {config.data.path!r}, or what data.mix adds to it, has changed since "
            f"checkpoint {progress.step}: rows that were drawn differ, or some are gone. Restore "
            "them (others may be repaired in their place, or added at the end) or start a new run"
        )
    return progress.step
