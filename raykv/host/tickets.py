"""What the clients of a host tier and its books say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raykv.core import BlockIds, Namespace

NO_TICKET = 0


class LoadOutcome(IntEnum):
    """What became of one block of a load; all but OK are misses. Numbered as the copier's."""

    OK = 0
    STALE = 1
    """Its generation was another one after the copy."""
    CORRUPT = 2
    """Its checksum was another one: an incident."""
    FAILED = 3
    """It was not copied, or not as a whole."""
    CANCELLED = 4
    """The copy was called off before it started."""


class Offer(NamedTuple):
    """Blocks that a client could store.

    Attributes:
        tokens: int32 [n], from the root on.
        namespace: whose they are.
        num_blocks: leading full blocks whose KV is computed and stays where it is meanwhile.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace
    num_blocks: int


class Want(NamedTuple):
    """A prompt that a client could load KV for.

    Attributes:
        tokens: int32 [n], the whole prompt.
        namespace: whose it is.
        num_device_blocks: leading blocks that the client has.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace
    num_device_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class StoreTicket:
    """Leave to write host blocks, until it is reported by ``HostTier.stored``.

    Attributes:
        id: NO_TICKET if there is nothing to write, and then nothing to report.
        first_block: the prompt's block that goes to ``host_ids[0]``; the others follow on it.
        host_ids: int32 [n], where to.
        generations: uint64 [n], of these host blocks.
    """

    id: int
    first_block: int
    host_ids: BlockIds
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class LoadTicket:
    """Leave to read host blocks, until it is reported by ``HostTier.loaded``.

    The reader compares each block's generation after its copy, and its checksum.

    Attributes:
        id: NO_TICKET if there is nothing to read, and then nothing to report.
        first_block: the prompt's block that is in ``host_ids[0]``; the others follow on it.
        host_ids: int32 [n], where from.
        generations: uint64 [n], that their content belongs to.
        checksums: uint64 [n], as their writer reported them; 0 where it computed none.
    """

    id: int
    first_block: int
    host_ids: BlockIds
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]


class StoreResult(NamedTuple):
    """How a store ended. Nothing of it will be written any more.

    Attributes:
        ticket_id: which.
        num_ok: leading blocks that are complete; 0 after a failure at the first, or if cancelled.
        checksums: uint64, of at least these; None if none were computed.
    """

    ticket_id: int
    num_ok: int
    checksums: NDArray[np.uint64] | None


class LoadResult(NamedTuple):
    """How a load ended.

    Attributes:
        ticket_id: which.
        outcomes: uint8 [n], a ``LoadOutcome`` per block.
    """

    ticket_id: int
    outcomes: NDArray[np.uint8]


class SilentClient(NamedTuple):
    """A client whose lease is over: see whether its process lives."""

    client_id: str
    pid: int
