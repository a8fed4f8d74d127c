"""Which models with linear layers run, and which are refused at load, not in service."""

import copy

import pytest
import torch
import transformers

from raykv.engine import random_models
from raykv.engine.hf_runner import HFModelRunner
from raykv.engine.mixers import wrap_mixers
from raykv.errors import ConfigError, NotSupportedError
from raykv.memory.buffers import KVBuffers
from raykv.memory.state_buffers import StateBuffers

from .hybrid import BLOCK, VOCAB, Hybrid, prefill
from .test_hf_runner import assert_same, plain_logits, tokens_of


@pytest.fixture(scope="module")
def model():
    return random_models.build("qwen3_5-tiny")


def test_buffers_that_do_not_fit_are_refused(model):
    runner = HFModelRunner(copy.deepcopy(model), BLOCK)
    buffers = KVBuffers(runner.kv_spec, 4, device="cpu")
    with pytest.raises(ConfigError, match=r"6 of the model's 8 layers .* runner\.state_spec"):
        runner.bind(buffers)
    smaller = type(runner.state_spec)(runner.state_spec.layers[:4])
    with pytest.raises(ConfigError, match=r"create them from runner\.state_spec"):
        runner.bind(buffers, StateBuffers(smaller, 2, device="cpu"))
    states = StateBuffers(runner.state_spec, 3, device="cpu")
    runner.bind(buffers, states)
    states.torch_view(0, "recurrent")[1] = 7
    runner.copy_states([1], [2])
    assert states.torch_view(0, "recurrent")[2].unique().tolist() == [7]
    runner.unbind()
    with pytest.raises(AssertionError, match="comes first"):
        runner.copy_states([1], [2])


def test_states_for_a_model_that_has_none_are_refused(model, tiny_llama):
    runner = HFModelRunner(copy.deepcopy(tiny_llama), BLOCK)
    assert runner.state_spec is None
    spec = HFModelRunner(copy.deepcopy(model), BLOCK).state_spec
    with pytest.raises(ConfigError, match=r"is not the model's \(None\)"):
        runner.bind(KVBuffers(runner.kv_spec, 4, device="cpu"), StateBuffers(spec, 2, device="cpu"))


def linear_layer(model):
    return model.model.layers[0].linear_attn


def test_a_layer_that_keeps_nothing_is_refused(model):
    forgetful = copy.deepcopy(model)
    mixer = linear_layer(forgetful)
    plain = mixer.forward
    mixer.forward = lambda hidden_states, cache=None, **kwargs: plain(hidden_states, **kwargs)
    with pytest.raises(NotSupportedError, match="linear layer 0 leaves no state in its cache"):
        HFModelRunner(forgetful, BLOCK)


@pytest.mark.parametrize(
    ("state", "deaf_from", "reason"),
    [
        ("recurrent", 1, "their recurrent state where one new token"),
        ("recurrent", 2, "their recurrent state where several new tokens"),
        ("conv", 2, "their conv state where several new tokens"),
    ],
)
def test_layers_that_do_not_read_what_they_keep_are_refused(model, state, deaf_from, reason):
    def deafen(mixer):
        hearing = mixer.forward

        def forward(hidden_states, cache=None, **kwargs):
            if hidden_states.shape[1] >= deaf_from:
                zeros = torch.zeros_like(cache._past[state]) if cache._past else None
                cache._past = cache._past and {**cache._past, state: zeros}
            return hearing(hidden_states, cache=cache, **kwargs)

        mixer.forward = forward

    deaf = copy.deepcopy(model)
    for layer in deaf.model.layers:
        if hasattr(layer, "linear_attn"):
            deafen(layer.linear_attn)
    with pytest.raises(NotSupportedError, match=reason):
        HFModelRunner(deaf, BLOCK)


def test_a_family_that_begins_anew_in_every_piece_is_refused():
    """Jamba reads its recurrent state for one new token only: pieces of a prompt would be wrong."""
    config = transformers.JambaConfig(
        **random_models.RANDOM_MODELS["qwen3_5-tiny"].sizes, vocab_size=VOCAB
    )
    jamba = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(NotSupportedError, match=r"jamba.*recurrent state where several new tokens"):
        HFModelRunner(jamba, BLOCK)


def test_a_layer_that_cannot_be_told_is_refused(model):
    hidden = copy.deepcopy(model)
    linear_layer(hidden).layer_idx = None
    with pytest.raises(NotSupportedError, match="layer 0 keeps a state, but 0 of its modules"):
        wrap_mixers(hidden, [0])


def test_a_layer_that_gets_a_mask_is_refused(model):
    runner = HFModelRunner(copy.deepcopy(model), BLOCK)
    mixer = linear_layer(runner._model)
    with pytest.raises(NotSupportedError, match="gets a mask"):
        mixer(torch.zeros(1, 1, 64), cache=FakeStep(), attention_mask=torch.ones(1, 1))


class FakeStep:
    """All that a wrapped layer looks at before it asks about the mask."""

    linear = object()


def test_a_wrapped_layer_still_works_with_a_plain_cache(model):
    """A model that was wrapped twice, or is run by somebody else, computes what it did."""
    twice = copy.deepcopy(model)
    wrap_mixers(twice, [0, 1, 2])
    wrap_mixers(twice, [0, 1, 2])
    tokens = tokens_of(30, 13, VOCAB)
    assert_same(plain_logits(twice, tokens), plain_logits(model, tokens))
    assert_same(prefill(Hybrid(twice), "x", tokens, (8,))[0], plain_logits(model, tokens))


def test_another_family_with_the_same_cache_joins():
    """Nothing in the runner names a model."""
    config = transformers.OlmoHybridConfig(
        **random_models.RANDOM_MODELS["qwen3_5-tiny"].sizes,
        vocab_size=VOCAB,
        pad_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(14)
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    hybrid = Hybrid(other)
    tokens = tokens_of(90, 15, VOCAB)
    expected = plain_logits(other, tokens)
    logits, kept = prefill(hybrid, "x", tokens, (8, 64))
    assert_same(logits, expected)
    for boundary, checkpoint in kept.items():
        name = f"from {boundary}"
        hybrid.resume(name, checkpoint)
        assert_same(hybrid.step({name: tokens[boundary:]})[name], expected[boundary:])
