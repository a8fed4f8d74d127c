"""What a rank and its node's host tier say to each other; plain data that pickles small."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raykv.core.kv_cache_manager import Packed
from raykv.core.namespace import Namespace
from raykv.host.state_tickets import StateLoad, StateLoaded, StateOffer, StateStored, StateTicket
from raykv.host.tickets import LoadResult, LoadTicket, Offer, StoreResult, StoreTicket, Want
from raykv.memory.host_slab import SlabDescriptor


@dataclass(frozen=True, slots=True)
class BlockKind(Packed):
    """What a rank's blocks are: ranks that share a tier agree.

    Attributes:
        num_bytes: of a block.
        layout: what these bytes mean; see ``raykv.store.layout_name``.
        weights: what names the weights in a store; None where nothing does.
        checkpoint_bytes: of a checkpoint of recurrent state; 0 where sequences have none.
    """

    num_bytes: int
    layout: bytes
    weights: bytes | None = None
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierInfo(Packed):
    """What a client needs before it copies.

    Attributes:
        epoch: counts the resets; see TierCall.
        first_epoch: where it began to count when it started.
        blocks: where the slab of KV blocks is.
        states: where that of checkpoints of recurrent state is; None where there are none.
    """

    epoch: int
    first_epoch: int
    blocks: SlabDescriptor
    states: SlabDescriptor | None = None


@dataclass(frozen=True, slots=True)
class Ask(Packed):
    """A prompt whose KV a rank may want soon, or wants now.

    Attributes:
        want: what it wants.
        is_final: take what is there; else wait while more is on its way.
        prefill_tokens_per_s: how fast the rank computes; 0 if it has not measured it.
        state_step: of a model with recurrent state, of how many tokens the place of a checkpoint
            must be a multiple: then KV is of use only up to one. 0 for other models.
    """

    want: Want
    is_final: bool = False
    prefill_tokens_per_s: float = 0.0
    state_step: int = 0


@dataclass(frozen=True, slots=True)
class TierCall(Packed):
    """All that a rank has to say to its host tier at a time; applied in order of the attributes.

    Attributes:
        client_id: who calls.
        epoch: the tier's, as the client knows it. Offers and asks of an earlier one come from
            before a reset: nothing is taken and nothing found.
        stored: stores that ended.
        loaded: loads that ended.
        offers: what it could store.
        asks: what it wants.
        states_stored: stores of checkpoints that ended.
        states_loaded: loads of checkpoints that ended.
        state_offers: checkpoints that it could store.
        expected: (tokens, namespace) of prompts that wait in line: the tier may begin to get them.
    """

    client_id: str
    epoch: int
    stored: list[StoreResult] = field(default_factory=list)
    loaded: list[LoadResult] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    states_stored: list[StateStored] = field(default_factory=list)
    states_loaded: list[StateLoaded] = field(default_factory=list)
    state_offers: list[StateOffer] = field(default_factory=list)
    expected: list[tuple[NDArray[np.int32], Namespace]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierAnswer(Packed):
    """What the host tier answers.

    Attributes:
        epoch: the tier's now.
        stores: a ticket per offer.
        loads: a ticket per ask; None where more is on its way, so ask again.
        state_stores: tickets per offer of checkpoints.
        state_loads: a ticket per ask with ``state_step``, None where there is nothing; else None.
        has_sources: whether the tier can get blocks from a store or another node.
    """

    epoch: int
    stores: list[StoreTicket]
    loads: list[LoadTicket | None]
    state_stores: list[list[StateTicket]]
    state_loads: list[StateLoad | None]
    has_sources: bool = False
