"""The bench of the host tier's costs does what it says."""

from __future__ import annotations

from raykv.bench.tier_costs import BATCH, TierBench, messages, rows


def test_an_offload_is_stored_by_evicting():
    with TierBench(1025) as bench:
        sequences = bench.computed(8, 32)
        before = bench.kv.tier.totals["offloaded"]
        bench.offload_all(sequences)
        assert bench.kv.tier.totals["offloaded"] - before == BATCH
        assert bench.kv.tier.num_offloading_blocks == 0
        bench.drop(sequences)
        bench.kv.check_integrity()
        assert bench.kv.block_manager.num_used_blocks == 0


def test_a_load_brings_all_blocks():
    with TierBench(1025) as bench:
        sequences = bench.load(bench.stored(8, 32))
        assert bench.kv.tier.totals["loaded"] == BATCH
        assert {sequence.kv_state.num_computed_tokens for sequence in sequences} == {32 * 16}
        bench.drop(sequences)
        bench.kv.check_integrity()


def test_what_the_host_has_is_planned_and_what_it_lacks_is_not():
    with TierBench(1025) as bench:
        [known], [unknown] = bench.admit(bench.stored(1, 64)), bench.admit(bench.prompts(1, 64))
        assert known.is_loading
        assert not unknown.is_loading


def test_an_allocation_that_plans_loads_costs_one_exchange():
    for num_sequences in (1, 16):
        found = messages(num_sequences)
        assert found.num_planned == num_sequences
        assert found.num_calls == 1
        assert 1 <= found.num_exchanges <= found.max_exchanges
        assert found.num_exchanges_in_all > found.num_exchanges  # the loads are reported, too


def test_all_rows_have_their_names():
    names = [row.workload for row in rows(1025, num_runs=2)]
    assert len(set(names)) == len(names) == 9
