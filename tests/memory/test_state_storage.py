"""What compressed checkpoints keep of a state, against torch and plain arithmetic."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raykv.errors import ConfigError
from raykv.memory import state_storage
from raykv.memory.state_spec import StateSpec, StateTensor
from raykv.memory.state_storage import CheckpointFormat

DTYPES = ["float32", "bfloat16", "int8"]
SMALLEST_NORMAL = 2.0**-126
per_example = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)

# Tensors that lie without gap and such that do not, rows of several lengths, others between.
RECURRENT = StateTensor("recurrent", (2, 4, 16), "float32", compressible=True)
ODD = StateTensor("odd", (3, 5), "float32", compressible=True)
CONV = StateTensor("conv", (7, 3), "bfloat16")
PLAIN = StateTensor("plain", (5,), "float32")
SPEC = StateSpec(((CONV, RECURRENT), (RECURRENT, PLAIN), (), (ODD, CONV), (ODD, RECURRENT)))


@pytest.fixture(params=["one piece", "small pieces"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":
        monkeypatch.setattr(state_storage, "_CPU_ELEMENTS", 40)


def array_module_of(device):
    return np if device == "cpu" else sys.modules["cupy"]


def round_trip(xp, spec, dtype, live):
    """Live states ``[n, live_bytes]``, stored and taken back, and what was stored."""
    form = CheckpointFormat(spec, dtype, xp)
    given, kept = xp.asarray(live), np.asarray(live).copy()
    stored = xp.zeros((len(live), form.stored_bytes), "uint8")
    form.compress(given, stored)
    np.testing.assert_array_equal(np.asarray(given), kept, "the live states are only read")
    back = xp.zeros((len(live), form.live_bytes), "uint8")
    form.decompress(stored, back)
    return np.asarray(back), np.asarray(stored)


def tensor_of(spec, live, layer, name):
    offset, tensor = spec.locate(layer, name)
    part = np.ascontiguousarray(live[:, offset : offset + tensor.nbytes])
    return part.view(tensor.storage_dtype).reshape(len(live), *tensor.shape)


def one_tensor(values):
    """A spec of one compressible tensor, and states that hold the values ``[n, *shape]``."""
    values = np.asarray(values, np.float32)
    spec = StateSpec(((StateTensor("t", values.shape[1:], "float32", compressible=True),),))
    live = np.zeros((len(values), spec.slot_bytes), np.uint8)
    live[:, : values[0].nbytes] = values.reshape(len(values), -1).view(np.uint8)
    return spec, live


def through(xp, dtype, values):
    """The values as they come back from a checkpoint."""
    spec, live = one_tensor(values)
    back, _ = round_trip(xp, spec, dtype, live)
    return tensor_of(spec, back, 0, "t")


def random_states(seed, num_states=3):
    live = np.zeros((num_states, SPEC.slot_bytes), np.uint8)
    rng = np.random.default_rng(seed)
    for offset, tensor in SPEC.tensors:
        values = rng.normal(size=(num_states, tensor.elements)).astype(np.float32)
        values *= 10.0 ** rng.integers(-9, 9)
        bits = values.view(np.uint32)
        if tensor.dtype == "bfloat16":
            bits = (bits >> 16).astype(np.uint16)
        live[:, offset : offset + tensor.nbytes] = bits.view(np.uint8)
    return live


# -- all dtypes -----------------------------------------------------------------------------------


@per_example
@given(seed=st.integers(0, 999), dtype=st.sampled_from(DTYPES))
def test_every_tensor_comes_back_in_its_place(device, pieces, seed, dtype):
    live = random_states(seed)
    back, _ = round_trip(array_module_of(device), SPEC, dtype, live)
    for layer, tensors in enumerate(SPEC.layers):
        for tensor in tensors:
            got = tensor_of(SPEC, back, layer, tensor.name)
            want = tensor_of(SPEC, live, layer, tensor.name)
            if dtype == "float32" or not tensor.compressible:
                np.testing.assert_array_equal(got, want)
                continue
            largest = np.abs(want).max(axis=-1, keepdims=True)
            step = largest / 127 * (0.5 + 1e-5) if dtype == "int8" else np.abs(want) / 256
            assert (np.abs(got - want) <= step).all()
            assert (got != want).any(), "it went through fewer bits"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_of_what_is_not_compressed_come_back(device, dtype):
    tensor = StateTensor("t", (37,), "float32")
    spec = StateSpec(((tensor, CONV), (CONV, StateTensor("h", (9,), "float16"))))
    live = np.random.default_rng(0).integers(0, 256, (4, spec.slot_bytes), dtype=np.uint8)
    back, stored = round_trip(array_module_of(device), spec, dtype, live)
    np.testing.assert_array_equal(back, live)
    np.testing.assert_array_equal(stored, live)


def test_float32_stores_every_bit_of_all_of_it(device):
    live = np.random.default_rng(1).integers(0, 256, (3, SPEC.slot_bytes), dtype=np.uint8)
    back, stored = round_trip(array_module_of(device), SPEC, "float32", live)
    np.testing.assert_array_equal(stored, live)
    np.testing.assert_array_equal(back, live)


def test_a_stored_state_takes_a_half_and_about_a_quarter():
    spec, _ = one_tensor(np.zeros((1, 8, 128, 128)))
    live_bytes = 8 * 128 * 128 * 4
    for dtype, stored_bytes in (
        ("float32", live_bytes),
        ("bfloat16", live_bytes // 2),
        ("int8", live_bytes // 4 + 8 * 128 * 4),
    ):
        form = CheckpointFormat(spec, dtype, np)
        assert form.live_bytes == live_bytes
        assert form.stored_bytes == stored_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_states_are_aligned(dtype):
    assert CheckpointFormat(SPEC, dtype, np).stored_bytes % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stored_zero_state_is_a_zero_state(device, dtype):
    form = CheckpointFormat(SPEC, dtype, array_module_of(device))
    xp = array_module_of(device)
    live = xp.asarray(random_states(2))
    form.decompress(xp.zeros((3, form.stored_bytes), "uint8"), live)
    for layer, tensors in enumerate(SPEC.layers):
        for tensor in tensors:
            assert not tensor_of(SPEC, np.asarray(live), layer, tensor.name).any()
    values = np.zeros((1, 3, 8))
    assert not through(xp, dtype, values).any()


def test_another_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint_dtype is 'float8'.*bfloat16, int8"):
        CheckpointFormat(SPEC, "float8", np)


# -- bfloat16 -------------------------------------------------------------------------------------


def edge_bits():
    """Bit patterns around every change of rounding, of every exponent, both signs, and others."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    return (high[:, None] | low).reshape(1, -1)


def test_bfloat16_rounds_as_torch_does(device):
    torch = pytest.importorskip("torch")
    values = edge_bits().view(np.float32)
    want = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    got = through(array_module_of(device), "bfloat16", values)
    broken = np.isnan(values)
    assert broken.any()
    assert not broken.all()
    np.testing.assert_array_equal(np.isnan(got), broken)
    np.testing.assert_array_equal(got.view(np.uint32)[~broken], want.view(np.uint32)[~broken])


def test_bfloat16_keeps_infinities(device):
    values = np.array([[np.inf, -np.inf, 1.0, -0.0]])
    got = through(array_module_of(device), "bfloat16", values)
    np.testing.assert_array_equal(got, values)
    assert np.signbit(got[0, 3])


def test_bfloat16_twice_is_bfloat16_once(device):
    xp = array_module_of(device)
    once = through(xp, "bfloat16", np.random.default_rng(3).normal(size=(2, 4, 8)))
    np.testing.assert_array_equal(through(xp, "bfloat16", once), once)


# -- int8 -----------------------------------------------------------------------------------------


@per_example
@given(
    rows=st.lists(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6
        ),
        min_size=1,
        max_size=4,
    )
)
def test_int8_is_off_by_at_most_half_a_scale(device, rows):
    values = np.array([rows], np.float32)
    got = through(array_module_of(device), "int8", values).astype(np.float64)
    largest = np.abs(values.astype(np.float64)).max(axis=-1, keepdims=True)
    scales = np.maximum(largest / 127, SMALLEST_NORMAL)
    # Scales and quotients are rounded to float32, which adds a little.
    assert (np.abs(got - values) <= scales * (0.5 + 1e-4)).all()


def test_int8_twice_is_int8_once(device):
    xp = array_module_of(device)
    once = through(xp, "int8", np.random.default_rng(3).normal(size=(2, 400, 8)))
    np.testing.assert_array_equal(through(xp, "int8", once), once)


def test_int8_keeps_signs_and_the_largest_of_each_row(device):
    values = np.array([[[127.0, -1.0, 0.0, 64.0], [-2.54, 0.02, 1.28, 0.0]]], np.float32)
    got = through(array_module_of(device), "int8", values)
    np.testing.assert_allclose(got, values, rtol=1e-6, atol=1e-9)


def test_the_scale_is_the_rows_not_the_tensors(device):
    values = np.array([[[1e-6, -3e-6, 2e-6, 0.0], [1e6, -3e6, 2e6, 0.0]]], np.float32)
    got = through(array_module_of(device), "int8", values)
    np.testing.assert_allclose(got, values, rtol=0.02)


def test_a_row_with_an_infinity_or_nan_comes_back_as_nans(device):
    values = np.ones((1, 6, 5), np.float32)
    values[0, 0, 2] = np.nan
    values[0, 2, 4] = np.inf
    values[0, 3] = -np.inf
    values[0, 5, :2] = np.nan, np.inf
    got = through(array_module_of(device), "int8", values)
    assert np.isnan(got[0, [0, 2, 3, 5]]).all()
    np.testing.assert_array_equal(got[0, [1, 4]], values[0, [1, 4]])


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-36, 3.4e38, np.finfo(np.float32).max])
def test_rows_of_extreme_magnitudes_stay_finite(device, largest):
    values = np.array([[[largest, -largest, largest / 3, 0.0]]], np.float32)
    got = through(array_module_of(device), "int8", values)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, values, rtol=0.02, atol=SMALLEST_NORMAL / 2)
