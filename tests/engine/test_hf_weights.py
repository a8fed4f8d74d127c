"""A real transformers model whose weights change, go and come back."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from raykv.engine.hf_runner import HFModelRunner
from raykv.engine.weights import PackedTensor, pack
from raykv.errors import RequestError
from raykv.memory.buffers import KVBuffers

from .test_hf_runner import Paged, plain_logits, tokens_of

TOKENS = tokens_of(23, 7)
NAME = "model.layers.1.mlp.up_proj.weight"


def another(model, seed=5):
    """The same model with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture(scope="module")
def newer(tiny_llama):
    return another(tiny_llama)


@pytest.fixture
def runner(tiny_llama):
    return HFModelRunner(copy.deepcopy(tiny_llama), 4)


def logits_of(runner):
    """Of all positions, through the paged cache."""
    paged = Paged.__new__(Paged)
    paged.runner, paged.buffers = runner, KVBuffers(runner.kv_spec, 20, device="cpu")
    runner.bind(paged.buffers)
    paged.block_size, paged.blocks, paged.lengths = 4, {}, {}
    paged.free = list(range(1, 20))
    return paged.step({"x": TOKENS})["x"]


def assert_runs(runner, model):
    np.testing.assert_allclose(logits_of(runner), plain_logits(model, TOKENS), atol=1e-4, rtol=1e-4)


def folder(model, path):
    model.save_pretrained(path)
    return str(path)


def shards(model, path):
    model.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return str(path)


def one_file(model, path):
    path.mkdir()
    save_file(model.state_dict(), path / "step-7.safetensors")
    return str(path / "step-7.safetensors")


def folder_of_files(model, path):
    path.mkdir()
    state = model.state_dict()
    for number, name in enumerate(state):
        save_file({name: state[name]}, path / f"part-{number}.safetensors")
    return str(path)


def tensors(model, path):
    return pack(model.state_dict())


def arrays(model, path):
    return pack({name: tensor.double().numpy() for name, tensor in model.state_dict().items()})


def read_only_arrays(model, path):
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    for array in state.values():
        array.flags.writeable = False
    return pack(state)


def transposed_arrays(model, path):
    return pack({n: np.asfortranarray(t.numpy()) for n, t in model.state_dict().items()})


SOURCES = [
    folder, shards, one_file, folder_of_files, tensors, arrays, read_only_arrays, transposed_arrays
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_new_weights_compute_what_their_model_computes(runner, tiny_llama, newer, tmp_path, source):
    assert_runs(runner, tiny_llama)
    staged = runner.stage(source(newer, tmp_path / "new"))
    assert_runs(runner, tiny_llama)
    staged.apply()
    assert_runs(runner, newer)
    with pytest.raises(AssertionError):
        assert_runs(runner, tiny_llama)


def test_bfloat16_travels_and_is_widened(runner, newer):
    rounded = copy.deepcopy(newer)  # and not its rotary frequencies, which are no weights
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    packed = pack({name: tensor.bfloat16() for name, tensor in rounded.state_dict().items()})
    assert packed[NAME].is_bfloat16
    assert packed[NAME].data.dtype == np.uint16
    runner.stage(packed).apply()
    assert_runs(runner, rounded)


def test_a_model_in_bfloat16_keeps_its_dtype(tiny_llama, newer):
    runner = HFModelRunner(copy.deepcopy(tiny_llama).bfloat16(), 4)
    runner.stage(pack(newer.state_dict())).apply()
    expected = HFModelRunner(copy.deepcopy(newer).bfloat16(), 4)
    np.testing.assert_array_equal(logits_of(runner), logits_of(expected))


def test_the_callers_arrays_and_files_are_its_own(runner, newer, tmp_path):
    state = {name: tensor.numpy().copy() for name, tensor in newer.state_dict().items()}
    staged = runner.stage(pack(state))
    for array in state.values():
        array[...] = 0
    staged.apply()
    assert_runs(runner, newer)
    path = one_file(newer, tmp_path / "new")
    runner.stage(path).apply()
    with open(path, "r+b") as file:  # noqa: PTH123 - in place
        file.seek(2000)
        file.write(bytes(40000))
    assert_runs(runner, newer)


def test_tied_weights_are_given_under_either_name_or_both():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    new = another(model)
    state = new.state_dict()
    both = {"lm_head.weight", "model.embed_tokens.weight"}
    assert both <= state.keys()
    for left_out in [*both, None]:
        runner = HFModelRunner(copy.deepcopy(model), 4)
        runner.stage(pack({n: t for n, t in state.items() if n != left_out})).apply()
        assert all(torch.equal(runner._model.state_dict()[name], state[name]) for name in state)
    with pytest.raises(RequestError, match="2 missing"):
        runner.stage(pack({n: t for n, t in state.items() if n not in both}))


# -- weights that do not fit -----------------------------------------------------------------------


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def wrong_shape(state):
    return state | {NAME: torch.zeros(2, 3)}


BAD = {
    "missing": (
        lambda s: without(s, NAME, "model.norm.weight"),
        r"2 missing \(model.layers.1.mlp.up_proj.weight, model.norm.weight\)",
    ),
    "unknown": (lambda s: s | {"a.b": s[NAME], "c": s[NAME]}, r"2 unknown \(a.b, c\)"),
    "shape": (wrong_shape, r"1 of another shape \(.*up_proj.weight \(2, 3\) instead of \(96, 64\)"),
    "all": (lambda s: {f"x.{n}": t for n, t in s.items()}, r"30 unknown .*, \.\.\.\); 30 missing"),
    "none": (lambda s: {}, "missing"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["mapping", "file"])
@pytest.mark.parametrize("fault", BAD)
def test_weights_that_do_not_fit_are_named_and_change_nothing(
    runner, tiny_llama, newer, tmp_path, fault, how
):
    spoil, words = BAD[fault]
    state = {name: tensor.clone() for name, tensor in newer.state_dict().items()}
    weights = spoil(state)
    if how == "file":
        save_file({n: t.clone() for n, t in weights.items()}, tmp_path / "w.safetensors")
        weights = str(tmp_path / "w.safetensors")
    else:
        weights = pack(weights)
    with pytest.raises(RequestError, match=words) as caught:
        runner.stage(weights)
    assert "nothing was changed" in str(caught.value)
    assert_runs(runner, tiny_llama)


@pytest.mark.parametrize(
    "fault", ["absent", "empty folder", "no safetensors", "cut short", "index"]
)
def test_what_cannot_be_read_is_an_error_with_its_place(runner, newer, tmp_path, fault):
    path = tmp_path / "new"
    if fault == "empty folder":
        path.mkdir()
    elif fault == "no safetensors":
        path.write_bytes(b"what is this")
    elif fault == "cut short":
        whole = one_file(newer, path)
        data = (path / "step-7.safetensors").read_bytes()
        (path / "step-7.safetensors").write_bytes(data[: len(data) // 2])
        path = whole
    elif fault == "index":
        shards(newer, path)
        next(path.glob("*.safetensors")).unlink()
    with pytest.raises(RequestError, match=r"cannot read weights from .*new"):
        runner.stage(str(path))


def test_quantised_files_are_refused(runner, tiny_llama, newer, tmp_path):
    state = dict(newer.state_dict())
    state[NAME] = torch.ones(state[NAME].shape, dtype=torch.int8)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(RequestError, match=r"up_proj.weight is of torch.int8.*torch.float32"):
        runner.stage(str(tmp_path / "w.safetensors"))
    assert_runs(runner, tiny_llama)


@pytest.mark.parametrize("value", [np.zeros(3, np.int64), torch.zeros(3).int(), [1.0], "x", None])
def test_only_floating_point_arrays_are_weights(value):
    with pytest.raises(RequestError, match=r"weights\['a'\]"):
        pack({"a": value})
    with pytest.raises(RequestError, match="weights is a int"):
        pack(7)


# -- dropped and read again ------------------------------------------------------------------------


def test_dropped_weights_are_freed_and_read_again_from_where_they_came(tiny_llama, newer, tmp_path):
    folder(tiny_llama, tmp_path / "first")
    runner = HFModelRunner.load(tmp_path / "first", block_size=4)
    storage = weakref.ref(runner._model.get_parameter(NAME).untyped_storage())
    gc.collect()
    assert storage() is not None
    runner.drop()
    gc.collect()
    assert all(not tensor.numel() for tensor in runner._model.state_dict().values())
    assert storage() is None
    assert runner.can_reload
    runner.reload().apply()
    assert_runs(runner, tiny_llama)
    runner.stage(folder(newer, tmp_path / "second")).apply()
    for _ in range(2):
        runner.drop()
        runner.reload().apply()
        assert_runs(runner, newer)
    runner.stage(pack(tiny_llama.state_dict())).apply()
    assert not runner.can_reload, "they came as arrays"
    runner.drop()
    runner.stage(pack(newer.state_dict())).apply()
    assert_runs(runner, newer)


def test_a_model_that_was_handed_over_cannot_be_read_again(runner):
    assert not runner.can_reload


def test_an_unbound_runner_holds_no_kv_memory(runner):
    buffers = KVBuffers(runner.kv_spec, 8, device="cpu")
    storage = weakref.ref(buffers.storage)
    runner.bind(buffers)
    buffers.release()
    gc.collect()
    assert storage() is not None, "the runner still sees it"
    runner.unbind()
    gc.collect()
    assert storage() is None


def test_packed_tensors_are_plain():
    packed = pack({"a": torch.ones(2, 3, dtype=torch.float16), "b": np.ones(2, np.float32)})
    assert packed["a"] == PackedTensor(packed["a"].data)
    assert packed["a"].data.dtype == np.float16
    assert packed["a"].data.shape == (2, 3)
    assert pack(None) is None
    assert pack("some/folder") == pack(Path("some/folder")) == str(Path.cwd() / "some/folder")
    assert pack("~/folder") == "~/folder"
