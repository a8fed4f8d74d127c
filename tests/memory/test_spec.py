"""Sizes, offsets and refusals of the KV layout."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.errors import ConfigError
from raykv.memory.spec import KVSpec, LayerSpec, TensorSpec

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def layer_specs(draw):
    shapes = draw(st.lists(SHAPES, max_size=3))
    return LayerSpec(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))


@st.composite
def kv_specs(draw):
    layers = draw(
        st.lists(layer_specs(), min_size=1, max_size=4).filter(
            lambda layers: any(layer.tensors for layer in layers)
        )
    )
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    return KVSpec(tuple(layers), draw(st.integers(1, 7)), dtype)


def test_smollm2_keeps_46080_bytes_a_token():
    spec = KVSpec.uniform(30, 3, 64, 16, "float32")
    assert spec.num_layers == 30
    assert spec.itemsize == 4
    assert spec.token_bytes == 46_080
    assert spec.block_elements == 30 * 2 * 16 * 3 * 64
    assert spec.block_bytes == 16 * 46_080


@pytest.mark.parametrize(
    ("dtype", "itemsize", "stored"),
    [("float32", 4, "float32"), ("float16", 2, "float16"), ("bfloat16", 2, "uint16")],
)
def test_dtypes(dtype, itemsize, stored):
    spec = KVSpec.uniform(2, 3, 5, 4, dtype)
    assert spec.itemsize == itemsize
    assert spec.storage_dtype == stored
    assert spec.token_bytes == 2 * 2 * 3 * 5 * itemsize


def test_layers_that_differ_lie_one_after_the_other():
    layers = (LayerSpec.mla(512, 64), LayerSpec(()), LayerSpec.attention(2, 8))
    spec = KVSpec(layers, 16, "bfloat16")
    assert spec.token_elements == 512 + 64 + 2 * 2 * 8
    assert spec.offsets == ((0, 512 * 16), (), (576 * 16, 576 * 16 + 16 * 16))
    assert spec.locate(0, "rope") == (512 * 16, TensorSpec("rope", (64,)))
    assert spec.locate(2, "v") == (576 * 16 + 16 * 16, TensorSpec("v", (2, 8)))


@given(kv_specs())
def test_offsets_tile_the_block_without_gaps(spec):
    position = 0
    for layer, layer_spec in enumerate(spec.layers):
        for tensor in layer_spec.tensors:
            size = spec.block_size
            for dim in tensor.shape:
                size *= dim
            assert spec.locate(layer, tensor.name) == (position, tensor)
            position += size
    assert position == spec.block_elements
    assert spec.block_bytes == position * spec.itemsize


@given(kv_specs())
def test_specs_pickle_and_hash_by_value_even_after_use(spec):
    assert spec.offsets is spec.offsets
    copy = pickle.loads(pickle.dumps(spec))  # noqa: S301 - our own bytes
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert copy.offsets == spec.offsets


def test_specs_that_differ_are_unequal():
    base = KVSpec.uniform(2, 3, 4, 16, "float16")
    others = [
        KVSpec.uniform(3, 3, 4, 16, "float16"),
        KVSpec.uniform(2, 4, 3, 16, "float16"),
        KVSpec.uniform(2, 3, 4, 8, "float16"),
        KVSpec.uniform(2, 3, 4, 16, "bfloat16"),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TensorSpec("", (1,)), "no name"),
        (lambda: TensorSpec("k", ()), r"'k' has shape \(\)"),
        (lambda: TensorSpec("k", [2, 3]), r"\[2, 3\], which is not a tuple"),
        (lambda: TensorSpec("k", (2, 0)), "dimension 1 of tensor 'k'.* is 0"),
        (lambda: TensorSpec("k", (2, -1)), "is -1"),
        (lambda: TensorSpec("k", (2.0,)), "is 2.0"),
        (lambda: TensorSpec("k", (True,)), "is True"),
        (lambda: LayerSpec((TensorSpec("k", (1,)), TensorSpec("k", (2,)))), r"\['k', 'k'\]"),
        (lambda: LayerSpec([TensorSpec("k", (1,))]), "not a tuple"),
        (lambda: LayerSpec.attention(0, 64), "num_kv_heads is 0"),
        (lambda: LayerSpec.attention(3, 0), "head_dim is 0"),
        (lambda: LayerSpec.mla(0, 64), "kv_lora_rank is 0"),
        (lambda: LayerSpec.mla(512, 0), "rope_dim is 0"),
        (lambda: KVSpec([LayerSpec.attention(1, 1)], 16, "float32"), "not a tuple"),
        (lambda: KVSpec((), 16, "float32"), "none of the 0 layers"),
        (lambda: KVSpec((LayerSpec(()),) * 3, 16, "float32"), "none of the 3 layers"),
        (lambda: KVSpec.uniform(0, 3, 64, 16, "float32"), "num_layers is 0"),
        (lambda: KVSpec.uniform(2, 3, 64, 0, "float32"), "block_size is 0"),
        (lambda: KVSpec.uniform(2, 3, 64, 16, "float64"), "float64.*float32, float16, bfloat16"),
    ],
)
def test_bad_sizes_are_refused_with_the_number(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("layer", "name", "message"),
    [
        (-1, "k", r"layer -1 is not in \[0, 2\)"),
        (2, "k", r"layer 2 is not in \[0, 2\)"),
        (1, "q", r"no tensor 'q', only \['k', 'v'\]"),
    ],
)
def test_unknown_tensors_are_refused(layer, name, message):
    with pytest.raises(ValueError, match=message):
        KVSpec.uniform(2, 1, 1, 1, "float32").locate(layer, name)
