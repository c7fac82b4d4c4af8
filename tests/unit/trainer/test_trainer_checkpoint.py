"""Saves of the trainer: complete or gone, exact on resume, for one rank and for two."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from builders import build_sample
from checkpoints import FaultyFiles, new_run
from configs import build_loss_config, build_run_process
from safetensors.torch import load_file, save_file

from gradus.config import (
    AdamWConfig,
    CheckpointConfig,
    LoraConfig,
    ModelConfig,
    RunProcessConfig,
    ServedLoraConfig,
    TrainerConfig,
)
from gradus.config.schema.learning import MuonConfig, OptimizerConfig, SgdConfig
from gradus.errors import (
    ConfigError,
    CorruptStateError,
    ExitCode,
    FullDiskError,
    ProtocolError,
    StorageError,
)
from gradus.files import DurableFiles, storage_error
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.checkpoint import saving
from gradus.trainer.checkpoint.saving import CheckpointSaver, check_space, resume
from gradus.trainer.checkpoint.training_state import (
    Origin,
    TrainingState,
    load_weights,
    read_progress,
)
from gradus.trainer.distributed import World
from gradus.trainer.entry.rl import run
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import add_adapters, base_digest
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.transport import SpoolSender
from gradus.wire.events import (
    CheckpointStaged,
    Event,
    PolicyPublished,
    StepFinished,
    TrainerDone,
)

pytestmark = pytest.mark.torch

BuildPolicy = Callable[[torch.dtype], PolicyModel]
RunTrainer = Callable[[RunProcessConfig], None]
ADAMW = AdamWConfig(lr=1e-3)
ORIGIN = Origin(model={"name": "tiny"}, compute_dtype="float32")


class SlowFiles(DurableFiles):
    """A disk that writes nothing before `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        assert self.go.wait(60)
        super().write_by(path, writer, num_bytes=num_bytes)


UNWRITABLE = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]


class FullFiles(DurableFiles):
    """A disk that takes none of the first `num_failures` shards."""

    def __init__(self, num_failures: int, number: int = errno.ENOSPC) -> None:
        self.left, self.error = num_failures, OSError(number, os.strerror(number))

    def write_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        if self.left:
            self.left -= 1
            path.write_bytes(b"half of")
            raise storage_error(self.error, path)
        super().write_by(path, writer, num_bytes=num_bytes)


def build_state(
    build_policy: BuildPolicy, world: World, optimizer: OptimizerConfig = ADAMW
) -> TrainingState:
    policy = build_policy(torch.float32)
    rule = PolicyOptimizer(policy, optimizer, max_steps=10, max_skipped_steps=5, world=world)
    return TrainingState(policy, rule, world, ORIGIN)


def train(state: TrainingState, steps: range) -> None:
    """Updates with gradients that depend on the step and on torch's random numbers."""
    for step in steps:
        for parameter in state.policy.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * (step + 1))
            parameter.grad.to_local().add_(torch.randn(parameter.to_local().shape) * 0.01)
        state.optimizer.step(step)


def contents(state: TrainingState) -> dict[str, torch.Tensor]:
    """Everything that a snapshot would hold."""
    return {name: piece.values for name, piece in state.snapshot(0, {}).pieces.items()}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def end_step(saver: CheckpointSaver, version: int) -> None:
    saver.after_step(version, is_due=saver.is_due(version))


@pytest.fixture
def build_saver(
    build_policy: BuildPolicy,
    world: World,
    run_dir: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., CheckpointSaver]]:
    savers = ExitStack()
    monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_SECONDS", 0.0)

    def build(files: DurableFiles | None = None, **config: object) -> CheckpointSaver:
        checkpoints = CheckpointStore(run_dir, 1)

        def seal(step: int) -> None:
            checkpoints.commit(step, ["trainer"])

        announced: list[int] = []
        saver = CheckpointSaver(
            state=build_state(build_policy, world),
            checkpoints=checkpoints,
            config=CheckpointConfig.model_validate({"interval_steps": 2, **config}),
            max_steps=5,
            announce=announced.append,
            seal=seal,
            files=files or DurableFiles(),
        )
        return savers.enter_context(saver)

    with savers:
        yield build


def committed_steps(run_dir: RunDirectory) -> list[int]:
    found = run_dir.checkpoints.glob("step_*") if run_dir.checkpoints.exists() else []
    return sorted(int(path.name.removeprefix("step_")) for path in found)


@pytest.mark.parametrize(
    "optimizer", [ADAMW, MuonConfig(lr=1e-3), SgdConfig(lr=1e-3, momentum=0.9), SgdConfig(lr=1e-3)]
)
def test_training_goes_on_bit_by_bit_with_every_optimizer(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory, optimizer: OptimizerConfig
) -> None:
    torch.manual_seed(3)
    state = build_state(build_policy, world, optimizer)
    train(state, range(3))
    checkpoints = CheckpointStore(run_dir, 1)
    snapshot = state.snapshot(3, {"conversations": 12})
    snapshot.write(checkpoints.staging(3), 0, DurableFiles())
    checkpoints.commit(3, ["trainer"])
    train(state, range(3, 5))
    restarted = build_state(build_policy, world, optimizer)
    torch.manual_seed(99)
    progress = resume(restarted, CheckpointStore(run_dir, 2), 3)
    assert (progress.step, progress.num_ranks, progress.counters) == (3, 1, {"conversations": 12})
    train(restarted, range(3, 5))
    expected, found = contents(state), contents(restarted)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_was_saved_without_a_gpu_goes_on_with_one(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, checkpoints = build_state(build_policy, world), CheckpointStore(run_dir, 1)
    state.snapshot(3, {}).write(checkpoints.staging(3), 0, DurableFiles())
    part = checkpoints.commit(3, ["trainer"]).part("trainer")
    expected = torch.rand(2)
    state.load(part)
    put: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda numbers, _: put.append(numbers))
    on_gpu = replace(state, world=replace(world, device=torch.device("cuda")))
    assert on_gpu.load(part).step == 3
    assert torch.equal(torch.rand(2), expected)
    assert put == []
    on_gpu.snapshot(4, {}).write(checkpoints.staging(4), 0, DurableFiles())
    on_gpu.load(checkpoints.commit(4, ["trainer"]).part("trainer"))
    assert [numbers.tolist() for numbers in put] == [[0] * 16]


def test_saves_come_at_multiples_and_at_the_last_step(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver()
    for version in range(1, 6):
        train(saver.state, range(version - 1, version))
        end_step(saver, version)
    assert committed_steps(run_dir) == [2, 4, 5]


def test_minutes_decide_too_at_the_end_of_the_step_in_which_they_are_over(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver(interval_steps=None, interval_minutes=10.0, asynchronous=False)
    minutes = iter([0.0, 4.0, 11.0, 11.0, 20.0])
    saver.clock = lambda: 60.0 * next(minutes)
    for version in range(1, 5):
        end_step(saver, version)
    assert committed_steps(run_dir) == [3]


@pytest.mark.shows("F69")
def test_a_stop_is_saved_at_once_and_once(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver(interval_steps=None)
    end_step(saver, 1)
    run_dir.save_request.parent.mkdir()
    run_dir.save_request.touch()
    end_step(saver, 2)
    assert committed_steps(run_dir) == [2]
    assert not run_dir.save_request.exists()
    end_step(saver, 3)
    assert committed_steps(run_dir) == [2]


def test_without_an_interval_nothing_is_saved(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver(interval_steps=None, interval_minutes=None)
    for version in range(1, 6):
        end_step(saver, version)
    assert not run_dir.checkpoints.exists()


def test_training_goes_on_while_a_save_is_written(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    files = SlowFiles()
    saver = build_saver(files)
    before = contents(saver.state)
    end_step(saver, 2)
    train(saver.state, range(2, 3))
    end_step(saver, 3)
    assert committed_steps(run_dir) == []
    files.go.set()
    end_step(saver, 4)
    end_step(saver, 5)
    assert committed_steps(run_dir) == [2, 4, 5]
    resume(saver.state, CheckpointStore(run_dir, 2), 2)
    after = contents(saver.state)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_synchronous_save_is_complete_at_once(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    end_step(build_saver(asynchronous=False), 2)
    assert committed_steps(run_dir) == [2]


@pytest.mark.shows("F23")
def test_a_full_disk_is_reported_and_the_next_save_succeeds(
    build_saver: Callable[..., CheckpointSaver],
    run_dir: RunDirectory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saver = build_saver(FullFiles(1), asynchronous=False)
    end_step(saver, 2)
    assert saver.num_failed == 1
    assert "checkpoint 2 is not saved (1 in a row)" in caplog.text
    assert list(run_dir.checkpoints.iterdir()) == []
    end_step(saver, 4)
    assert saver.num_failed == 0
    assert committed_steps(run_dir) == [4]


@pytest.mark.shows("F23")
@pytest.mark.parametrize("version", [4, 5], ids=["ends early", "last step"])
def test_a_last_save_that_failed_is_tried_again(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory, version: int
) -> None:
    saver = build_saver(FullFiles(2))
    end_step(saver, version)
    if version != saver.max_steps:
        saver.save_last(version)
    assert committed_steps(run_dir) == [version]
    saver.save_last(version)
    assert (saver.num_failed, saver.files.left) == (0, 0)


@pytest.mark.shows("F23")
def test_a_last_save_that_fails_for_good_does_not_end_the_run_as_saved(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver(FullFiles(99))
    now = iter(range(0, 9999, 60))
    saver.clock = lambda: next(now)
    with pytest.raises(FullDiskError, match="step 3, was not saved in 600 s") as failure:
        saver.save_last(3)
    assert failure.value.exit_code is ExitCode.TRY_AGAIN
    assert committed_steps(run_dir) == []


@pytest.mark.shows("F23")
@pytest.mark.parametrize("number", UNWRITABLE)
def test_a_disk_that_takes_no_checkpoint_costs_no_step(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory, number: int
) -> None:
    saver = build_saver(FullFiles(5, number), asynchronous=False)
    for version in (2, 4, 6, 8):
        end_step(saver, version)
    assert committed_steps(run_dir) == []
    assert run_dir.notices.read_text().count("is not saved") == 1
    saver.files.left = 0
    end_step(saver, 10)
    assert committed_steps(run_dir) == [10]


def test_a_seal_that_finds_the_disk_full_leaves_the_checkpoints_before(
    build_saver: Callable[..., CheckpointSaver], run_dir: RunDirectory
) -> None:
    saver = build_saver(asynchronous=False, interval_steps=1)
    end_step(saver, 2)
    rename = FaultyFiles()
    saver.checkpoints._files = rename
    end_step(saver, 3)
    assert committed_steps(run_dir) == [2, 3]
    saver.checkpoints._files = FaultyFiles(rename.operations.index("rename"), full=True)
    end_step(saver, 4)
    assert saver.num_failed == 1
    assert committed_steps(run_dir) == [2, 3]


def test_an_error_that_is_not_the_disks_ends_the_run(
    build_saver: Callable[..., CheckpointSaver],
) -> None:
    saver = build_saver(asynchronous=False)
    (saver.checkpoints.staging(2) / "stray").mkdir()
    with pytest.raises(ProtocolError, match="stray"):
        end_step(saver, 2)


def test_a_state_of_another_step_than_its_checkpoint_is_refused(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory
) -> None:
    state = build_state(build_policy, world)
    checkpoints = CheckpointStore(run_dir, 1)
    state.snapshot(3, {}).write(checkpoints.staging(4), 0, DurableFiles())
    checkpoints.commit(4, ["trainer"])
    with pytest.raises(CorruptStateError, match="trainer's state of 3"):
        resume(state, checkpoints, 4)


@pytest.mark.shows("F06")
def test_a_checkpoint_that_newer_ones_replaced_is_no_mistake_in_a_config(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory
) -> None:
    """The orchestrator commits what a dead trainer staged while another one starts."""
    state, checkpoints = build_state(build_policy, world), CheckpointStore(run_dir, 1)
    for step in (4, 6):
        state.snapshot(step, {}).write(checkpoints.staging(step), 0, DurableFiles())
        checkpoints.commit(step, ["trainer"])
    with pytest.raises(StorageError, match=r"no checkpoint of step 2.*continue from checkpoint 6"):
        resume(state, checkpoints, 2)
    with pytest.raises(ConfigError, match="no checkpoint of step 8"):
        resume(state, checkpoints, 8)


def test_a_checkpoint_of_another_optimizer_is_refused(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory
) -> None:
    checkpoints = CheckpointStore(run_dir, 1)
    state = build_state(build_policy, world, SgdConfig(lr=1e-3))
    state.snapshot(3, {}).write(checkpoints.staging(3), 0, DurableFiles())
    checkpoints.commit(3, ["trainer"])
    other = build_state(build_policy, world)
    with pytest.raises(ConfigError, match="holds no"):
        resume(other, checkpoints, 3)


@pytest.mark.parametrize("now", [SgdConfig(lr=1e-3), SgdConfig(lr=1e-3, momentum=0.9)])
def test_moments_that_the_optimizer_does_not_use_are_not_dropped_in_silence(
    build_policy: BuildPolicy, world: World, run_dir: RunDirectory, now: OptimizerConfig
) -> None:
    checkpoints = CheckpointStore(run_dir, 1)
    build_state(build_policy, world).snapshot(3, {}).write(
        checkpoints.staging(3), 0, DurableFiles()
    )
    checkpoints.commit(3, ["trainer"])
    with pytest.raises(ConfigError, match=r"also holds .*exp_avg"):
        resume(build_state(build_policy, world, now), checkpoints, 3)


def build_adapters(tiny_model: Path, world: World, **options: Any) -> TrainingState:
    lora = LoraConfig(rank=4, **options)
    model = load_model(ModelConfig(name=str(tiny_model)), world.device)
    origin = Origin(
        model=ModelConfig(name=str(tiny_model)).model_dump(mode="json"),
        compute_dtype="float32",
        lora=lora.model_dump(mode="json"),
        base_sha256=base_digest(model),
    )
    add_adapters(model, lora, torch.float32)
    policy = shard_model(PolicyModel(model), world.mesh, torch.float32)
    rule = PolicyOptimizer(policy, ADAMW, max_steps=10, max_skipped_steps=5, world=world)
    return TrainingState(policy, rule, world, origin)


@pytest.fixture
def saved_adapters(tmp_path: Path, tiny_model: Path, world: World, run_dir: RunDirectory) -> Path:
    """A copy of the tiny model, beside which adapters with alpha 8 were trained and saved."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    checkpoints = CheckpointStore(run_dir, 1)
    snapshot = build_adapters(model, world, alpha=8).snapshot(3, {})
    snapshot.write(checkpoints.staging(3), 0, DurableFiles())
    checkpoints.commit(3, ["trainer"])
    return model


def test_adapters_that_the_config_no_longer_names_are_not_dropped_in_silence(
    saved_adapters: Path, world: World, run_dir: RunDirectory
) -> None:
    state = build_adapters(saved_adapters, world, alpha=8, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match=r"also holds .*lora_A.* in its weights"):
        resume(state, CheckpointStore(run_dir, 2), 3)
    part = CheckpointStore(run_dir, 2).load(3).part("trainer")
    with pytest.raises(ConfigError, match=r"also holds .*lora_A"):
        load_weights(state.policy, part)


def test_another_alpha_would_scale_what_was_learned(
    saved_adapters: Path, world: World, run_dir: RunDirectory
) -> None:
    state = build_adapters(saved_adapters, world, alpha=80)
    with pytest.raises(ConfigError, match=r"lora\.alpha was 8 .* is 80; resume with 8"):
        resume(state, CheckpointStore(run_dir, 2), 3)


def test_adapters_go_on_only_beside_the_model_that_they_were_trained_beside(
    saved_adapters: Path, world: World, run_dir: RunDirectory
) -> None:
    resume(build_adapters(saved_adapters, world, alpha=8), CheckpointStore(run_dir, 2), 3)
    weights = load_file(saved_adapters / "model.safetensors")
    rewritten = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(rewritten, saved_adapters / "model.safetensors", metadata={"format": "pt"})
    state = build_adapters(saved_adapters, world, alpha=8)
    with pytest.raises(ConfigError, match="base of its adapters"):
        resume(state, CheckpointStore(run_dir, 2), 3)


@pytest.mark.shows("F25")
def test_a_disk_without_room_for_one_checkpoint_is_refused_at_the_start(
    build_policy: BuildPolicy,
    world: World,
    run_dir: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, config = build_state(build_policy, world), CheckpointConfig(interval_steps=1)
    monkeypatch.setattr(
        "gradus.trainer.checkpoint.saving.free_bytes", lambda _: state.num_bytes() - 1
    )
    with pytest.raises(FullDiskError, match="one checkpoint needs about"):
        check_space(state, run_dir, config, is_fresh=True)
    check_space(state, run_dir, config, is_fresh=False)
    assert "do not fit into" in caplog.text
    caplog.clear()
    check_space(state, run_dir, CheckpointConfig(interval_minutes=None), is_fresh=True)
    monkeypatch.setattr(
        "gradus.trainer.checkpoint.saving.free_bytes", lambda _: state.num_bytes() * 2
    )
    check_space(state, run_dir, config, is_fresh=True)
    assert "3 checkpoints of about" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b'{"step": "x"}'])
def test_a_progress_file_that_says_nothing_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress.json").write_bytes(content)
    with pytest.raises(CorruptStateError, match="where training stood"):
        read_progress(tmp_path)


# ------------------------------------------------------------------ whole runs
STEPS = 4


def build_config(
    root: Path,
    model: Path,
    *,
    term: int = 0,
    num_processes: int = 1,
    lora: ServedLoraConfig | None = None,
    pull: float = 0.0,
    resume_step: int | None = None,
    **fields: object,
) -> RunProcessConfig:
    changes = {
        "model": ModelConfig(name=str(model)),
        "max_steps": STEPS,
        "trainer": TrainerConfig(
            compute_dtype="float32",
            optimizer=ADAMW,
            deterministic=True,
            num_processes=num_processes,
            lora=lora,
            loss=build_loss_config(reference_kl_coefficient=pull),
        ),
        "checkpoint": CheckpointConfig(interval_steps=2),
        **fields,
    }
    return build_run_process(root, changes, term=term, resume_step=resume_step)


async def send_batches(
    root: Path,
    *,
    num_ranks: int = 1,
    term: int = 0,
    first: int = 0,
    end: int = STEPS,
    num_updates: int = 1,
    keeps_trained: bool = False,
) -> SpoolSender:
    """Lay all batches into the spool before the trainer starts; gives the sender."""
    run_dir = RunDirectory(root)
    sender = SpoolSender(run_dir, term, keeps_trained=keeps_trained)
    for step in range(first, end):
        samples = [build_sample(5 + i, seed=10 * step + i, id=f"{step}-{i}") for i in range(6)]
        layout = Layout(num_ranks, max_tokens=40, num_updates=num_updates)
        await sender.send(build_batch(samples, step=step, term=term, layout=layout))
    return sender


async def events_of(sender: SpoolSender) -> list[Event]:
    events: list[Event] = []
    while not events or not isinstance(events[-1], TrainerDone):
        events.append(await sender.receive_event())
    return events


def commit_staged(root: Path, term: int, step: int) -> None:
    """What the orchestrator does with a staged part, less its own."""
    CheckpointStore(RunDirectory(root), term).commit(step, ["trainer"])


@pytest.mark.shows("I5")
@pytest.mark.parametrize(
    ("lora", "num_updates", "pull"),
    [
        (None, 1, 0.0),
        (ServedLoraConfig(rank=4), 1, 0.0),
        (None, 3, 0.0),
        (None, 3, 5.0),
        (ServedLoraConfig(rank=4), 1, 5.0),
    ],
    ids=["full", "lora", "three updates a batch", "reference", "reference and lora"],
)
async def test_a_resumed_run_publishes_its_version_first_and_ends_bit_by_bit_the_same(
    tmp_path: Path, tiny_model: Path, lora: ServedLoraConfig | None, num_updates: int, pull: float
) -> None:
    """The reference stays version 0, which no checkpoint holds."""
    sender = await send_batches(tmp_path, num_updates=num_updates)
    run(build_config(tmp_path, tiny_model, lora=lora, pull=pull))
    staged = [e.step for e in await events_of(sender) if isinstance(e, CheckpointStaged)]
    assert staged == [2, 4]
    commit_staged(tmp_path, 0, 2)
    expected = (tmp_path / "model/model.safetensors").read_bytes()
    (tmp_path / "model/model.safetensors").unlink()
    sender = await send_batches(tmp_path, term=1, first=2, num_updates=num_updates)
    run(build_config(tmp_path, tiny_model, term=1, resume_step=2, lora=lora, pull=pull))
    events = await events_of(sender)
    first = events[0]
    assert isinstance(first, PolicyPublished)
    assert first.version == 2
    published = [event.version for event in events if isinstance(event, PolicyPublished)]
    assert published == [2, 3, 4]
    assert (tmp_path / "model/model.safetensors").read_bytes() == expected


@pytest.mark.shows("F01")
async def test_a_trainer_that_starts_again_in_its_term_tells_only_the_newest_step_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    """To the bit, so that no metric of a step depends on how often it was trained."""
    sender = await send_batches(tmp_path, keeps_trained=True)
    run(build_config(tmp_path, tiny_model))
    first = await events_of(sender)
    commit_staged(tmp_path, 0, 2)
    model = (tmp_path / "model/model.safetensors").read_bytes()
    run(build_config(tmp_path, tiny_model, resume_step=2))
    sender = SpoolSender(RunDirectory(tmp_path), 0, keeps_trained=True)
    assert await sender.receive_event() == first[-1]
    told = await events_of(sender)
    assert [timeless(event) for event in told] == [timeless(event) for event in first[-4:]]
    assert (tmp_path / "model/model.safetensors").read_bytes() == model
    commit_staged(tmp_path, 0, 4)


def timeless(event: Event) -> Event:
    """The event with metrics that do not depend on the clock."""
    if not isinstance(event, StepFinished):
        return event
    kinds = ("loss/", "optimizer/", "batch/")
    metrics = {name: it for name, it in event.metrics.items() if name.startswith(kinds)}
    assert len(metrics) > 3
    return msgspec.structs.replace(event, metrics=metrics)


@pytest.mark.parametrize(("end", "saved"), [(3, [2, 3]), (2, [2])])
async def test_a_trainer_whose_batches_end_saves_its_last_version_once_and_writes_the_model(
    tmp_path: Path, tiny_model: Path, end: int, saved: list[int]
) -> None:
    sender = await send_batches(tmp_path, end=end)
    await sender.end(end)
    run(build_config(tmp_path, tiny_model))
    events = await events_of(sender)
    assert [e.step for e in events if isinstance(e, CheckpointStaged)] == saved
    assert [e.version for e in events if isinstance(e, PolicyPublished)] == [1, 2, 3][:end]
    assert events[-1] == TrainerDone(step=end - 1, term=0)
    last = tmp_path / "weights" / f"version_{end:08d}" / "model.safetensors"
    assert (tmp_path / "model/model.safetensors").read_bytes() == last.read_bytes()


@pytest.mark.shows("F36")
async def test_another_number_of_ranks_goes_on_with_the_same_weights(
    tmp_path: Path, tiny_model: Path, run_two_ranks: RunTrainer
) -> None:
    """One rank saves, two resume and save, one resumes: the weights are those of one rank."""
    sender = await send_batches(tmp_path)
    run(build_config(tmp_path, tiny_model))
    await events_of(sender)
    commit_staged(tmp_path, 0, 2)
    undisturbed = load_file(tmp_path / "model/model.safetensors")
    at_two = load_file(tmp_path / "weights/version_00000003/model.safetensors")
    sender = await send_batches(tmp_path, term=1, first=2, num_ranks=2)
    resumed = build_config(tmp_path, tiny_model, term=1, resume_step=2, num_processes=2)
    run_two_ranks(resumed)
    await events_of(sender)
    commit_staged(tmp_path, 1, 4)
    two_ranks = load_file(tmp_path / "model/model.safetensors")
    part = CheckpointStore(RunDirectory(tmp_path), 1).load(4).part("trainer")
    assert len(list(part.glob("rank_*.safetensors"))) == 2
    run(build_config(tmp_path, tiny_model, term=2, resume_step=4, max_steps=4))
    back = load_file(tmp_path / "model/model.safetensors")
    for name, weight in back.items():
        assert torch.equal(weight, two_ranks[name]), name
        moved = float((undisturbed[name] - at_two[name]).abs().max())
        difference = float((undisturbed[name] - two_ranks[name]).abs().max())
        assert difference <= 1e-2 * max(moved, 1e-6), name


async def test_a_run_goes_on_only_with_the_reference_that_it_began_with(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "initial"))
    root = tmp_path / "run"
    sender = await send_batches(root)
    run(build_config(root, model, pull=0.5))
    await events_of(sender)
    commit_staged(root, 0, 2)
    weights = {name: it + 1 for name, it in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="as the reference of its loss"):
        run(build_config(root, model, term=1, resume_step=2, pull=0.5))
    # Without the pull nothing that changed is used.
    run(build_config(root, model, term=1, resume_step=2, max_steps=2))
