"""Handles of blocks: what sequences and copies hold and pass around (the seed's section 3)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn, Self, overload

import numpy as np

from raykv.errors import DoubleFreeError

from .ledger import REF, USE
from .tokens import NO_INDEX

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from .base import LedgerBlockManager
    from .tokens import BlockIds, Index


class Blocks:
    """Owns one reference to each of many blocks; a sequence of :class:`Block`.

    Managers make handles; users share, slice, pin, deallocate and release them. ``deallocate``
    (through the manager) says that the sequence is done with the blocks: the used count falls, the
    references stay. ``release`` drops the references. A handle that is garbage-collected is
    released at its manager's next operation.

    Attributes:
        manager: the manager that the blocks belong to.
    """

    __slots__ = ("__weakref__", "_ids", "_index", "_unique", "_weight", "manager")

    def __init__(
        self, manager: LedgerBlockManager, index: Index, weight: int, *, unique: bool = True
    ) -> None:
        self._index = index  # never written to: handles share and slice it
        self._ids: BlockIds | None = None
        self._unique = unique
        self.manager = manager
        self._weight = weight  # what this handle holds of each id: USE + REF, REF, or 0 = released

    @property
    def ids(self) -> BlockIds:
        """int32 [n], read-only; empty once released."""
        if self._ids is None:
            self._ids = self._index.astype(np.int32)
            self._ids.flags.writeable = False
        return self._ids

    @property
    def index(self) -> Index:
        """The same as int64, for the manager; not to be written to."""
        return self._index

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """int32 [n]: live handles, plus one where the prefix cache holds the block."""
        return self.manager.ref_counts(self._index)

    @property
    def is_released(self) -> bool:
        """Whether the references are gone."""
        return self._weight == 0

    @property
    def is_unique(self) -> bool:
        """False where ``concat`` may have listed a block twice."""
        return self._unique

    def share(self) -> Blocks:
        """One more owner of the same blocks; of a pin or a deallocated handle, one more pin."""
        return self.manager.make_handle(self._index, self._weight, unique=self._unique)

    def pin(self) -> Blocks:
        """A reference that is no use: for copies and steps in flight."""
        return self.manager.make_handle(self._index, min(self._weight, REF), unique=self._unique)

    def release(self) -> None:
        """Drop this handle's references, and its uses if they are not settled; idempotent."""
        if self._weight:
            ids, weight, unique = self._detach()
            self.manager.drop(ids, weight, unique=unique)

    def settle(self) -> None:
        """Drop the uses and keep the references: the handle's side of ``manager.deallocate``.

        Raises:
            DoubleFreeError: there is no use to drop.
        """
        if self._weight < USE:
            state = "was released" if not self._weight else "holds no use (deallocated, or a pin)"
            raise DoubleFreeError(
                f"cannot deallocate a handle of {len(self._index)} blocks: it {state}; "
                "deallocate each handle once, before releasing it"
            )
        self._weight -= USE
        self.manager.drop(self._index, USE, unique=self._unique)

    def detach(self) -> Index:
        """Hand the uses over to the caller, who owes ``manager.adopt(ids)``.

        Raises:
            ValueError: the handle is a pin or deallocated, or lists a block twice.
        """
        if self._weight != USE + REF or not self._unique:
            raise ValueError(
                f"{self!r} cannot be detached: it must hold one use of distinct blocks"
            )
        return self._detach()[0]

    def replace(self, block_id: int, other: Index) -> None:
        """List ``other``, one id or none, in place of an id: for managers, who keep the books.

        A handle that lists nothing any more is released.
        """
        index = self._index
        if len(index) == 1:
            self._index = other
        else:
            at = int(np.flatnonzero(index == block_id)[0])
            self._index = np.concatenate((index[:at], other, index[at + 1 :]))
        self._ids = None
        if not len(self._index):
            self._weight = 0

    @property
    def is_use(self) -> bool:
        """Whether it holds uses: live, neither deallocated nor a pin."""
        return self._weight >= USE

    @staticmethod
    def concat(handles: Iterable[Blocks]) -> Blocks:
        """Join handles of one manager and kind; takes over their references, they become empty.

        Raises:
            ValueError: no handles, or handles of several managers or kinds; nothing changed.
        """
        parts = list(handles)
        if len({(id(part.manager), part._weight) for part in parts}) != 1 or parts[0].is_released:
            raise ValueError(
                f"cannot join {len(parts)} handles: all must be live, of one manager, and all "
                "uses or all pins"
            )
        if len(set(map(id, parts))) != len(parts):
            raise ValueError("cannot join a handle with itself: share() it first")
        manager, weight = parts[0].manager, parts[0]._weight
        ids = np.concatenate([part._detach()[0] for part in parts])
        return Blocks(manager, ids, weight, unique=len(np.unique(ids)) == len(ids))

    def _detach(self) -> tuple[Index, int, bool]:
        owned = self._index, self._weight, self._unique
        self._index, self._ids, self._weight = NO_INDEX, None, 0
        return owned

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Block]:
        return (Block(self.manager, block_id) for block_id in self._index.tolist())

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __getitem__(self, index: int | slice) -> Block | Blocks:
        if isinstance(index, slice):
            return self.manager.make_handle(self._index[index], self._weight, unique=self._unique)
        return Block(self.manager, int(self._index[operator.index(index)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __copy__(self) -> Blocks:
        return self.share()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle of blocks cannot be pickled or copied deeply: share() it")

    def __del__(self) -> None:
        # Collection can strike in the middle of an update of the books, so only leave a note.
        if getattr(self, "_weight", 0):
            self.manager.dropped.append((self._index, self._weight, self._unique))

    def __repr__(self) -> str:
        kind = "released" if self.is_released else "use" if self._weight >= USE else "pin"
        return f"<Blocks {kind} {np.array2string(self._index, threshold=8, separator=', ')}>"


class Block:
    """A borrowed view of one block: valid as long as the handle it came from.

    Attributes:
        manager: the manager that the block belongs to.
        id: the physical block id.
    """

    __slots__ = ("id", "manager")

    def __init__(self, manager: LedgerBlockManager, block_id: int) -> None:
        self.manager = manager
        self.id = block_id

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def ref_count(self) -> int:
        """Live handles, plus one where the prefix cache holds the block."""
        return int(self.manager.ref_counts(np.array([self.id]))[0])

    @property
    def is_shared(self) -> bool:
        """Whether anybody else holds the block."""
        return self.ref_count > 1

    @property
    def hash_value(self) -> bytes | None:
        """The prefix hash of a cached block's content, else None."""
        return self.manager.hash_of(self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Block):
            return NotImplemented
        return self.id == other.id and self.manager is other.manager

    def __hash__(self) -> int:
        return hash((self.id, id(self.manager)))

    def __repr__(self) -> str:
        return f"<Block {self.id} ref_count={self.ref_count}>"
