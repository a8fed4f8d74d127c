"""Hybrid models over paged KV and stored states, against the plain models of transformers.

Greedy tokens alone would show little: logits are compared, and every comparison is shown to fail
where the state is not the right one.
"""

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from raykv.engine import random_models
from raykv.engine.hf_runner import HFModelRunner

from .hybrid import BLOCK, NUM_SLOTS, VOCAB, Hybrid, prefill
from .test_hf_runner import assert_same, plain_logits, tokens_of

PROMPT = 150
# Within a chunk of the delta rule (64 tokens), at its end, and beyond; all at the end of a block.
BOUNDARIES = (4, 60, 64, 68, 148)
ROUNDING, CLEAR = 1e-5, 1e-2


@pytest.fixture(scope="module", params=["qwen3_5-tiny", "qwen3_next-tiny"])
def model(request):
    return random_models.build(request.param)


def plain_greedy(model, tokens, count):
    """What the plain model says next, with its own cache."""
    with torch.inference_mode():
        ids = torch.from_numpy(np.asarray(tokens))[None]
        out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(tokens) :].tolist()


def worst(got, expected):
    return float(np.abs(got - expected).max())


def test_a_prompt_in_one_piece_and_in_pieces_is_what_the_plain_model_computes(model):
    hybrid = Hybrid(model)
    prompt = tokens_of(PROMPT, 1, VOCAB)
    expected = plain_logits(model, prompt)
    assert np.abs(expected).max() > 1, "the logits must be large enough to tell"
    assert_same(prefill(hybrid, "whole", prompt)[0], expected)
    # Also cut where no block ends, and into pieces of one token and of fewer than the convolution.
    pieces = prefill(hybrid, "pieces", prompt, (1, 2, 5, 63, 64, 66, 131))[0]
    assert_same(pieces, expected)


def test_a_restored_state_goes_on_as_if_nothing_had_happened(model):
    hybrid = Hybrid(model)
    prompt = tokens_of(PROMPT, 2, VOCAB)
    expected = plain_logits(model, prompt)
    greedy = plain_greedy(model, prompt, 64)
    _, kept = prefill(hybrid, "first", prompt, BOUNDARIES)
    last = {}
    for boundary, checkpoint in kept.items():
        name = f"from {boundary}"
        hybrid.resume(name, checkpoint)
        logits = hybrid.step({name: prompt[boundary:]})[name]
        assert_same(logits, expected[boundary:])
        last[name] = logits[-1]
    assert len(last) == len(BOUNDARIES)
    assert hybrid.greedy(last, 64) == dict.fromkeys(last, greedy)


def test_every_wrong_state_shows_clearly(model):
    """The negative control of all comparisons here: KV is right, only the state is not."""
    hybrid = Hybrid(model)
    prompt, other = tokens_of(PROMPT, 3, VOCAB), tokens_of(PROMPT, 4, VOCAB)
    expected = plain_logits(model, prompt)
    greedy = plain_greedy(model, prompt, 16)
    _, kept = prefill(hybrid, "first", prompt, (60, 64, 68))
    _, others = prefill(hybrid, "other", other, (64,))
    slots = {"zeros": 0, "earlier": kept[60].slot, "later": kept[68].slot, "other": others[64].slot}
    last = {}
    for name, slot in slots.items():
        hybrid.resume(name, kept[64], slot)
        logits = hybrid.step({name: prompt[64:]})[name]
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_same(logits, expected[64:])
        assert worst(logits, expected[64:]) > CLEAR
        assert worst(logits[-1], expected[-1]) > CLEAR, "86 tokens later it still shows"
        last[name] = logits[-1]
    assert greedy not in hybrid.greedy(last, 16).values()


def test_one_tensor_of_one_layer_is_enough_to_show(model):
    hybrid = Hybrid(model)
    prompt = tokens_of(80, 5, VOCAB)
    expected = plain_logits(model, prompt)[64:]
    _, kept = prefill(hybrid, "first", prompt, (64,))
    for name in ("conv", "recurrent"):
        hybrid.resume(name, kept[64])
        hybrid.states.torch_view(4, name)[hybrid.address(name)] = 0
        assert worst(hybrid.step({name: prompt[64:]})[name], expected) > 100 * ROUNDING


def test_ragged_batches_match_one_by_one(model):
    hybrid = Hybrid(model)
    lengths = {"a": 45, "b": 1, "c": 23, "d": 8, "e": 70, "f": 2, "g": 33, "h": 3}
    chunks = {
        "a": [45], "b": [1], "c": [7, 1, 1, 14], "d": [3, 5],
        "e": [13, 40, 17], "f": [1, 1], "g": [1, 32], "h": [3],
    }  # fmt: skip
    tokens = {name: tokens_of(length + 9, ord(name), VOCAB) for name, length in lengths.items()}
    feeds = {name: np.split(tokens[name], np.cumsum([*chunks[name], *[1] * 8])) for name in lengths}
    seen = {name: [] for name in lengths}
    order, shapes = np.random.default_rng(6), set()
    while any(feeds.values()):
        waiting = [name for name in feeds if feeds[name]]
        # All at once at first: prefills and decodes of all kinds meet in one batch.
        count = len(waiting) if len(shapes) < 4 else order.integers(1, len(waiting) + 1)
        new = {str(name): feeds[name].pop(0) for name in order.permutation(waiting)[:count]}
        shapes.add(tuple(len(piece) for piece in new.values()))
        for name, logits in hybrid.step(new).items():
            seen[name].append(logits)
    assert any(len(shape) == 8 and 1 in shape and max(shape) > 1 for shape in shapes)
    for name in lengths:
        assert_same(np.concatenate(seen[name]), plain_logits(model, tokens[name]))


def test_a_new_sequence_never_reads_what_lies_in_its_slot(model):
    hybrid = Hybrid(model)
    prompts = {"long": tokens_of(20, 7, VOCAB), "one": tokens_of(1, 8, VOCAB)}
    for name, prompt in prompts.items():
        assert_same(hybrid.step({name: prompt})[name], plain_logits(model, prompt))
    for name, prompt in prompts.items():  # now in a slot that another one left
        hybrid.drop(name)
        assert_same(hybrid.step({f"{name} 2": prompt})[f"{name} 2"], plain_logits(model, prompt))
    assert not {"long", "one"} & set(hybrid.live)
    assert set(hybrid.live.values()) == {NUM_SLOTS - 1, NUM_SLOTS - 2}
    # The garbage is really there: who begins with a state that nobody wrote computes nothing.
    hybrid.lengths["lost"], hybrid.blocks["lost"] = 20, list(hybrid.blocks["long"])
    assert np.isnan(hybrid.step({"lost": [5]})["lost"]).all()
    hybrid.lengths["lost many"], hybrid.blocks["lost many"] = 20, list(hybrid.blocks["long"])
    assert np.isnan(hybrid.step({"lost many": [5, 6]})["lost many"]).all()


def test_live_states_are_what_the_plain_cache_holds(model):
    hybrid = Hybrid(model)
    tokens = {"x": tokens_of(70, 9, VOCAB), "y": tokens_of(5, 10, VOCAB)}
    hybrid.step({name: each[:-2] for name, each in tokens.items()})
    hybrid.step({name: each[-2:-1] for name, each in tokens.items()})  # two decodes as one batch
    hybrid.step({name: each[-1:] for name, each in tokens.items()})
    for name, each in tokens.items():
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.from_numpy(each)[None], cache=cache)
        for layer, kind in enumerate(model.config.layer_types):
            if kind != "linear_attention":
                assert hybrid.states.spec.layers[layer] == ()
                continue
            plain = cache.layers[layer]
            pairs = {"conv": plain.conv_states[0], "recurrent": plain.recurrent_states[0]}
            for kind_of_state, expected in pairs.items():
                got = hybrid.states.torch_view(layer, kind_of_state)[hybrid.address(name)]
                torch.testing.assert_close(got, expected[0], rtol=1e-4, atol=1e-5)
                assert got.abs().max() > 1e-2


def test_specs_count_attention_and_linear_layers_apart(model):
    runner = HFModelRunner(copy.deepcopy(model), BLOCK)
    kinds = model.config.layer_types
    assert [bool(layer.tensors) for layer in runner.kv_spec.layers] == [
        kind == "full_attention" for kind in kinds
    ]
    assert runner.kv_spec.token_elements == 2 * (2 * 2 * 32)
    for kind, tensors in zip(kinds, runner.state_spec.layers, strict=True):
        described = {t.name: (t.shape, t.dtype, t.compressible) for t in tensors}
        assert described == (
            {}
            if kind == "full_attention"
            else {
                "conv": ((128, 4), "float32", False),
                "recurrent": ((4, 16, 16), "float32", True),
            }
        )


@pytest.mark.parametrize("checkpoint_dtype", ["float32", "bfloat16", "int8"])
def test_compressed_checkpoints_cost_little_precision_and_not_none(model, checkpoint_dtype):
    hybrid = Hybrid(model, checkpoint_dtype)
    prompt = tokens_of(PROMPT, 11, VOCAB)
    expected = plain_logits(model, prompt)
    logits, kept = prefill(hybrid, "first", prompt, BOUNDARIES)
    assert_same(logits, expected)  # live states are whole, whatever checkpoints are

    def errors(boundary, slot):
        name = f"{boundary} {slot}"
        hybrid.resume(name, kept[boundary], slot)
        return np.abs(hybrid.step({name: prompt[boundary:]})[name] - expected[boundary:])

    found = [errors(boundary, checkpoint.slot) for boundary, checkpoint in kept.items()]
    largest = max(float(error.max()) for error in found)
    # The mean is of the tokens next to the boundary: a mixture of experts turns a small error into
    # a large one wherever it tips the choice of an expert, which is no matter of precision.
    mean = max(float(error[:2].mean()) for error in found)
    if checkpoint_dtype == "float32":
        assert largest < 2 * ROUNDING
    else:
        assert largest > 10 * ROUNDING
        without = float(errors(64, 0)[:2].mean())
        assert mean < without * {"bfloat16": 0.005, "int8": 0.02}[checkpoint_dtype]


def test_a_model_in_bfloat16_keeps_its_recurrent_state_in_float32(model):
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    hybrid = Hybrid(rounded)
    linear = hybrid.states.spec.layers[0]
    assert [(t.name, t.dtype) for t in linear] == [("conv", "bfloat16"), ("recurrent", "float32")]
    tokens = tokens_of(70, 12, VOCAB)
    got, kept = prefill(hybrid, "x", tokens, (64,))
    exact, plain = plain_logits(model, tokens), plain_logits(rounded, tokens)
    # As close to full precision as the plain model in bfloat16 is.
    assert np.abs(got - exact).mean() < 1.5 * np.abs(plain - exact).mean()
    hybrid.resume("y", kept[64])
    np.testing.assert_array_equal(hybrid.step({"y": tokens[64:]})["y"], got[64:])
