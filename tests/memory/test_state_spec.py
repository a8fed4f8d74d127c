"""Sizes, places and refusals of the layout of states."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.errors import ConfigError
from raykv.memory.state_spec import StateSpec, StateTensor

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def layers_of_state(draw):
    tensors = []
    for number in range(draw(st.integers(0, 3))):
        compressible = draw(st.booleans())
        dtype = "float32"
        if not compressible:
            dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
        tensors.append(StateTensor(f"t{number}", draw(SHAPES), dtype, compressible))
    return tuple(tensors)


state_specs = st.lists(layers_of_state(), min_size=1, max_size=4).filter(any).map(tuple)


def test_a_hybrid_models_layers():
    conv = StateTensor("conv", (96, 4), "bfloat16")
    recurrent = StateTensor("recurrent", (2, 16, 16), "float32", compressible=True)
    spec = StateSpec(((conv, recurrent), (), (conv, recurrent)))
    assert spec.num_layers == 3
    assert conv.nbytes == 768
    assert recurrent.nbytes == 2048
    assert spec.slot_bytes == 2 * (768 + 2048)
    assert spec.locate(0, "recurrent") == (0, recurrent)
    assert spec.locate(2, "recurrent") == (2048, recurrent)
    assert spec.locate(0, "conv") == (4096, conv)
    assert spec.locate(2, "conv") == (4864, conv)


@pytest.mark.parametrize(
    ("dtype", "nbytes", "stored"),
    [("float32", 24, "float32"), ("float16", 12, "float16"), ("bfloat16", 12, "uint16")],
)
def test_dtypes(dtype, nbytes, stored):
    tensor = StateTensor("t", (2, 3), dtype)
    assert tensor.elements == 6
    assert tensor.nbytes == nbytes
    assert tensor.storage_dtype == stored


@given(state_specs)
def test_tensors_lie_aligned_without_overlap_compressible_ones_first(layers):
    spec = StateSpec(layers)
    end, carried = 0, False
    for offset, tensor in spec.tensors:
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + tensor.nbytes
        assert not (carried and tensor.compressible)
        carried = not tensor.compressible
    assert spec.slot_bytes % 64 == 0
    assert end <= spec.slot_bytes < end + 64
    expected = [spec.locate(at, each.name) for at, layer in enumerate(layers) for each in layer]
    assert sorted(expected, key=lambda place: place[0]) == list(spec.tensors)
    assert [tensor for _, tensor in expected] == [each for layer in layers for each in layer]


@given(state_specs)
def test_specs_pickle_and_hash_by_value_even_after_use(layers):
    spec = StateSpec(layers)
    assert spec.tensors is spec.tensors
    assert spec.slot_bytes > 0
    copy = pickle.loads(pickle.dumps(spec))  # noqa: S301 - our own bytes
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert copy.tensors == spec.tensors


def test_specs_that_differ_are_unequal():
    tensors = [
        StateTensor("a", (2, 3), "float32"),
        StateTensor("b", (2, 3), "float32"),
        StateTensor("a", (3, 2), "float32"),
        StateTensor("a", (2, 3), "float16"),
        StateTensor("a", (2, 3), "float32", compressible=True),
    ]
    specs = {StateSpec(((tensor,),)) for tensor in tensors} | {StateSpec(((), (tensors[0],)))}
    assert len(specs) == 6


ONE = StateTensor("a", (1,), "float32")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StateTensor("", (1,), "float32"), "no name.*'recurrent'"),
        (lambda: StateTensor("a", (), "float32"), r"'a' has shape \(\).*key_dim"),
        (lambda: StateTensor("a", [2, 3], "float32"), r"\[2, 3\], which is not a tuple"),
        (lambda: StateTensor("a", (2, 0), "float32"), "dimension 1 of tensor 'a'.* is 0"),
        (lambda: StateTensor("a", (1,), "float64"), "float64.*float32, float16, bfloat16"),
        (lambda: StateTensor("a", (1,), "bfloat16", compressible=True), "bfloat16 and compress"),
        (lambda: StateSpec(()), "none of the 0 layers"),
        (lambda: StateSpec(((), ())), "none of the 2 layers"),
        (lambda: StateSpec([(ONE,)]), r"layers is \[.*not a tuple"),
        (lambda: StateSpec(((), [ONE])), r"layer 1 is \[.*not a tuple"),
        (lambda: StateSpec(((ONE, ONE),)), r"\['a', 'a'\]"),
    ],
)
def test_impossible_layouts_are_refused_with_the_number(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("layer", "name", "message"),
    [
        (-1, "a", r"layer -1 is not in \[0, 2\)"),
        (2, "a", r"layer 2 is not in \[0, 2\)"),
        (1, "a", r"layer 1 has no tensor 'a', only \[\]"),
        (0, "b", r"no tensor 'b', only \['a'\]"),
    ],
)
def test_unknown_tensors_are_refused(layer, name, message):
    with pytest.raises(ValueError, match=message):
        StateSpec(((ONE,), ())).locate(layer, name)
