"""The benchmark of slab copies runs and says what it measured."""

import json

from raykv.bench.slab_copies import BATCH_BYTES, TARGET_SHARE, measure


def test_every_kind_of_batch_is_measured():
    figures = list(measure((64 << 10,), block_sizes=(8 << 10, 16 << 10), num_rounds=2))
    kinds = [(figure.block_kib, figure.direction, figure.with_checksums) for figure in figures]
    assert kinds == [
        (size, direction, checked)
        for size in (8, 16)
        for direction in ("offload", "load")
        for checked in (False, True)
    ]
    for figure in figures:
        assert figure.gb_per_s > 0
        assert figure.plain_gb_per_s > 0
        assert figure.share > 0
        assert figure.target_share is None
        assert json.loads(json.dumps(figure.as_json()))["direction"] == figure.direction


def test_only_large_batches_without_checksums_have_a_target():
    figures = measure((8 << 20, BATCH_BYTES), block_sizes=(4 << 20,), num_rounds=1)
    found = {(figure.batch_mib, figure.with_checksums): figure.target_share for figure in figures}
    assert found == {
        (8, False): None, (8, True): None, (64, False): TARGET_SHARE, (64, True): None
    }  # fmt: skip
