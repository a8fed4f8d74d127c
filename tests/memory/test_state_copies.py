"""Copies of states against a loop that does one pair at a time, and their refusals."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.memory import rows as rows_module
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec, StateTensor
from raykv.memory.state_storage import CheckpointFormat

NUM_SLOTS, NUM_ROWS = 6, 5
DTYPES = ["float32", "bfloat16", "int8"]
LAYERS = (
    (StateTensor("conv", (6, 3), "bfloat16"), StateTensor("s", (2, 4, 8), "float32", True)),
    (),
    (StateTensor("s", (2, 4, 8), "float32", True), StateTensor("half", (5,), "float16")),
)
SPEC = StateSpec(LAYERS)
per_example = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)


def made(device="cpu", dtype="float32", spec=SPEC):
    return StateBuffers(spec, NUM_SLOTS, num_rows=NUM_ROWS, checkpoint_dtype=dtype, device=device)


def host(array):
    return np.array(array)


def filled(device, dtype):
    """Buffers whose live states are random, and their checkpoints those of other random states."""
    buffers = made(device, dtype)
    rng = np.random.default_rng(0)

    def random_states(count):
        states = np.zeros((count, buffers.live_bytes), np.uint8)
        for offset, tensor in SPEC.tensors:
            values = rng.normal(size=(count, tensor.elements)).astype(np.float32)
            if tensor.dtype != "float32":
                values = values.astype(np.float16)
            states[:, offset : offset + tensor.nbytes] = values.view(np.uint8)
        return states

    live = random_states(len(buffers.live))
    buffers.live[...] = buffers.xp.asarray(live)
    if dtype != "float32":
        stored = np.zeros(buffers.slots.shape, np.uint8)
        CheckpointFormat(SPEC, dtype, np).compress(random_states(NUM_SLOTS), stored)
        buffers.slots[...] = buffers.xp.asarray(stored)
    return buffers


def contents(buffers):
    """The bytes of every address."""
    states = list(host(buffers.slots))
    return states if buffers.checkpoint_dtype == "float32" else states + list(host(buffers.live))


def expected_after(buffers, sources, targets):
    """What a loop over the pairs makes of a snapshot."""
    before, form = contents(buffers), CheckpointFormat(SPEC, buffers.checkpoint_dtype, np)
    after = [state.copy() for state in before]
    for source, target in zip(sources, targets, strict=True):
        to_live, from_live = target >= NUM_SLOTS, source >= NUM_SLOTS
        if from_live == to_live:
            after[target] = before[source].copy()
        elif to_live:
            form.decompress(before[source][None], after[target][None])
        else:
            form.compress(before[source][None], after[target][None])
    return after


def assert_holds(buffers, expected):
    for address, (got, want) in enumerate(zip(contents(buffers), expected, strict=True)):
        np.testing.assert_array_equal(got, want, f"address {address}")


@pytest.fixture(params=["one piece", "small pieces"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":
        monkeypatch.setattr(rows_module, "PIECE_BYTES", 2 * SPEC.slot_bytes)


# -- copies ---------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    dtype = draw(st.sampled_from(DTYPES))
    limit = NUM_SLOTS + (0 if dtype == "float32" else NUM_ROWS)
    allowed = [address for address in range(1, limit) if address != NUM_SLOTS]
    targets = draw(st.lists(st.sampled_from(allowed), unique=True))
    num = len(targets)
    sources = draw(st.lists(st.integers(0, limit - 1), min_size=num, max_size=num))
    return dtype, sources, targets


@per_example
@given(batches())
def test_copies_read_all_sources_first(device, pieces, batch):
    dtype, sources, targets = batch
    buffers = filled(device, dtype)
    expected = expected_after(buffers, sources, targets)
    buffers.copy(sources, targets)
    assert_holds(buffers, expected)


SLOTS_ONLY = {
    "swap": ([1, 2], [2, 1]),
    "chain": ([1, 2, 3], [2, 3, 4]),
    "chain back": ([3, 2, 1], [4, 3, 2]),
    "cycle": ([1, 2, 3], [2, 3, 1]),
    "fan": ([5, 5, 5], [5, 3, 4]),
    "padding": ([0, 0], [4, 2]),
    "apart": (np.array([1, 2, 1], np.int32), [4, 5, 3]),
    "itself": ([3], [3]),
    "empty": ([], []),
}
LIVE_TOO = {
    "swap with a live one": ([1, 8], [8, 1]),
    "chain over both": ([7, 1, 8], [1, 8, 2]),
    "save and refill": ([7, 2], [1, 7]),
    "promote and go on": ([7, 0], [1, 7]),
    "all four ways": ([1, 2, 7, 8], [3, 9, 4, 10]),
    "from the padding row": ([NUM_SLOTS, NUM_SLOTS], [2, 9]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SLOTS_ONLY)
def test_copies_by_example(device, pieces, dtype, name):
    buffers = filled(device, dtype)
    expected = expected_after(buffers, *SLOTS_ONLY[name])
    buffers.copy(*SLOTS_ONLY[name])
    assert_holds(buffers, expected)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", LIVE_TOO)
def test_copies_from_and_to_live_states_by_example(device, pieces, dtype, name):
    buffers = filled(device, dtype)
    expected = expected_after(buffers, *LIVE_TOO[name])
    buffers.copy(*LIVE_TOO[name])
    assert_holds(buffers, expected)


@pytest.mark.parametrize("tensor_dtype", ["float32", "float16", "bfloat16"])
def test_a_float32_checkpoint_gives_every_bit_back(device, tensor_dtype):
    """Through a slot and back, with bits of every kind, NaNs among them."""
    compressible = tensor_dtype == "float32"
    spec = StateSpec(((StateTensor("t", (3, 7), tensor_dtype, compressible),),))
    buffers = made(device, spec=spec)
    view = buffers.view(0, "t")
    bits = np.random.default_rng(1).integers(0, 256, view[1].nbytes, dtype=np.uint8)
    view[1] = buffers.xp.asarray(bits.view(view.dtype).reshape(3, 7))
    buffers.copy([1], [2])
    buffers.copy([0], [1])
    assert not host(view)[1].any()
    buffers.copy([2], [1])
    np.testing.assert_array_equal(host(view)[1].view(np.uint8).reshape(-1), bits)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_compressed_checkpoint_gives_nearly_the_state_back(device, dtype):
    buffers = filled(device, dtype)
    state, conv = buffers.view(2, "s"), buffers.view(0, "conv")
    want, want_conv = host(state)[2], host(conv)[2]
    buffers.copy([NUM_SLOTS + 2], [4])
    buffers.copy([4], [NUM_SLOTS + 3])
    got = host(state)[3]
    assert np.abs(got - want).max() < 0.02
    assert (got != want).any(), "it went through fewer bits"
    np.testing.assert_array_equal(host(conv)[3], want_conv)
    np.testing.assert_array_equal(host(state)[2], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copying_padding_clears_a_state(device, dtype):
    buffers = filled(device, dtype)
    buffers.slots[0] = 0
    target = buffers.live_address(3, 2)
    buffers.copy([0], [target])
    for layer, name in ((0, "conv"), (0, "s"), (2, "half")):
        views = host(buffers.view(layer, name))
        assert not views[target - buffers.live_base].any()
        assert views[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([1, 11], [2, 3], r"sources spans 1 to 11, but must lie in \[0, (6|11)\)"),
        ([-1], [2], "sources spans -1"),
        ([1], [11], "targets spans 11 to 11"),
        ([1, 2], [3], "2 sources do not pair with 1 targets"),
        ([1, 2], [3, 0], "targets holds 0, the padding address"),
        ([0], [0], "padding"),
        ([1, 2, 3], [4, 5, 4], "address 4 2 times"),
        ([[1]], [[2]], r"shape \(1, 1\)"),
        ([1.5], [2], "dtype float64"),
    ],
)
def test_refused_batches_change_nothing(device, dtype, sources, targets, message):
    buffers = filled(device, dtype)
    before = contents(buffers)
    with pytest.raises(ValueError, match=message):
        buffers.copy(sources, targets)
    assert_holds(buffers, before)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_padding_row_is_never_written(device, dtype):
    buffers = filled(device, dtype)
    before = contents(buffers)
    for source in (2, NUM_SLOTS + 2, NUM_SLOTS):
        with pytest.raises(ValueError, match="targets holds 6, the padding address"):
            buffers.copy([1, source], [3, NUM_SLOTS])
        assert_holds(buffers, before)


def test_a_batch_that_overlaps_nothing_writes_nothing_when_scratch_memory_fails(fake_cupy):
    def out_of_memory(*_):
        raise MemoryError

    buffers = filled("cuda", "float32")
    before = contents(buffers)
    fake_cupy.empty = out_of_memory
    for sources, targets in (([1, 2], [3, 4]), ([1, 2], [2, 3])):
        with pytest.raises(MemoryError):
            buffers.copy(sources, targets)
        assert_holds(buffers, before)


def test_scratch_memory_is_bounded_by_a_piece(fake_cupy, monkeypatch):
    buffers = filled("cuda", "bfloat16")
    expected = expected_after(buffers, [7, 8, 9], [1, 2, 3])
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 2 * buffers.live_bytes)
    shapes = []
    empty = fake_cupy.empty
    fake_cupy.empty = lambda shape, dtype: shapes.append(shape) or empty(shape, dtype)
    buffers.copy([7, 8, 9], [1, 2, 3])
    assert shapes == [(2, buffers.live_bytes), (1, buffers.live_bytes)]
    assert_holds(buffers, expected)
