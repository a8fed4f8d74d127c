"""Two worlds for test_exhaustive: the real manager and the reference, and all orders of steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from raykv.core import BlockManagerImpl, Blocks

from .helpers import COUNTERS, run_of
from .reference import Handle, NamespaceFields, ReferenceManager

# One prompt, one that branches off, one that goes on.
PROMPTS = {"trunk": (0, 1), "branch": (0, 2), "longer": (0, 1, 3)}
DEFAULT = NamespaceFields()
FINISH = ("cache", "deallocate", "release")
Op = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """What is enumerated.

    Attributes:
        num_blocks: blocks to give; the padding block comes on top.
        block_size: tokens per block.
        depth: operations in a row.
        extra: operations besides admit, cache, deallocate and release; "finish" replaces cache and
            deallocate: both and release in one.
        eviction: the policy.
    """

    num_blocks: int
    block_size: int
    depth: int
    extra: tuple[str, ...] = ()
    eviction: str = "lru"

    def tokens(self, who) -> list[int]:
        return run_of(self.block_size, *PROMPTS[who])

    def __str__(self):
        extra = "".join(f"-{name}" for name in self.extra)
        return f"{self.num_blocks}x{self.block_size}-depth{self.depth}{extra}-{self.eviction[-5:]}"


class Real:
    """The manager under test, with the handles of the sequences."""

    def __init__(self, case: Case, path: list[Op]):
        self.case = case
        self.manager = BlockManagerImpl(
            case.num_blocks + 1, case.block_size, hash_seed=b"", eviction=case.eviction
        )
        self.held: dict[str, Blocks] = {}
        for op in path:
            self.apply(op)

    def apply(self, op: Op):
        name, who = op
        if name == "admit":
            return self.admit(who)
        if name == "cache":
            return self.manager.cache(self.case.tokens(who), self.held[who])
        if name == "deallocate":
            return self.manager.deallocate(self.held[who])
        if name == "release":
            return self.held.pop(who).release()
        if name == "finish":
            num_new, *_ = [self.apply((step, who)) for step in FINISH]
            return num_new
        if name == "share":
            self.held[f"{who}'s other"] = self.held[who].share()
        elif name == "cut":
            self.held[f"{who}'s other"] = self.held[who][1:]
        else:
            return self.manager.reset_prefix_cache()
        return None

    def admit(self, who):
        """The ids hit, and those allocated for the rest or None."""
        hit = self.manager.allocate_shared(self.case.tokens(who))
        ids = hit.ids.tolist()
        fresh = self.manager.allocate(len(PROMPTS[who]) - len(ids))
        if fresh is None:
            hit.release()
            return ids, None
        new = fresh.ids.tolist()
        self.held[who] = Blocks.concat([hit, fresh])
        return ids, new


@dataclass
class Model:
    """The same by the reference; cloned where the enumeration branches."""

    case: Case
    manager: ReferenceManager
    held: dict[str, Handle] = field(default_factory=dict)
    published: frozenset[str] = frozenset()
    was_reset: bool = False

    @classmethod
    def of(cls, case: Case) -> Model:
        is_lru = case.eviction == "lru"
        return cls(case, ReferenceManager(case.num_blocks + 1, case.block_size, is_lru=is_lru))

    def clone(self) -> Model:
        old = self.manager
        held = {who: Handle(list(h.ids), h.kind) for who, h in self.held.items()}
        manager = ReferenceManager(
            old.num_blocks, old.block_size, True, old.is_lru, set(old.free),
            list(held.values()), dict(old.tree), dict(old.event_of), set(old.stale), old.event,
        )  # fmt: skip
        manager.free = set(old.free)  # the constructor fills it
        return Model(self.case, manager, held, self.published, self.was_reset)

    def options(self) -> list[Op]:
        """All that can be done next."""
        ops = []
        for who in PROMPTS:
            handle, other = self.held.get(who), f"{who}'s other"
            if other in self.held:
                ops.append(("release", other))
            if handle is None:
                ops.append(("admit", who))
                continue
            ops.append(("release", who))
            if "finish" in self.case.extra:
                ops.append(("finish", who))
                continue
            if who not in self.published:
                ops.append(("cache", who))
            if handle.kind == "use":
                ops.append(("deallocate", who))
            if other not in self.held:
                ops += [(name, who) for name in ("share", "cut") if name in self.case.extra]
        if "reset" in self.case.extra and not self.was_reset:
            ops.append(("reset", ""))
        return ops

    def apply(self, op: Op, outcome) -> None:
        """Do the same; raise where the real manager's answer is not right."""
        name, who = op
        if name == "admit":
            self.admit(who, *outcome)
        elif name == "cache":
            tokens = self.case.tokens(who)
            assert outcome == self.manager.cache(tokens, self.held[who], DEFAULT)
            self.published |= {who}
        elif name == "deallocate":
            self.manager.deallocate(self.held[who])
        elif name == "release":
            self.manager.release(self.held.pop(who))
            self.published -= {who}
        elif name == "finish":
            for step in FINISH:
                self.apply((step, who), outcome)
        elif name == "share":
            self.held[f"{who}'s other"] = self.manager.share(self.held[who])
        elif name == "cut":
            self.held[f"{who}'s other"] = self.manager.slice(self.held[who], slice(1, None))
        else:
            assert outcome == self.manager.reset_prefix_cache()
            self.was_reset = True

    def admit(self, who, hit_ids, new_ids):
        hit = self.manager.allocate_shared(self.case.tokens(who), None, DEFAULT)
        assert hit.ids == hit_ids
        if new_ids is None:
            assert not self.manager.can_allocate(len(PROMPTS[who]) - len(hit_ids))
            self.manager.release(hit)
        else:
            fresh = self.manager.allocate(new_ids)
            self.held[who] = self.manager.concat([hit, fresh])


def compare(real: Real, model: Model) -> None:
    expected = model.manager.counters()
    assert {name: getattr(real.manager, name) for name in COUNTERS} == expected
    counts = model.manager.ref_counts()
    assert real.held.keys() == model.held.keys()
    for who, blocks in real.held.items():
        assert blocks.ids.tolist() == model.held[who].ids
        assert blocks.ref_counts.tolist() == [counts[i] for i in model.held[who].ids]


def drain(real: Real) -> None:
    real.manager.check_integrity()
    for blocks in real.held.values():
        blocks.release()
    total = real.case.num_blocks
    assert (real.manager.num_used_blocks, real.manager.num_available_blocks) == (0, total)
    everything = real.manager.allocate(total)
    assert sorted(everything.ids.tolist()) == list(range(1, total + 1))
    everything.release()


def state(real: Real, model: Model):
    """All that the future depends on; ids are renamed and stamps counted from the oldest.

    Two orders that end in one state go on equally: nothing depends on an id's value, nor on
    anything of a stamp but its place among the others.
    """
    cache, ledger = real.manager._cache, real.manager._ledger
    names: dict[int, int] = {}
    runs = [run for run in cache._runs if run is not None]
    place = {s: i for i, s in enumerate(sorted(stamp for run in runs for _, stamp in run.tails()))}

    def named(ids):
        return tuple(names.setdefault(block_id, len(names)) for block_id in ids.tolist())

    def tree(run):
        own = named(run.ids[: run.length]), run.protected, [(at, place[s]) for at, s in run.tails()]
        return str(own), tuple((key, tree(run.children[key])) for key in sorted(run.children))

    held = tuple((who, b._weight, named(b.index)) for who, b in sorted(real.held.items()))
    roots = tuple((key, tree(root)) for key, root in sorted(cache.roots.items()))
    stale = () if real.manager._stale is None else named(real.manager._stale.nonzero()[0])
    named(ledger._stack[: ledger.num_free][::-1])
    counts = tuple(int(ledger.counts[block_id]) for block_id in names)
    return held, roots, frozenset(stale), counts, model.published, model.was_reset


class Enumeration:
    """Goes through the orders; replays the real manager where they branch."""

    def __init__(self, case: Case):
        self.case = case
        self.done: Counter[str] = Counter()

    def all_orders(self) -> Counter[str]:
        """Every order of ``case.depth`` operations, depth first; nothing is merged."""
        self._explore([], Model.of(self.case), Real(self.case, []))
        return self.done

    def all_states(self) -> Counter[str]:
        """Every operation in every state that ``case.depth`` operations can reach."""
        level: list[tuple[list[Op], Model]] = [([], Model.of(self.case))]
        seen = set()
        while level and self.done["depth"] < self.case.depth:
            self.done["depth"] += 1
            below = []
            for path, model in level:
                for op in model.options():
                    real, after = self._step(path, model, Real(self.case, path), op)
                    key = state(real, after)
                    if key not in seen:
                        seen.add(key)
                        below.append(([*path, op], after))
                        drain(real)
            level = below
        self.done["states"] = len(seen)
        return self.done

    def _explore(self, path: list[Op], model: Model, real: Real | None) -> None:
        if len(path) == self.case.depth:
            drain(real)
            self.done["orders"] += 1
            return
        for op in model.options():
            here, after = self._step(path, model, real or Real(self.case, path), op)
            real = None  # the next branch starts from the path again
            self._explore([*path, op], after, here)

    def _step(self, path: list[Op], model: Model, real: Real, op: Op) -> tuple[Real, Model]:
        after = model.clone()
        try:
            after.apply(op, real.apply(op))
            compare(real, after)
        except AssertionError as error:
            error.add_note(f"after {[*path, op]}")
            raise
        self.done[op[0]] += 1
        return real, after
