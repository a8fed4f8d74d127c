"""KV memory and block copies on a real GPU; the CPU runs the same checks, to keep them true."""

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.memory import (
    KVBuffers,
    KVSpec,
    LayerSpec,
    copy_blocks,
    gather_blocks,
    resolve_device,
    scatter_blocks,
)
from raykv.memory import rows as rows_module

LAYERS = (LayerSpec.attention(2, 8), LayerSpec(()), LayerSpec.mla(24, 4))
NUM_BLOCKS = 40


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        try:
            resolve_device("cuda")
        except ConfigError as error:
            pytest.skip(f"no usable GPU: {error}")
    return request.param


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def buffers(request, device):
    return KVBuffers(KVSpec(LAYERS, 4, request.param), NUM_BLOCKS, device=device)


def host(array):
    """Copy an array's bits to NumPy."""
    values = array if isinstance(array, np.ndarray) else array.get()
    return values.view(f"u{values.itemsize}").copy()


def fill(buffers):
    """Fill the storage with random bits, NaNs among them, and return them."""
    bits = np.random.default_rng(3).integers(
        0, 1 << 8 * buffers.spec.itemsize, buffers.storage.shape
    )
    bits = bits.astype(f"u{buffers.spec.itemsize}")
    buffers.storage[...] = buffers.xp.asarray(bits.view(buffers.spec.storage_dtype))
    return bits


def test_memory_starts_as_zeros(buffers):
    assert buffers.storage.flags.c_contiguous
    assert buffers.storage.nbytes == buffers.nbytes
    assert not host(buffers.storage).any()


def test_views_lie_where_the_spec_says(buffers):
    bits = fill(buffers)
    for layer, layer_spec in enumerate(LAYERS):
        for tensor in layer_spec.tensors:
            start, _ = buffers.spec.locate(layer, tensor.name)
            expected = bits[:, start : start + 4 * tensor.token_elements]
            view = buffers.view(layer, tensor.name)
            assert buffers.xp.may_share_memory(view, buffers.storage)
            np.testing.assert_array_equal(
                host(buffers.xp.ascontiguousarray(view)),
                expected.reshape(NUM_BLOCKS, 4, *tensor.shape),
            )


def test_torch_views_alias_in_both_directions(buffers, device):
    torch = pytest.importorskip("torch")
    tensor, view = buffers.torch_view(0, "v"), buffers.view(0, "v")
    assert tensor.device.type == device
    assert tensor.dtype == getattr(torch, buffers.spec.dtype)
    address = view.ctypes.data if device == "cpu" else view.data.ptr
    assert tensor.data_ptr() == address

    tensor[7, 2, 1, 3] = -1.5
    if device == "cuda":
        torch.cuda.synchronize()
    assert buffers.read_slots(0, "v", [7 * 4 + 2])[0, 1, 3] == -1.5
    assert np.count_nonzero(host(buffers.storage)) == 1

    view[9, 0, 0, 0] = 0x4020 if buffers.spec.dtype == "bfloat16" else 2.5
    if device == "cuda":
        buffers.xp.cuda.Device().synchronize()
    assert tensor[9, 0, 0, 0].item() == 2.5


def test_values_round_trip_through_slots(buffers, device):
    torch = pytest.importorskip("torch")
    values = torch.randn(6, 24).to(getattr(torch, buffers.spec.dtype))
    slots = [150, 4, 5, 6, 159, 0]
    index = torch.tensor(slots, device=device)
    buffers.torch_view(2, "latent")[index // 4, index % 4] = values.to(device)
    if device == "cuda":
        torch.cuda.synchronize()
    read = buffers.read_slots(2, "latent", slots)
    assert type(read) is np.ndarray
    np.testing.assert_array_equal(read, values.to(getattr(torch, str(read.dtype))).numpy())


@pytest.mark.parametrize("piece_blocks", [3, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_copies_read_all_sources_first(buffers, monkeypatch, seed, piece_blocks):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", piece_blocks * buffers.spec.block_bytes)
    expected = fill(buffers)
    before = expected.copy()
    rng = np.random.default_rng(seed)
    dst = rng.permutation(np.arange(1, NUM_BLOCKS))[: 5 + 3 * seed]
    others = np.setdiff1d(np.arange(NUM_BLOCKS), dst)
    src = rng.choice(others if seed % 2 else NUM_BLOCKS, dst.size)
    expected[dst] = before[src]
    copy_blocks(buffers, src, dst)
    np.testing.assert_array_equal(host(buffers.storage), expected)


def test_gather_and_scatter_are_inverse(buffers):
    bits = fill(buffers)
    ids = [31, 2, 17, 39]
    rows = gather_blocks(buffers, ids)
    np.testing.assert_array_equal(host(rows), bits[ids])

    staging = buffers.xp.zeros((6, buffers.spec.block_elements), dtype=buffers.storage.dtype)
    gather_blocks(buffers, ids, staging[1:5])
    np.testing.assert_array_equal(host(staging)[1:5], bits[ids])
    assert not host(staging)[[0, 5]].any()

    scatter_blocks(buffers, ids[::-1], rows)
    bits[ids[::-1]] = bits[ids]
    np.testing.assert_array_equal(host(buffers.storage), bits)


def test_empty_batches_do_nothing(buffers):
    bits = fill(buffers)
    copy_blocks(buffers, [], [])
    rows = gather_blocks(buffers, [])
    assert rows.shape == (0, buffers.spec.block_elements)
    scatter_blocks(buffers, [], rows)
    np.testing.assert_array_equal(host(buffers.storage), bits)


def test_bad_batches_write_nothing(buffers):
    bits = fill(buffers)
    rows = buffers.xp.zeros((1, buffers.spec.block_elements), dtype=buffers.storage.dtype)
    for refused in (
        lambda: copy_blocks(buffers, [1], [0]),
        lambda: copy_blocks(buffers, [1, 2], [3, 3]),
        lambda: copy_blocks(buffers, [NUM_BLOCKS], [1]),
        lambda: scatter_blocks(buffers, [0], rows),
        lambda: scatter_blocks(buffers, [1, 2], rows),
        lambda: scatter_blocks(buffers, [1], buffers.storage[2:3]),
        lambda: gather_blocks(buffers, [1], buffers.storage[2:3]),
        lambda: gather_blocks(buffers, [1], rows[:, ::2]),
        lambda: gather_blocks(buffers, [-1], rows),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            refused()
    np.testing.assert_array_equal(host(buffers.storage), bits)
    assert not host(rows).any()


def test_a_pool_that_does_not_fit_is_refused(device):
    with pytest.raises(ConfigError, match=f"GiB on {device}"):
        KVBuffers(KVSpec(LAYERS, 4, "float16"), 1 << 42, device=device)


@pytest.mark.gpu
def test_rows_of_the_host_are_refused_on_the_gpu():
    try:
        resolve_device("cuda")
    except ConfigError as error:
        pytest.skip(f"no usable GPU: {error}")
    buffers = KVBuffers(KVSpec(LAYERS, 4, "float16"), NUM_BLOCKS, device="cuda")
    rows = np.zeros((1, buffers.spec.block_elements), np.float16)
    with pytest.raises(ValueError, match=r"needs a cupy\.ndarray"):
        scatter_blocks(buffers, [1], rows)
