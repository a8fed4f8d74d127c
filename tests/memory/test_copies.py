"""Block copies against a loop that does one block at a time, and their refusals."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.memory import rows as rows_module
from raykv.memory.buffers import KVBuffers
from raykv.memory.copies import copy_blocks, gather_blocks, scatter_blocks
from raykv.memory.spec import KVSpec, LayerSpec

NUM_BLOCKS = 9
DTYPES = ["float32", "float16", "bfloat16"]
per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def filled(device, dtype="float16"):
    """Buffers of random bits, NaNs among them, and the bits."""
    spec = KVSpec((LayerSpec.attention(2, 3), LayerSpec.mla(5, 2)), 4, dtype)
    buffers = KVBuffers(spec, NUM_BLOCKS, device=device)
    bits = bits_of(buffers.storage)
    bits[...] = np.random.default_rng(0).integers(0, 1 << 8 * spec.itemsize, bits.shape)
    return buffers, bits


def bits_of(array):
    return np.asarray(array).view(f"u{array.itemsize}")


@pytest.fixture(params=["one piece", "small pieces"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":
        monkeypatch.setattr(rows_module, "PIECE_BYTES", 2 * 4 * 19 * 2)


@st.composite
def copy_batches(draw):
    dst = draw(st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True))
    src = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=len(dst), max_size=len(dst)))
    return src, dst


@per_example
@given(batch=copy_batches(), dtype=st.sampled_from(DTYPES))
def test_copies_read_all_sources_first(device, pieces, batch, dtype):
    buffers, bits = filled(device, dtype)
    before = bits.copy()
    expected = bits.copy()
    for source, destination in zip(*batch, strict=True):
        expected[destination] = before[source]
    copy_blocks(buffers, *batch)
    np.testing.assert_array_equal(bits, expected)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([1, 2], [2, 1]),
        ([1, 2, 3], [2, 3, 4]),
        ([3, 2, 1], [4, 3, 2]),
        ([1, 2, 3], [2, 3, 1]),
        ([5, 5, 5], [5, 6, 7]),
        ([0, 0, 0, 0, 0], [8, 7, 6, 5, 4]),
        (range(1, 4), np.array([6, 7, 8], np.int32)),
        ([], []),
    ],
    ids=["swap", "chain", "chain back", "cycle", "fan", "padding", "other types", "empty"],
)
def test_copies_by_example(device, pieces, src, dst):
    buffers, bits = filled(device)
    before = bits.copy()
    copy_blocks(buffers, src, dst)
    np.testing.assert_array_equal(bits[list(dst)], before[list(src)])
    others = sorted(set(range(NUM_BLOCKS)) - set(dst))
    np.testing.assert_array_equal(bits[others], before[others])


@per_example
@given(ids=st.lists(st.integers(0, NUM_BLOCKS - 1)), dtype=st.sampled_from(DTYPES))
def test_gather_reads_in_order_and_changes_nothing(device, ids, dtype):
    buffers, bits = filled(device, dtype)
    before = bits.copy()
    got = gather_blocks(buffers, ids)
    assert isinstance(got, buffers.xp.ndarray)
    assert got.shape == (len(ids), buffers.spec.block_elements)
    assert got.dtype == buffers.storage.dtype
    assert got.flags.c_contiguous
    for row, block in enumerate(ids):
        np.testing.assert_array_equal(bits_of(got)[row], before[block])
    bits_of(got)[...] = 0
    np.testing.assert_array_equal(bits, before)


def test_gather_fills_the_given_array(device):
    buffers, bits = filled(device)
    staging = buffers.xp.zeros((5, buffers.spec.block_elements), dtype=buffers.storage.dtype)
    out = staging[1:4]
    assert gather_blocks(buffers, [7, 0, 7], out) is out
    np.testing.assert_array_equal(bits_of(staging)[1:4], bits[[7, 0, 7]])
    assert not bits_of(staging)[[0, 4]].any()


@per_example
@given(
    ids=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_scatter_writes_these_blocks_and_no_others(device, pieces, ids, dtype, seed):
    buffers, bits = filled(device, dtype)
    expected = bits.copy()
    rows = buffers.xp.empty((len(ids), buffers.spec.block_elements), buffers.storage.dtype)
    bits_of(rows)[...] = np.random.default_rng(seed + 1).integers(0, 1 << 16, rows.shape)
    for row, block in enumerate(ids):
        expected[block] = bits_of(rows)[row]
    scatter_blocks(buffers, ids, rows)
    np.testing.assert_array_equal(bits, expected)


def test_scatter_undoes_gather(device, pieces):
    buffers, bits = filled(device)
    before = bits.copy()
    saved = gather_blocks(buffers, [3, 8, 1])
    bits[[3, 8, 1]] = 0
    scatter_blocks(buffers, [3, 8, 1], saved)
    np.testing.assert_array_equal(bits, before)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1, 9], [2, 3], r"src_ids spans 1 to 9, but must lie in \[0, 9\)"),
        ([-1], [2], "src_ids spans -1"),
        ([1], [9], "dst_ids spans 9 to 9"),
        ([1, 2], [3], "2 src_ids do not pair with 1 dst_ids"),
        ([1, 2], [3, 0], "dst_ids holds 0, the padding block"),
        ([0], [0], "padding block"),
        ([1, 2, 3], [4, 5, 4], "block 4 2 times"),
        ([[1]], [[2]], r"shape \(1, 1\)"),
        ([1.5], [2], "dtype float64"),
    ],
)
def test_bad_copies_write_nothing(device, src, dst, message):
    buffers, bits = filled(device)
    before = bits.copy()
    with pytest.raises(ValueError, match=message):
        copy_blocks(buffers, src, dst)
    np.testing.assert_array_equal(bits, before)


def test_bad_gathers_write_nothing(device):
    buffers, bits = filled(device)
    before = bits.copy()
    xp, elements, dtype = buffers.xp, buffers.spec.block_elements, buffers.storage.dtype
    wide = xp.zeros((2, 2 * elements), dtype=dtype)
    cases = [
        ([1, 9], xp.zeros((2, elements), dtype=dtype), "ids spans 1 to 9"),
        ([1, 2], xp.zeros((3, elements), dtype=dtype), rf"\(3, {elements}\), but must"),
        ([1, 2], xp.zeros((2, elements - 1), dtype=dtype), rf"\(2, {elements - 1}\), but must"),
        ([1, 2], xp.zeros((2, elements), dtype="float32"), "float32 of shape.*must be float16"),
        ([1, 2], wide[:, ::2], "must be contiguous"),
        ([1, 2], buffers.storage[3:5], "part of the buffer"),
        ([1, 2], [[0.0] * elements] * 2, "is a builtins.list"),
    ]
    for ids, out, message in cases:
        with pytest.raises(ValueError, match=message):
            gather_blocks(buffers, ids, out)
        np.testing.assert_array_equal(bits, before)


def test_gather_refuses_a_read_only_target():
    buffers, _ = filled("cpu")
    out = np.zeros((1, buffers.spec.block_elements), buffers.storage.dtype)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gather_blocks(buffers, [1], out)


def test_bad_scatters_write_nothing(device):
    buffers, bits = filled(device)
    before = bits.copy()
    xp, elements, dtype = buffers.xp, buffers.spec.block_elements, buffers.storage.dtype
    rows = xp.zeros((2, elements), dtype=dtype)
    cases = [
        ([1, 9], rows, "ids spans 1 to 9"),
        ([0, 1], rows, "padding block"),
        ([4, 4], rows, "block 4 2 times"),
        ([1, 2, 3], rows, rf"\(2, {elements}\), but must"),
        ([1], rows[0], rf"shape \({elements},\)"),
        ([1, 2], xp.zeros((2, elements), dtype="float64"), "float64 of shape.*must be float16"),
        ([1, 2], buffers.storage[2:4], "part of the buffer: use copy_blocks"),
        ([1, 2], [[0.0] * elements] * 2, "is a builtins.list"),
    ]
    for ids, blocks, message in cases:
        with pytest.raises(ValueError, match=message):
            scatter_blocks(buffers, ids, blocks)
        np.testing.assert_array_equal(bits, before)


def test_rows_of_another_device_are_refused(fake_cupy):
    buffers, bits = filled("cuda")
    before = bits.copy()
    host = np.zeros((1, buffers.spec.block_elements), buffers.storage.dtype)
    with pytest.raises(ValueError, match=r"numpy.ndarray, but the buffer on cuda needs a cupy"):
        scatter_blocks(buffers, [1], host)
    with pytest.raises(ValueError, match=r"buffer on cuda needs a cupy.ndarray"):
        gather_blocks(buffers, [1], host)
    np.testing.assert_array_equal(bits, before)


def test_a_batch_larger_than_a_piece_uses_a_bounded_scratch(fake_cupy, monkeypatch):
    buffers, bits = filled("cuda")
    before = bits.copy()
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 2 * buffers.spec.block_bytes)
    shapes = []
    empty = fake_cupy.empty
    fake_cupy.empty = lambda shape, dtype: shapes.append(shape) or empty(shape, dtype)
    copy_blocks(buffers, [1, 2, 3], [6, 7, 8])
    assert shapes == [(2, buffers.spec.block_elements)]
    np.testing.assert_array_equal(bits[6:], before[1:4])


def test_a_failed_scratch_allocation_writes_nothing(fake_cupy):
    buffers, bits = filled("cuda")
    before = bits.copy()

    def out_of_memory(*_):
        raise MemoryError

    fake_cupy.empty = out_of_memory
    for src, dst in (([1, 2], [3, 4]), ([1, 2], [2, 3])):
        with pytest.raises(MemoryError):
            copy_blocks(buffers, src, dst)
        np.testing.assert_array_equal(bits, before)
