"""Who may form a group, and what ends a wait at the rendezvous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gradus.errors import ConfigError, DeadlineError, ProcessError
from gradus.weights.rendezvous import GroupError, Member, Rendezvous, finish, group_obstacle

pytestmark = pytest.mark.torch

SENDER = Member(1, 1, "a", "nccl", "cuda", "GPU-0", has_nccl=True)
WORKER = msgspec.structs.replace(SENDER, gpu="GPU-1")


def test_gpus_of_one_machine_form_a_group_over_nccl() -> None:
    assert group_obstacle(SENDER, [WORKER]) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "b"}, "inference worker 1 runs on b and the trainer on a"),
        ({"device": "cpu"}, "inference worker 1 computes on cpu, and nccl needs a GPU"),
        ({"has_nccl": False}, "the torch of inference worker 1 was built without nccl"),
        ({"gpu": "GPU-0"}, "the trainer and inference worker 1 share a GPU, which nccl refuses"),
        ({"gpu": "GPU-1"}, "inference worker 0 and inference worker 1 share a GPU"),
    ],
)
def test_what_keeps_processes_from_a_group_is_named(change: dict[str, Any], reason: str) -> None:
    other = msgspec.structs.replace(WORKER, **({"gpu": "GPU-2"} | change))
    assert (group_obstacle(SENDER, [WORKER, other]) or "").startswith(reason)


def test_gloo_needs_no_gpu() -> None:
    members = [msgspec.structs.replace(it, backend="gloo", device="cpu") for it in (SENDER, WORKER)]
    assert group_obstacle(members[0], members[1:]) is None


def test_ends_that_were_told_different_backends_are_refused() -> None:
    other = msgspec.structs.replace(WORKER, backend="gloo")
    with pytest.raises(ConfigError, match="over nccl and inference worker 0 over gloo"):
        group_obstacle(SENDER, [other])


@pytest.fixture
def ends(tmp_path: Path) -> list[Rendezvous]:
    return [Rendezvous(tmp_path / "rendezvous", 1, timeout_seconds=5.0) for _ in range(2)]


def wait(rendezvous: Rendezvous, **options: Any) -> None:
    rendezvous.wait_until(lambda: False, "the wonder", **options)


def test_a_group_that_one_end_gives_up_is_no_reason_to_stop_waiting_for_files(
    ends: list[Rendezvous],
) -> None:
    ends[0].give_up_group("no route")
    ends[0].give_up_group("a later reason")
    with pytest.raises(GroupError, match="no route"):
        wait(ends[1])
    with pytest.raises(DeadlineError, match=r"the wonder did not happen in 0\.1 s"):
        wait(ends[1], needs_group=False, seconds=0.1)


def test_the_end_of_the_sender_ends_every_wait(ends: list[Rendezvous]) -> None:
    ends[0].end("the disk is full")
    with pytest.raises(ProcessError, match="the disk is full"):
        wait(ends[1], needs_group=False)


def test_a_transfer_that_fails_breaks_the_group(ends: list[Rendezvous]) -> None:
    class Failed:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> bool:
            raise RuntimeError("Connection closed by peer\nand more")

    with pytest.raises(GroupError, match=r"a transfer failed: Connection closed by peer$"):
        finish(ends[0], Failed())


def test_this_process_tells_what_it_is() -> None:
    own = Member.current(torch.device("cpu"), "gloo")
    assert (own.device, own.gpu, own.backend) == ("cpu", "", "gloo")
