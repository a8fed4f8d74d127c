"""What the clients of a host tier and its books of checkpoints say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.core import Namespace


class StateOffer(NamedTuple):
    """Checkpoints of one prompt's prefixes that a client could store.

    Attributes:
        tokens: int32 [n], from the root on.
        namespace: whose they are.
        boundaries: after how many of the tokens they were taken, whole blocks; the one that is
            wanted most comes first. Their memory stays as it is meanwhile.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTicket:
    """Leave to write a host slot, until it is reported by ``HostStates.stored``.

    Attributes:
        id: names it.
        num_tokens: the boundary whose checkpoint goes there.
        host_slot: where to.
        generation: of this slot.
    """

    id: int
    num_tokens: int
    host_slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Leave to read a host slot, until it is reported by ``HostStates.loaded``.

    The reader compares the generation after its copy, and the checksum.

    Attributes:
        id: names it.
        num_tokens: the boundary whose checkpoint it is.
        host_slot: where from.
        generation: that its content belongs to.
        checksum: as its writer reported it; 0 where it computed none.
    """

    id: int
    num_tokens: int
    host_slot: int
    generation: int
    checksum: int


class StateStored(NamedTuple):
    """How a store ended: nothing of it will be written any more.

    Attributes:
        ticket_id: which.
        is_ok: whether the slot holds the checkpoint.
        checksum: of it; None if none was computed.
    """

    ticket_id: int
    is_ok: bool
    checksum: int | None


class StateLoaded(NamedTuple):
    """How a load ended.

    Attributes:
        ticket_id: which.
        outcome: a ``LoadOutcome``.
    """

    ticket_id: int
    outcome: int
