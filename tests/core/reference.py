"""A naive block manager: sets, lists and brute force, to check the real one against.

Nothing here is fast or clever. A cached block is named by its namespace root and *all* tokens up to
its end, the closure is searched, and the LRU is a number per block: the event in which it became
evictable. The reference never chooses an id; it is told the ids that the real manager handed out
and says whether it was allowed to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

USE = "use"
PIN = "pin"


@dataclass(frozen=True)
class NamespaceFields:
    """What the reference knows of a namespace; the fields of ``raykv.core.Namespace``."""

    tenant: str = ""
    lora: str = ""
    weights_version: int = 0
    multimodal: tuple[tuple[int, object], ...] = ()


@dataclass(eq=False)
class Handle:
    """The reference's ``Blocks``."""

    ids: list[int]
    kind: str = USE
    released: bool = False


@dataclass(frozen=True)
class Key:
    """Names one cached block: everything that its content depends on."""

    root: tuple[str, str, int]
    tokens: tuple[int, ...]
    items: tuple[tuple[int, object], ...]

    def is_proper_prefix_of(self, other: Key) -> bool:
        """Whether this block is an ancestor of the other one (``block_size`` is implied)."""
        return (
            self.root == other.root
            and len(self.tokens) < len(other.tokens)
            and other.tokens[: len(self.tokens)] == self.tokens
            and tuple(item for item in other.items if item[0] < len(self.tokens)) == self.items
        )


class ExpectedDoubleFreeError(Exception):
    """The real manager must raise DoubleFreeError and change nothing."""


class ExpectedValueError(Exception):
    """The real manager must raise ValueError and change nothing."""


class ReferenceViolationError(AssertionError):
    """The real manager did what it must not do."""


@dataclass
class ReferenceManager:
    """The obvious model of ``BlockManagerImpl``.

    Attributes:
        is_lru: whether the oldest release must be evicted first; else any order is right that
            takes children before parents and spares what is held.
        free: ids in the free list.
        handles: every unreleased handle; counts are derived from this list alone.
        tree: content name -> id.
        event_of: evictable id -> number of the release that made it evictable.
        stale: ids in use that were computed before a reset, or forgotten.
        retired: versions of the weights whose blocks go first.
    """

    num_blocks: int
    block_size: int
    enable_prefix_cache: bool = True
    is_lru: bool = True
    free: set[int] = field(default_factory=set)
    handles: list[Handle] = field(default_factory=list)
    tree: dict[Key, int] = field(default_factory=dict)
    event_of: dict[int, int] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    event: int = 0
    retired: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.free = set(range(1, self.num_blocks))

    # -- what follows from the attributes ------------------------------------------------------

    @property
    def all_ids(self) -> set[int]:
        return set(range(1, self.num_blocks))

    @property
    def key_of(self) -> dict[int, Key]:
        return {block_id: key for key, block_id in self.tree.items()}

    def references(self) -> Counter:
        return Counter(i for handle in self.handles for i in handle.ids)

    def ref_counts(self) -> dict[int, int]:
        """Live references plus one where the cache holds the block, of every id."""
        references, cached = self.references(), set(self.tree.values())
        return {i: references[i] + (i in cached) for i in self.all_ids}

    def used(self) -> set[int]:
        return {i for handle in self.handles if handle.kind == USE for i in handle.ids}

    def evictable(self) -> set[int]:
        """Cached, referenced by nobody, and no descendant in the cache is referenced."""
        references = self.references()
        held = [key for key, i in self.tree.items() if references[i]]
        return {
            i
            for key, i in self.tree.items()
            if not references[i] and not any(key.is_proper_prefix_of(other) for other in held)
        }

    def pending(self) -> set[int]:
        return self.all_ids - self.free - self.used() - self.evictable()

    def counters(self) -> dict[str, int]:
        free, used, evictable = len(self.free), len(self.used()), len(self.evictable())
        return {
            "num_total_blocks": self.num_blocks - 1,
            "num_free_blocks": free,
            "num_used_blocks": used,
            "num_evictable_blocks": evictable,
            "num_available_blocks": free + evictable,
            "num_blocks_in_prefix_cache": len(self.tree),
        }

    # -- allocation ----------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self.free) + len(self.evictable())

    def allocate(self, ids: list[int]) -> Handle:
        """Takes over the ids that the real manager chose, and checks that it could."""
        if len(set(ids)) != len(ids):
            raise ReferenceViolationError(f"one id handed out twice: {ids}")
        if not self.can_allocate(len(ids)):
            raise ReferenceViolationError(f"allocated {len(ids)} blocks where too few were to give")
        evicted = set(ids) - self.free
        if len(evicted) != max(0, len(ids) - len(self.free)):
            raise ReferenceViolationError(
                f"{len(ids)} blocks with {len(self.free)} free evicted {sorted(evicted)}"
            )
        self._evict(evicted)
        self.free -= set(ids)
        return self._adopt(Handle(list(ids)))

    def check_victims(self, evicted: set[int]) -> None:
        """No parent before its child, nothing held, retired first; for LRU the oldest release."""
        evictable, key_of = self.evictable(), self.key_of
        if not evicted <= evictable:
            raise ReferenceViolationError(
                f"evicted {sorted(evicted - evictable)}, which are not evictable"
            )
        retired = {i for key, i in self.tree.items() if key.root[2] in self.retired}
        if evicted - retired and evictable & retired - evicted:
            raise ReferenceViolationError(
                f"evicted {sorted(evicted - retired)} before the retired"
                f" {sorted(evictable & retired - evicted)}"
            )
        for victim in evicted - retired if self.is_lru else ():
            for kept in evictable - evicted:
                if self.event_of[kept] < self.event_of[victim]:
                    raise ReferenceViolationError(
                        f"evicted {victim} of release {self.event_of[victim]} before {kept}"
                        f" of release {self.event_of[kept]}"
                    )
        for victim in evicted:
            for key, other in self.tree.items():
                if key_of[victim].is_proper_prefix_of(key) and other not in evicted:
                    raise ReferenceViolationError(f"evicted {victim} before its child {other}")

    def _evict(self, evicted: set[int]) -> None:
        self.check_victims(evicted)
        self.tree = {key: i for key, i in self.tree.items() if i not in evicted}
        self.free |= evicted
        self._settle()

    # -- handles -------------------------------------------------------------------------------

    def deallocate(self, handle: Handle) -> None:
        if handle.released or handle.kind == PIN:
            raise ExpectedDoubleFreeError
        handle.kind = PIN
        self._settle()

    def release(self, handle: Handle) -> None:
        """Also what the garbage collector does with a dropped handle."""
        if handle.released:
            return
        self.handles.remove(handle)
        handle.released = True
        handle.ids = []
        self.event += 1
        self._settle()

    def share(self, handle: Handle) -> Handle:
        return self._adopt(Handle(list(handle.ids), handle.kind))

    def pin(self, handle: Handle) -> Handle:
        return self._adopt(Handle(list(handle.ids), PIN))

    def slice(self, handle: Handle, part: slice) -> Handle:
        return self._adopt(Handle(handle.ids[part], handle.kind))

    def concat(self, handles: list[Handle]) -> Handle:
        if len({handle.kind for handle in handles}) > 1:
            raise ExpectedValueError
        joined = Handle([i for handle in handles for i in handle.ids], handles[0].kind)
        for handle in handles:
            self.handles.remove(handle)
            handle.released = True
            handle.ids = []
        return self._adopt(joined)

    def _adopt(self, handle: Handle) -> Handle:
        self.handles.append(handle)
        self._settle()
        return handle

    # -- prefix cache --------------------------------------------------------------------------

    def keys(self, tokens, namespace: NamespaceFields) -> list[Key]:
        """The names of all full blocks of the tokens."""
        tokens = tuple(int(token) for token in tokens)
        root = (namespace.tenant, namespace.lora, namespace.weights_version)
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [
            Key(
                root,
                tokens[:end],
                tuple(sorted(item for item in namespace.multimodal if item[0] < end)),
            )
            for end in ends
        ]

    def match(self, tokens, namespace: NamespaceFields) -> list[int]:
        hit = []
        for key in self.keys(tokens, namespace):
            if key not in self.tree:
                break
            hit.append(self.tree[key])
        return hit

    def allocate_shared(
        self, tokens, existing: Handle | None, namespace: NamespaceFields
    ) -> Handle:
        held = [] if existing is None else list(existing.ids)
        return self._adopt(Handle(held + self.match(tokens, namespace)[len(held) :]))

    def cache(self, tokens, handle: Handle, namespace: NamespaceFields) -> int:
        """Publishes; returns how many entries are new."""
        if not self.enable_prefix_cache:
            return 0
        keys = self.keys(tokens, namespace)
        num_publishable = min(len(keys), len(handle.ids))
        for position, block_id in enumerate(handle.ids[:num_publishable]):
            if block_id in self.stale:
                num_publishable = position
                break
        ids = handle.ids[:num_publishable]
        added = {
            key: block_id
            for key, block_id in zip(keys[:num_publishable], ids, strict=True)
            if key not in self.tree
        }
        # One block holds one content: neither twice in the handle nor cached under other tokens.
        if len(set(ids)) < len(ids) or not set(added.values()).isdisjoint(self.tree.values()):
            raise ExpectedValueError
        self.tree.update(added)
        self._settle()
        return len(added)

    def reset_prefix_cache(self) -> int:
        num_entries = len(self.tree)
        self.tree = {}
        self.stale = set(self.references())
        self._settle()
        return num_entries

    def forget(self, ids: set[int]) -> set[int]:
        roots = [key for key, i in self.tree.items() if i in ids]
        gone = {
            i
            for key, i in self.tree.items()
            if any(root == key or root.is_proper_prefix_of(key) for root in roots)
        }
        self.tree = {key: i for key, i in self.tree.items() if i not in gone}
        self.stale |= gone & set(self.references())
        self.event += 1
        self._settle()
        return gone

    def retire(self, weights_version: int) -> int:
        self.retired.add(weights_version)
        key_of = self.key_of
        return sum(key_of[i].root[2] == weights_version for i in self.evictable())

    # -- the one place where blocks become free or evictable -----------------------------------

    def _settle(self) -> None:
        """Frees what nobody holds; stamps what became evictable with the current event."""
        kept = set(self.references()) | set(self.tree.values())
        self.free = self.all_ids - kept
        self.stale -= self.free
        evictable = self.evictable()
        self.event_of = {i: self.event_of.get(i, self.event) for i in evictable}
