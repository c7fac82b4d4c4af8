"""torchrun whose store listens on loopback alone, for the ranks of a trainer on one machine.

    python -m gradus.trainer.entry.ranks --rdzv-backend=loopback --nproc-per-node=2 -m MODULE ...

Torch binds the store in which ranks meet to every interface, and it has no password.
"""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

BACKEND = "loopback"
_HOST = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One machine meets nobody; it holds the store that its ranks share."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        listening = socket.create_server((_HOST, 0))
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            _HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

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
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    run.main()
