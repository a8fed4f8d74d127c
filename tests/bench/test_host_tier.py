"""The bench of the host tier's books does what it says."""

from __future__ import annotations

from raykv.bench.host_tier import BATCH, HostBench, rows


def test_a_store_fills_new_blocks_by_evicting():
    bench = HostBench(1025)
    before = bench.tier.stats()
    tickets = bench.store(bench.offers(8, 32))
    after = bench.tier.stats()
    assert sum(len(ticket.host_ids) for ticket in tickets) == BATCH
    assert after.stored_total - before.stored_total == after.evicted - before.evicted == BATCH
    bench.tier.check_integrity()


def test_shared_blocks_are_stored_once():
    bench = HostBench(1025)
    tickets = bench.store(bench.offers(32, 8, num_shared=64))
    assert sum(len(ticket.host_ids) for ticket in tickets) == BATCH + 64


def test_a_load_finds_all():
    bench = HostBench(1025)
    assert bench.load(bench.wants(8, 32)) == BATCH
    assert bench.tier.stats().loaded_total == BATCH
    bench.tier.check_integrity()


def test_all_rows_have_their_names():
    names = [row.workload for row in rows(1025, num_runs=2)]
    assert len(set(names)) == len(names) == 6
