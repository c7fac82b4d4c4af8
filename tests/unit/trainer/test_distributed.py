"""A world of one, and the names of its failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradus.errors import ConfigError, DeadlineError, ProcessError
from gradus.heartbeat import Heartbeat
from gradus.trainer.distributed import CPU, World, join_world, named_failures

pytestmark = pytest.mark.torch


def test_a_world_of_one_needs_no_torchrun(world: World) -> None:
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert world.sums({"b": 2.5, "a": 1.0}) == {"a": 1.0, "b": 2.5}
    assert world.maxima({"b": 2.5, "a": 1.0}) == {"a": 1.0, "b": 2.5}
    assert world.maxima({}) == {}
    assert world.all_agree(True)
    assert not world.all_agree(False)


def test_the_process_group_ends_with_the_world() -> None:
    with join_world(CPU):
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_the_process_group_ends_after_an_error() -> None:
    with pytest.raises(ConfigError), join_world(CPU):
        raise ConfigError("stop")
    assert not dist.is_initialized()


def test_determinism_lasts_as_long_as_the_world() -> None:
    torch.set_num_threads(2)
    with join_world(CPU, deterministic=True):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)


def test_an_error_of_the_first_rank_is_raised_there(world: World) -> None:
    def fail() -> None:
        raise ConfigError("disk full")

    with pytest.raises(ConfigError, match="disk full"):
        world.first_rank_does(fail)


def test_the_first_rank_does_its_action_once(world: World) -> None:
    done: list[int] = []
    world.first_rank_does(lambda: done.append(1))
    assert done == [1]


@pytest.mark.shows("F78")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 1800000ms for recv operation to complete", DeadlineError),
        ("Connection closed by peer [127.0.0.1]:1234", ProcessError),
        ("Connection reset by peer", ProcessError),
    ],
)
def test_errors_of_collectives_get_a_name(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="cannot sum"), named_failures("sum"):
        raise RuntimeError(text)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shape"), named_failures("sum"):
        raise RuntimeError("shape mismatch")


SLOW_FIRST_RANK = """
import threading
from gradus.errors import ProcessError
from gradus.trainer.distributed import CPU, join_world

def fail():
    raise ValueError("rank 0 cannot")

with join_world(CPU, timeout_seconds=2.0) as world:
    for _ in range(2):
        world.first_rank_does(lambda: threading.Event().wait(2.5))
    world.first_rank_does(lambda: None)
    try:
        world.first_rank_does(fail)
    except (ValueError, ProcessError) as error:
        print(f"rank {world.rank}: {error}", flush=True)
"""


def test_what_the_first_rank_does_may_take_longer_than_a_collective(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(SLOW_FIRST_RANK)
    written = run_ranks(program)
    assert "rank 0: rank 0 cannot" in written
    assert "rank 1: rank 0 failed; its own message says why" in written


OTHER_NAMES = """
import torch
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.step import GradientStep

own = [{"mean": 1.0, "a/max": 2.0}, {"mean": 2.0, "b/sum": 3.0, "b/max": -4.0}, {"mean": 3.0}]
with join_world(CPU) as world:
    step = object.__new__(GradientStep)
    step._world = world
    for _ in range(2):
        shares = {name: torch.tensor(it).double() for name, it in own[world.rank].items()}
        print(sorted(step._over_ranks(shares).items()), flush=True)
"""


def test_a_metric_that_one_rank_alone_gives_is_merged_with_nothing(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(OTHER_NAMES)
    merged = [("a/max", 2.0), ("b/max", -4.0), ("b/sum", 3.0), ("mean", 6.0)]
    assert run_ranks(program, num_ranks=3).splitlines().count(str(merged)) == 6


def test_a_rank_that_waits_for_others_announces_that_it_may_take_long(
    world: World, tmp_path: Path
) -> None:
    with Heartbeat(tmp_path / "trainer.json").beating():
        world.all_agree(True)
    assert "waits for other ranks to agree" in (tmp_path / "trainer.json").read_text()
