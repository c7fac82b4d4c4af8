"""torchrun whose store listens on one address alone: loopback, or the first node's.

    python -m gradus.trainer.entry.ranks --rdzv-backend=bound --rdzv-endpoint=127.0.0.1 \
        --nproc-per-node=2 -m MODULE ...

Torch binds the store in which ranks meet to every interface, and it has no password.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

BACKEND = "bound"
WAIT_SECONDS = 600
"""For the node that holds the store, as in torch's own static meeting."""


class BoundRendezvous(RendezvousHandler):
    """Nodes whose number and order are known; the first holds the store that all ranks share.

    `--rdzv-conf` gives the node's `rank` and the `port` of the store: on one machine 0 and one that
    the system chooses.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._rank = int(parameters.get("rank", "0"))
        self._num_nodes = parameters.max_nodes
        self._host = parameters.endpoint
        self._port = int(parameters.get("port", "0"))
        held = None
        if self._rank == 0:
            family = socket.getaddrinfo(self._host, None)[0][0]
            listening = socket.create_server((self._host, self._port), family=family)
            self._port = listening.getsockname()[1]
            held = listening.detach()
        self._store = TCPStore(
            self._host,
            self._port,
            is_master=self._rank == 0,
            timeout=timedelta(seconds=WAIT_SECONDS),
            wait_for_workers=False,
            master_listen_fd=held,
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        meeting = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._rank, self._num_nodes, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"  # The ranks start by `python -m`, without our -P.
    rendezvous_handler_registry.register(BACKEND, BoundRendezvous)
    run.main()
