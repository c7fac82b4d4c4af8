"""Where ranks meet: on one address, and nowhere else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from listening import listeners

from gradus_cluster.ports import reserve_port

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_store_of_two_nodes_listens_on_the_first_ones_address_alone(host: str) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from gradus.trainer.entry.ranks import BACKEND, BoundRendezvous

    with reserve_port(host) as held:
        port = held.getsockname()[1]

        def meet(rank: int) -> BoundRendezvous:
            said = {"rank": str(rank), "port": str(port)}
            return BoundRendezvous(RendezvousParameters(BACKEND, host, "run", 2, 2, None, **said))

        with ThreadPoolExecutor(2) as pool:
            second, first = pool.map(meet, (1, 0))
    found = [it for it in listeners([os.getpid()]) if it.is_tcp and it.port == port]
    assert [it.address for it in found] == [host]
    met = [it.next_rendezvous() for it in (first, second)]
    assert [(it.rank, it.world_size) for it in met] == [(0, 2), (1, 2)]
    assert [vars(it.bootstrap_store_info) for it in met] == [told(host, port)] * 2
    met[0].store.set("said", "by the first")
    assert met[1].store.get("said") == b"by the first"


def test_one_machine_meets_on_a_port_that_the_system_chooses() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from gradus.trainer.entry.ranks import BACKEND, BoundRendezvous

    parameters = RendezvousParameters(BACKEND, "127.0.0.1", "run", 1, 1, None)
    before = ports()
    meeting = BoundRendezvous(parameters)
    met = meeting.next_rendezvous()
    (port,) = ports() - before
    assert (met.rank, met.world_size) == (0, 1)
    assert vars(met.bootstrap_store_info) == told("127.0.0.1", port)


def ports() -> set[int]:
    """On which this process listens, for other tests too."""
    return {it.port for it in listeners([os.getpid()]) if it.is_tcp}


def told(host: str, port: int) -> dict[str, object]:
    """What a meeting tells the ranks."""
    return {"master_addr": host, "master_port": port}
