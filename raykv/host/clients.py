"""Who may read and write a host tier's blocks, until when, and what each has under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from raykv.core import Blocks
from raykv.errors import RankUnavailableError, RequestError
from raykv.host.blocks import Transfer


@dataclass(slots=True, eq=False)
class Client:
    """A process that has the slab mapped.

    Attributes:
        client_id: its name.
        pid: its process.
        expires_s: when its lease ends unless it is renewed.
        stores: under way, by ticket.
        loads: under way, by ticket.
    """

    client_id: str
    pid: int
    expires_s: float
    stores: dict[int, Transfer] = field(default_factory=dict)
    loads: dict[int, Transfer] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Remains:
    """What a client left under way: it may still write it.

    Attributes:
        pid: its process.
        stores: holds the blocks of each store, by ticket; without their ancestors.
    """

    pid: int
    stores: dict[int, Blocks] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks of all the stores."""
        return sum(map(len, self.stores.values()))


class HostClients:
    """The clients with a lease, and the remains of those without.

    Args:
        lease_s: seconds that a client may be silent.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.remains: dict[str, Remains] = {}
        self._open: dict[str, Client] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._open.values())

    def find(self, client_id: str) -> Client | None:
        """The client, if it has a lease."""
        return self._open.get(client_id)

    def need(self, client_id: str) -> Client:
        """The client.

        Raises:
            RankUnavailableError: it has no lease.
        """
        client = self._open.get(client_id)
        if client is None:
            raise RankUnavailableError(
                f"the host tier does not know client {client_id}: it never joined, it left, or it"
                f" was silent for {self.lease_s:g} s; join again"
            )
        return client

    def join(self, client_id: str, pid: int, now_s: float) -> None:
        """Begin a lease, or renew it.

        Raises:
            RequestError: another process has this name, or left something under way under it.
        """
        client, remains = self._open.get(client_id), self.remains.get(client_id)
        for known in (client, remains):
            if known is not None and known.pid != pid:
                raise RequestError(
                    f"process {pid} cannot join the host tier as client {client_id}: process"
                    f" {known.pid} has this name and may still write; take another name, or report"
                    " that it is dead first"
                )
        if client is None:
            client = self._open[client_id] = Client(client_id, pid, 0.0)
        client.expires_s = now_s + self.lease_s

    def renew(self, client_id: str, now_s: float) -> bool:
        """Note a sign of life; whether there is a lease to renew."""
        client = self._open.get(client_id)
        if client is None:
            return False
        client.expires_s = now_s + self.lease_s
        return True

    def of_process(self, pid: int) -> list[str]:
        """Names of the clients of a process, and of those that left something under way."""
        known = {client_id: one.pid for client_id, one in self._open.items()}
        known |= {client_id: one.pid for client_id, one in self.remains.items()}
        return [client_id for client_id, its_pid in known.items() if its_pid == pid]

    def end(self, client: Client) -> None:
        """Know the client no more."""
        del self._open[client.client_id]

    def silent(self, now_s: float) -> list[Client]:
        """Clients whose lease is over."""
        return [client for client in self if client.expires_s < now_s]

    def leave_behind(self, client: Client, ticket_id: int, blocks: Blocks) -> None:
        """Keep the blocks of a store whose end nobody reported."""
        remains = self.remains.setdefault(client.client_id, Remains(client.pid))
        remains.stores[ticket_id] = blocks

    def clear_ticket(self, client_id: str, ticket_id: int) -> None:
        """One store that a client had left under way is over after all."""
        remains = self.remains.get(client_id)
        if remains is not None and ticket_id in remains.stores:
            remains.stores.pop(ticket_id).release()
            if not remains.stores:
                del self.remains[client_id]

    def clear(self, client_id: str) -> int:
        """A client writes nothing any more; returns how many blocks it had left under way."""
        remains = self.remains.pop(client_id, None)
        if remains is None:
            return 0
        num_blocks = remains.num_blocks
        for blocks in remains.stores.values():
            blocks.release()
        return num_blocks
