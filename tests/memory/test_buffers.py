"""Layout, views, aliasing and refusals of the KV memory."""

import gc
import weakref

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.memory import room
from raykv.memory.buffers import KVBuffers
from raykv.memory.spec import KVSpec, LayerSpec, TensorSpec

DTYPES = ["float32", "float16", "bfloat16"]
MIXED = (
    LayerSpec.attention(2, 3),
    LayerSpec.mla(5, 2),
    LayerSpec(()),
    LayerSpec((TensorSpec("state", (2, 1, 3)),)),
)


def number_elements(buffers):
    """Give each element of the storage its own bits, modulo the width of the dtype."""
    bits = np.asarray(buffers.storage).view(f"u{buffers.spec.itemsize}")
    bits[...] = np.arange(bits.size, dtype=np.uint32).astype(bits.dtype).reshape(bits.shape)
    return bits


def test_size_and_storage(device):
    spec = KVSpec(MIXED, 4, "float16")
    buffers = KVBuffers(spec, 5, device=device)
    assert buffers.device == device
    assert buffers.storage.shape == (5, spec.block_elements)
    assert buffers.storage.flags.c_contiguous
    assert buffers.nbytes == buffers.storage.nbytes == 5 * 4 * (12 + 7 + 6) * 2


@pytest.mark.parametrize("num_blocks", [3, 5000])
def test_memory_on_the_cpu_starts_on_a_page(num_blocks):
    buffers = KVBuffers(KVSpec(MIXED, 4, "float16"), num_blocks, device="cpu")
    assert buffers.storage.ctypes.data % 4096 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_starts_as_zeros(device, dtype):
    buffers = KVBuffers(KVSpec(MIXED, 4, dtype), 3, device=device)
    assert buffers.storage.dtype == buffers.spec.storage_dtype
    assert not np.asarray(buffers.storage).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_uniform_model_is_the_six_dimensional_array(device, dtype):
    buffers = KVBuffers(KVSpec.uniform(3, 2, 5, 4, dtype), 6, device=device)
    six = number_elements(buffers).reshape(6, 3, 2, 4, 2, 5)
    for layer in range(3):
        for index, name in enumerate("kv"):
            view = np.asarray(buffers.view(layer, name)).view(six.dtype)
            np.testing.assert_array_equal(view, six[:, layer, index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_mixed_layers_tile_the_storage(device, dtype):
    buffers = KVBuffers(KVSpec(MIXED, 4, dtype), 3, device=device)
    mark = 0
    for layer, layer_spec in enumerate(MIXED):
        for tensor in layer_spec.tensors:
            view = buffers.view(layer, tensor.name)
            assert view.shape == (3, 4, *tensor.shape)
            assert np.shares_memory(view, buffers.storage)
            assert not np.asarray(view).any(), "overlaps a tensor written before"
            mark += 1
            view[...] = mark
    assert np.asarray(buffers.storage).all(), "an element belongs to no tensor"


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_views_alias_in_both_directions(device, dtype):
    torch = pytest.importorskip("torch")
    buffers = KVBuffers(KVSpec(MIXED, 4, dtype), 3, device=device)
    view, tensor = buffers.view(0, "v"), buffers.torch_view(0, "v")
    assert tensor.dtype == getattr(torch, dtype)
    assert tuple(tensor.shape) == view.shape == (3, 4, 2, 3)
    assert tuple(tensor.stride()) == tuple(s // view.itemsize for s in view.strides)

    tensor[2, 1, 0, 2] = -1.5
    assert buffers.read_slots(0, "v", [2 * 4 + 1])[0, 0, 2] == -1.5
    assert np.count_nonzero(np.asarray(buffers.storage)) == 1

    view[1, 3, 1, 0] = 0x4020 if dtype == "bfloat16" else 2.5
    assert tensor[1, 3, 1, 0].item() == 2.5
    assert tensor.count_nonzero().item() == 2


def test_a_torch_view_keeps_the_memory_alive(device):
    pytest.importorskip("torch")
    buffers = KVBuffers(KVSpec.uniform(1, 1, 8, 4, "float32"), 3, device=device)
    storage = weakref.ref(buffers.storage.base)  # which owns the memory
    tensor = buffers.torch_view(0, "k")
    del buffers
    gc.collect()
    assert storage() is not None
    del tensor
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_round_trip_through_slots(device, dtype):
    torch = pytest.importorskip("torch")
    spec = KVSpec.uniform(2, 2, 3, 4, dtype)
    buffers = KVBuffers(spec, 6, device=device)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(9, 2, 3, generator=generator).to(getattr(torch, dtype))
    slots = [21, 4, 5, 6, 7, 12, 13, 0, 23]
    rows = buffers.torch_view(1, "v")
    for slot, value in zip(slots, values, strict=True):
        rows[slot // 4, slot % 4] = value

    read = buffers.read_slots(1, "v", slots)
    assert type(read) is np.ndarray
    assert read.dtype == (np.float32 if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(read, values.to(getattr(torch, str(read.dtype))).numpy())
    assert not buffers.read_slots(1, "k", slots).any()
    assert not buffers.read_slots(0, "v", slots).any()


def test_bfloat16_bits_decode_exactly(device):
    buffers = KVBuffers(
        KVSpec((LayerSpec((TensorSpec("x", (1,)),)),), 8, "bfloat16"), 2, device=device
    )
    bits = [0x0000, 0x8000, 0x3F80, 0xC000, 0x0001, 0x7F7F, 0x7F80, 0x7FC0]
    buffers.storage[1] = bits
    read = buffers.read_slots(0, "x", range(8, 16))[:, 0]
    expected = [0.0, -0.0, 1.0, -2.0, 2.0**-133, 2.0**128 - 2.0**120, np.inf, np.nan]
    np.testing.assert_array_equal(read, np.array(expected, np.float32))
    assert np.signbit(read[1])


def test_reading_slots_copies(device):
    buffers = KVBuffers(KVSpec.uniform(1, 1, 2, 4, "float32"), 3, device=device)
    buffers.read_slots(0, "k", [4])[...] = 9
    assert not np.asarray(buffers.storage).any()
    assert buffers.read_slots(0, "k", []).shape == (0, 1, 2)
    assert buffers.read_slots(0, "k", [5, 5]).shape == (2, 1, 2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, 12], r"spans 3 to 12, but must lie in \[0, 12\)"),
        ([-1], r"spans -1 to -1"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([1.0], "dtype float64"),
        ([True], "dtype bool"),
        ([1 << 70], "dtype object"),
        (np.array([1 << 63], np.uint64), "9223372036854775808"),
    ],
)
def test_bad_slots_are_refused(device, slots, message):
    buffers = KVBuffers(KVSpec.uniform(1, 1, 2, 4, "float32"), 3, device=device)
    with pytest.raises(ValueError, match=message):
        buffers.read_slots(0, "k", slots)


def test_unknown_tensors_are_refused(device):
    buffers = KVBuffers(KVSpec.uniform(1, 1, 2, 4, "float32"), 3, device=device)
    for read in (buffers.view, buffers.torch_view, lambda *at: buffers.read_slots(*at, [0])):
        with pytest.raises(ValueError, match="layer 1 is not in"):
            read(1, "k")
        with pytest.raises(ValueError, match="no tensor 'q'"):
            read(0, "q")


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_a_pool_needs_a_block_beside_padding(num_blocks):
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}.*at least 2"):
        KVBuffers(KVSpec.uniform(1, 1, 2, 4, "float32"), num_blocks, device="cpu")


def test_a_pool_that_does_not_fit_in_host_memory_is_refused(monkeypatch, tmp_path):
    spec = KVSpec.uniform(1, 1, 8, 16, "float32")  # 1 KiB a block
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9999999 kB\nMemAvailable:      64 kB\nBuffers: 1 kB\n")
    monkeypatch.setattr(room, "_MEMINFO", meminfo)
    assert KVBuffers(spec, 64, device="cpu").nbytes == 64 << 10
    with pytest.raises(ConfigError, match=r"65 blocks of 1024 bytes.*on cpu.*fewer blocks"):
        KVBuffers(spec, 65, device="cpu")


def test_this_machines_own_memory_is_the_limit():
    spec = KVSpec.uniform(1, 1, 8, 16, "float32")
    if room.available_bytes() is None:
        pytest.skip("this system has no /proc/meminfo")
    with pytest.raises(ConfigError, match="GiB are available"):
        KVBuffers(spec, 1 << 40, device="cpu")


@pytest.mark.parametrize("text", [None, "MemTotal: 1 kB\n"])
def test_an_allocation_that_fails_unforeseen_is_a_config_error(monkeypatch, tmp_path, text):
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    monkeypatch.setattr(room, "_MEMINFO", meminfo)
    monkeypatch.setattr(room, "cgroup_room_bytes", lambda: None)
    with pytest.raises(ConfigError, match=r"allocation failed.*free memory"):
        KVBuffers(KVSpec.uniform(1, 1, 8, 16, "float32"), 1 << 46, device="cpu")


def test_a_pool_that_does_not_fit_on_the_gpu_is_refused(fake_cupy):
    spec = KVSpec.uniform(1, 1, 8, 16, "float32")
    assert KVBuffers(spec, 8).device == "cuda"
    with pytest.raises(ConfigError, match=r"1.00 GiB on cuda, but 1.00 GiB are available"):
        KVBuffers(spec, (1 << 20) + 1, device="cuda")


# -- released and taken again ---------------------------------------------------------------------


def test_released_memory_is_gone_and_comes_back_as_zeros():
    buffers = KVBuffers(KVSpec.uniform(2, 2, 4, 4, "float32"), 6, device="cpu")
    storage, num_bytes = weakref.ref(buffers.storage.base), buffers.nbytes
    buffers.storage[:] = 3
    assert not buffers.is_released
    for _ in range(2):
        buffers.release()
        assert storage() is None
        assert buffers.is_released
        assert buffers.nbytes == 0
        with pytest.raises(ValueError, match=r"released.*restore"):
            buffers.view(0, "k")
        with pytest.raises(ValueError, match="released"):
            buffers.read_slots(0, "k", [4])
    buffers.restore()
    assert buffers.nbytes == num_bytes
    assert not buffers.storage.any()
    buffers.view(1, "v")[2] = 5
    buffers.restore()
    assert (buffers.view(1, "v")[2] == 5).all(), "a second time changes nothing"


def test_what_does_not_fit_any_more_stays_released(monkeypatch):
    buffers = KVBuffers(KVSpec.uniform(2, 2, 4, 4, "float32"), 6, device="cpu")
    buffers.release()
    with monkeypatch.context() as patch:
        patch.setattr("raykv.memory.room.available_bytes", lambda: 10)
        with pytest.raises(ConfigError, match="6 blocks"):
            buffers.restore()
    assert buffers.is_released
    buffers.restore()
    assert not buffers.is_released
