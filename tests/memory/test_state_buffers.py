"""Addresses, views, aliasing and refusals of the memory for states."""

import gc
import weakref

import numpy as np
import pytest

from raykv.errors import ConfigError
from raykv.memory import room
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec, StateTensor

NUM_SLOTS, NUM_ROWS = 6, 5
DTYPES = ["float32", "bfloat16", "int8"]
LAYERS = (
    (StateTensor("conv", (6, 3), "bfloat16"), StateTensor("s", (2, 4, 8), "float32", True)),
    (),
    (StateTensor("s", (2, 4, 8), "float32", True), StateTensor("half", (5,), "float16")),
)
SPEC = StateSpec(LAYERS)


def made(device="cpu", dtype="float32", spec=SPEC):
    return StateBuffers(spec, NUM_SLOTS, num_rows=NUM_ROWS, checkpoint_dtype=dtype, device=device)


def host(array):
    return np.array(array)


# -- addresses and sizes --------------------------------------------------------------------------


def test_live_states_lie_in_slots_with_float32(device):
    buffers = made(device)
    assert (buffers.live_base, buffers.num_rows) == (0, 0)
    assert buffers.live_address(3, 2) == 3
    assert buffers.live is buffers.slots
    assert buffers.live_bytes == buffers.checkpoint_bytes == SPEC.slot_bytes
    assert buffers.nbytes == NUM_SLOTS * SPEC.slot_bytes
    assert buffers.view(0, "s").shape == (NUM_SLOTS, 2, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_live_states_lie_apart_with_fewer_bits(device, dtype):
    buffers = made(device, dtype)
    assert (buffers.live_base, buffers.num_rows) == (NUM_SLOTS, NUM_ROWS)
    assert buffers.live_address(3, 2) == NUM_SLOTS + 2
    assert buffers.live_bytes == SPEC.slot_bytes
    assert buffers.checkpoint_bytes < SPEC.slot_bytes
    assert buffers.nbytes == NUM_SLOTS * buffers.checkpoint_bytes + NUM_ROWS * buffers.live_bytes
    assert buffers.view(0, "s").shape == (NUM_ROWS, 2, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_a_state_lie_together_and_start_as_zeros(device, dtype):
    buffers = made(device, dtype)
    for part, bytes_each in (
        (buffers.slots, buffers.checkpoint_bytes),
        (buffers.live, buffers.live_bytes),
    ):
        assert part.flags.c_contiguous
        assert part.shape[1] == bytes_each
        assert bytes_each % 64 == 0
        assert not host(part).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_is_one_tensor_of_every_live_state(device, dtype):
    buffers = made(device, dtype)
    for layer, tensors in enumerate(LAYERS):
        for tensor in tensors:
            buffers.live[...] = 0
            view = buffers.view(layer, tensor.name)
            assert view.dtype == tensor.storage_dtype
            assert isinstance(view, buffers.xp.ndarray)
            view[2] = 1
            offset, _ = SPEC.locate(layer, tensor.name)
            touched = np.flatnonzero(host(buffers.live).any(axis=0))
            assert offset <= touched[0]
            assert touched[-1] < offset + tensor.nbytes
            assert host(buffers.live).any(axis=1).nonzero()[0].tolist() == [2]
            assert np.count_nonzero(host(view)) == tensor.elements


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_torch_view_is_the_same_memory_in_the_real_dtype(dtype):
    torch = pytest.importorskip("torch")
    buffers = made("cpu", dtype)
    for layer, tensors in enumerate(LAYERS):
        for tensor in tensors:
            view, array = buffers.torch_view(layer, tensor.name), buffers.view(layer, tensor.name)
            assert view.dtype == getattr(torch, tensor.dtype)
            assert tuple(view.shape) == array.shape
            assert view.data_ptr() == array.ctypes.data
            view[3] = 1.5
            assert (array[3] == (0x3FC0 if tensor.dtype == "bfloat16" else 1.5)).all()


def test_a_torch_view_keeps_the_memory_alive():
    pytest.importorskip("torch")
    buffers = made()
    view = buffers.torch_view(0, "s")
    view[1] = 3
    storage = weakref.ref(buffers.slots.base)
    del buffers
    gc.collect()
    assert (view[1] == 3).all()
    del view
    gc.collect()
    assert storage() is None


def test_unknown_tensors_are_refused(device):
    buffers = made(device)
    for read in (buffers.view, buffers.torch_view):
        with pytest.raises(ValueError, match=r"layer 3 is not in \[0, 3\)"):
            read(3, "s")
        with pytest.raises(ValueError, match="layer 1 has no tensor 's'"):
            read(1, "s")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 0, -3])
def test_a_slot_beside_padding_is_needed(num_slots):
    with pytest.raises(ConfigError, match=f"num_slots is {num_slots}.*at least 2"):
        StateBuffers(SPEC, num_slots, device="cpu")


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("num_rows", [1, 0])
def test_a_row_beside_padding_is_needed_where_live_states_lie_apart(dtype, num_rows):
    with pytest.raises(ConfigError, match=f"num_rows is {num_rows}.*{dtype}.*at least 2"):
        StateBuffers(SPEC, 4, num_rows=num_rows, checkpoint_dtype=dtype, device="cpu")
    assert StateBuffers(SPEC, 4, num_rows=num_rows, device="cpu").num_rows == 0


def test_an_unknown_checkpoint_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint_dtype is 'int4'.*float32, bfloat16, int8"):
        StateBuffers(SPEC, 4, num_rows=4, checkpoint_dtype="int4", device="cpu")


def test_states_that_do_not_fit_in_host_memory_are_refused_with_the_numbers(monkeypatch):
    buffers = made("cpu", "bfloat16")
    monkeypatch.setattr(room, "available_bytes", lambda: buffers.nbytes)
    assert made("cpu", "bfloat16").nbytes == buffers.nbytes
    monkeypatch.setattr(room, "available_bytes", lambda: buffers.nbytes - 1)
    need = (
        rf"6 slots of {buffers.checkpoint_bytes} bytes and 5 live states of"
        rf" {buffers.live_bytes} bytes need 0.00 GiB on cpu, but 0.00 GiB are available: .*slots"
    )
    with pytest.raises(ConfigError, match=need):
        made("cpu", "bfloat16")
    monkeypatch.setattr(room, "available_bytes", lambda: 3 << 30)
    num_slots = (3 << 30) // SPEC.slot_bytes + 1
    with pytest.raises(ConfigError, match=rf"{num_slots} slots of {SPEC.slot_bytes} bytes need 3"):
        StateBuffers(SPEC, num_slots, device="cpu")


def test_states_that_do_not_fit_on_the_gpu_are_refused(fake_cupy):
    with pytest.raises(ConfigError, match=r"GiB on cuda, but 1.00 GiB are available"):
        StateBuffers(SPEC, (1 << 30) // SPEC.slot_bytes + 1, device="cuda")


# -- released and taken again ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_released_memory_is_gone_and_comes_back_as_zeros(device, dtype):
    buffers = made(device, dtype)
    buffers.slots[...] = 3
    buffers.live[...] = 3
    parts = [weakref.ref(part.base) for part in (buffers.slots, buffers.live)]
    num_bytes = buffers.nbytes
    assert not buffers.is_released
    for _ in range(2):
        buffers.release()
        assert [part() for part in parts] == [None, None]
        assert buffers.is_released
        assert buffers.nbytes == 0
        for use in (lambda: buffers.view(0, "s"), lambda: buffers.copy([1], [2])):
            with pytest.raises(ValueError, match=r"state memory is released.*restore"):
                use()
    buffers.restore()
    assert not buffers.is_released
    assert buffers.nbytes == num_bytes
    assert not host(buffers.slots).any()
    assert not host(buffers.live).any()
    assert (buffers.live is buffers.slots) == (dtype == "float32")
    buffers.view(0, "s")[2] = 5
    buffers.restore()
    assert (host(buffers.view(0, "s"))[2] == 5).all(), "a second time changes nothing"


def test_what_does_not_fit_any_more_stays_released(monkeypatch):
    buffers = made("cpu", "int8")
    buffers.release()
    with monkeypatch.context() as patch:
        patch.setattr(room, "available_bytes", lambda: 10)
        with pytest.raises(ConfigError, match="6 slots"):
            buffers.restore()
    assert buffers.is_released
    buffers.restore()
    assert not buffers.is_released
