import copy
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache

from raykv.engine.batch import StepBatch
from raykv.engine.hf_runner import HFModelRunner, load_model
from raykv.engine.paged_attention import step_groups
from raykv.errors import ConfigError, NotSupportedError
from raykv.memory.buffers import KVBuffers

NUM_BLOCKS = 96


class Paged:
    """A runner with buffers, and sequences over shuffled blocks, driven as a scheduler would."""

    def __init__(self, model, block_size=4, num_blocks=NUM_BLOCKS, seed=0):
        self.runner = HFModelRunner(model, block_size)
        self.buffers = KVBuffers(self.runner.kv_spec, num_blocks, device="cpu")
        self.runner.bind(self.buffers, self.make_states())
        self.block_size = block_size
        ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
        self.free = ids.astype(np.int32).tolist()
        self.blocks = {}
        self.lengths = {}

    def slots(self, name, start, stop):
        positions = np.arange(start, stop)
        blocks = np.asarray(self.blocks[name], np.int64)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def step(self, new):
        """Feed {sequence: new tokens}; return {sequence: logits of each new token}."""
        slots, positions = [], []
        for name, tokens in new.items():
            start = self.lengths.setdefault(name, 0)
            table = self.blocks.setdefault(name, [])
            stop = self.lengths[name] = start + len(tokens)
            while len(table) * self.block_size < stop:
                table.append(self.free.pop())
            slots.append(self.slots(name, start, stop))
            positions.append(np.arange(start, stop, dtype=np.int32))
        width = max(len(self.blocks[name]) for name in new) + 2
        tables = np.zeros((len(new), width), np.int32)
        for row, name in enumerate(new):
            tables[row, : len(self.blocks[name])] = self.blocks[name]
        query_lens = np.array([len(tokens) for tokens in new.values()], np.int32)
        logits = self.runner.forward(
            StepBatch(
                token_ids=np.concatenate(list(new.values())).astype(np.int32),
                positions=np.concatenate(positions),
                query_lens=query_lens,
                context_lens=np.array([self.lengths[name] for name in new], np.int32),
                block_tables=tables,
                slot_ids=np.concatenate(slots),
                logit_rows=np.arange(query_lens.sum(), dtype=np.int32),
                state_slots=self.state_slots(new),
            )
        )
        assert logits.dtype == np.float32
        return dict(zip(new, np.split(logits, np.cumsum(query_lens)[:-1]), strict=True))

    def make_states(self):
        """For models that have states, as is the next."""

    def state_slots(self, names):
        """The live states' rows."""

    def kv(self, name, layer, kind):
        """The sequence's keys or values in order, [tokens, heads, dim]."""
        return self.buffers.read_slots(layer, kind, self.slots(name, 0, self.lengths[name]))


def tokens_of(length, seed, vocab=128):
    return np.random.default_rng(seed).integers(0, vocab, length)


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(tokens))[None]).logits[0].float().numpy()


def assert_same(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def paged(tiny_llama):
    return Paged(copy.deepcopy(tiny_llama))


def test_ragged_batches_of_chunks_and_decodes_match_the_plain_model(tiny_llama, paged):
    prompts = {
        name: tokens_of(length, 100 + length)
        for name, length in {"a": 45, "b": 1, "c": 23, "d": 8, "e": 61}.items()
    }
    chunks = {"a": [45], "b": [1], "c": [7, 1, 15], "d": [3, 5], "e": [13, 31, 17]}
    decodes = {name: tokens_of(9, ord(name)) for name in prompts}
    feeds = {}
    for name, prompt in prompts.items():
        cuts = np.cumsum(chunks[name])
        feeds[name] = np.split(prompt, cuts[:-1]) + np.split(decodes[name], 9)
    seen = {name: [] for name in prompts}
    order = np.random.default_rng(3)
    while any(feeds.values()):
        waiting = [name for name in feeds if feeds[name]]
        picked = order.permutation(waiting)[: order.integers(1, len(waiting) + 1)]
        for name, logits in paged.step({str(n): feeds[n].pop(0) for n in picked}).items():
            seen[name].append(logits)
    for name, prompt in prompts.items():
        expected = plain_logits(tiny_llama, np.concatenate((prompt, decodes[name])))
        assert np.abs(expected).max() > 1, "the logits must be large enough to tell"
        assert_same(np.concatenate(seen[name]), expected)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen2Config(num_key_value_heads=2),
        transformers.Qwen3Config(num_key_value_heads=1, head_dim=8),
        transformers.MistralConfig(num_key_value_heads=4, sliding_window=None),
        transformers.MistralConfig(num_key_value_heads=2, sliding_window=4096),
    ],
    ids=lambda config: f"{config.model_type}-{config.num_key_value_heads}",
)
def test_other_families_match(config):
    config.update(
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "layer_types": None,
            "pad_token_id": None,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )
    if config.model_type == "mistral":
        config.head_dim = 8
    if config.model_type.startswith("qwen"):
        config.layer_types = ["full_attention"] * 2
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    paged = Paged(copy.deepcopy(model), block_size=16)
    tokens = {"a": tokens_of(40, 1), "b": tokens_of(19, 2)}
    first = paged.step({"a": tokens["a"][:38], "b": tokens["b"][:11]})
    second = paged.step({"b": tokens["b"][11:18], "a": tokens["a"][38:39]})
    third = paged.step({"b": tokens["b"][18:], "a": tokens["a"][39:]})
    for name, fed in tokens.items():
        got = np.concatenate((first[name], second[name], third[name]))
        assert_same(got, plain_logits(model, fed))


def test_blocks_hold_what_the_plain_cache_holds_and_a_swap_shows(tiny_llama, paged):
    tokens = tokens_of(30, 5)
    paged.step({"x": tokens[:13], "other": tokens_of(9, 6)})
    paged.step({"x": tokens[13:29]})
    paged.step({"x": tokens[29:]})
    cache = DynamicCache()
    with torch.inference_mode():
        tiny_llama(torch.from_numpy(tokens)[None], **{_cache_name(tiny_llama): cache})

    def compare():
        for layer in range(3):
            pair = (cache.layers[layer].keys, cache.layers[layer].values)
            for kind, expected in zip("kv", pair, strict=True):
                np.testing.assert_allclose(
                    paged.kv("x", layer, kind),
                    expected[0].transpose(0, 1).numpy(),
                    rtol=1e-5,
                    atol=1e-5,
                )

    compare()
    right = paged.step({"x": [7]})["x"]
    paged.lengths["x"] -= 1
    first, third = paged.blocks["x"][0], paged.blocks["x"][2]
    values = paged.buffers.torch_view(1, "v")
    values[[first, third]] = values[[third, first]]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare()
    wrong = paged.step({"x": [7]})["x"]
    assert np.abs(wrong - right).max() > 1e-3


def _cache_name(model):
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def test_a_shared_prefix_gives_cold_logits_and_a_corrupt_one_does_not(tiny_llama, paged):
    prefix, tail = tokens_of(24, 7), tokens_of(10, 8)
    paged.step({"first": np.concatenate((prefix, tokens_of(5, 9)))})

    def warm(name):
        paged.blocks[name] = paged.blocks["first"][: 24 // paged.block_size]
        paged.lengths[name] = 24
        return paged.step({name: tail})[name]

    cold = plain_logits(tiny_llama, np.concatenate((prefix, tail)))[24:]
    assert_same(warm("second"), cold)
    paged.buffers.torch_view(0, "k")[paged.blocks["first"][3]] += 1.0
    assert np.abs(warm("third") - cold).max() > 1e-3


def test_stale_nan_beyond_a_context_is_never_read(tiny_llama, paged):
    """A block's former owner may have left anything behind the new owner's last token."""
    for layer in range(3):
        for kind in "kv":
            paged.buffers.torch_view(layer, kind)[1:] = float("nan")
    long, short = tokens_of(40, 10), tokens_of(22, 11)
    parts = [
        paged.step({"l": long[:37], "s": short[:18]}),
        paged.step({"l": long[37:38], "s": short[18:21]}),
        paged.step({"l": long[38:39], "s": short[21:22]}),
        paged.step({"l": long[39:]}),
    ]
    for name, tokens in {"l": long, "s": short}.items():
        got = np.concatenate([part[name] for part in parts if name in part])
        assert_same(got, plain_logits(tiny_llama, tokens))


def test_logits_come_for_the_rows_asked_for_even_none(paged):
    everything = paged.step({"x": tokens_of(9, 12)})["x"]
    batch = StepBatch(
        token_ids=tokens_of(9, 12).astype(np.int32),
        positions=np.arange(9, dtype=np.int32),
        query_lens=np.array([9], np.int32),
        context_lens=np.array([9], np.int32),
        block_tables=np.array([paged.blocks["x"]], np.int32),
        slot_ids=paged.slots("x", 0, 9),
        logit_rows=np.array([8, 2], np.int32),
    )
    assert_same(paged.runner.forward(batch), everything[[8, 2]])
    assert paged.runner.forward(replace(batch, logit_rows=np.zeros(0, np.int32))).shape == (0, 128)


def test_two_runners_in_one_process_do_not_mix(tiny_llama):
    torch.manual_seed(99)
    other = type(tiny_llama)(tiny_llama.config).eval()
    models = {"one": tiny_llama, "two": other}
    pair = {name: Paged(copy.deepcopy(model), seed=3) for name, model in models.items()}
    tokens = tokens_of(20, 13)
    got = {name: [] for name in pair}
    for start, stop in ((0, 11), (11, 19), (19, 20)):
        for name, paged in pair.items():
            got[name].append(paged.step({"x": tokens[start:stop]})["x"])
    for name, model in models.items():
        assert_same(np.concatenate(got[name]), plain_logits(model, tokens))


def test_bfloat16_runs_and_is_close(tiny_llama):
    model = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    paged = Paged(copy.deepcopy(model))
    assert paged.runner.kv_spec.dtype == "bfloat16"
    tokens = tokens_of(20, 14)
    got = [paged.step({"x": tokens[:12], "y": tokens[:3]})["x"]]
    got.append(paged.step({"y": tokens[3:4], "x": tokens[12:19]})["x"])
    got.append(paged.step({"y": tokens[4:5], "x": tokens[19:]})["x"])
    exact, rounded = plain_logits(tiny_llama, tokens), plain_logits(model, tokens)
    # As close to full precision as the plain model in bfloat16 is.
    error = np.abs(np.concatenate(got) - exact).mean()
    assert error < 1.5 * np.abs(rounded - exact).mean()


def test_profile_adds_seconds_to_each_part(paged):
    paged.step({"x": [1, 2, 3]})
    assert set(paged.runner.timings.values()) == {0.0}
    paged.runner.profile = True
    paged.step({"x": [4]})
    timings = dict(paged.runner.timings)
    assert min(timings.values()) > 0
    assert timings["forward"] >= sum(timings.values()) - timings["forward"]


@pytest.mark.parametrize("max_tokens", [1, 64, 10_000])
def test_groups_cover_all_and_pad_at_most_twofold(max_tokens):
    contexts = np.sort(np.random.default_rng(15).integers(1, 500, 70))[::-1].astype(np.int32)
    groups = list(step_groups(contexts, max_tokens))
    assert np.concatenate([np.arange(*group) for group in groups]).tolist() == list(range(70))
    for start, stop in groups:
        padded = int(contexts[start]) * (stop - start)
        assert padded <= 2 * contexts[start:stop].sum()
        assert stop - start == 1 or padded <= max_tokens


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MistralConfig(sliding_window=16, max_position_embeddings=64), "sliding-win"),
        (transformers.DeepseekV3Config(), "MLA"),
        (transformers.Llama4TextConfig(), "has chunked_attention layers"),
        (
            transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2),
            "none of its layers keeps keys",
        ),
        (transformers.Gemma3Config(), "multimodal"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.MambaConfig(), "no num_attention_heads"),
        (transformers.Gemma2Config(sliding_window=8192), "softcap"),
        (
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rotary",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_refused_before_weights_are_read(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(NotSupportedError, match=reason) as caught:
        load_model(tmp_path)
    assert config.model_type in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.BloomConfig(max_position_embeddings=64), "does not run over a paged cache"),
        (
            transformers.StableLmConfig(
                num_attention_heads=4, num_key_value_heads=4, intermediate_size=48
            ),
            "no keyword arguments",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_model_that_bypasses_the_attention_interface_is_refused_at_load(config, reason):
    config.update({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0})
    config.update({"num_attention_heads": 4})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotSupportedError, match=f"{config.model_type}.*{reason}"):
        HFModelRunner(model, 4)


def test_keys_of_another_shape_than_the_config_says_are_refused(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    model.config.num_key_value_heads = 4
    with pytest.raises(NotSupportedError, match="heads differ"):
        HFModelRunner(model, 4)


def test_missing_files_and_weights_are_named(tmp_path, tiny_llama):
    with pytest.raises(ConfigError, match="cannot load the model"):
        HFModelRunner.load(tmp_path, block_size=4)
    tiny_llama.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load the model"):
        HFModelRunner.load(tmp_path, block_size=4)
    weights = tiny_llama.state_dict()
    absent = "model.layers.1.mlp.up_proj.weight"
    del weights[absent]
    tiny_llama.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=absent):
        HFModelRunner.load(tmp_path, block_size=4)
    tiny_llama.save_pretrained(tmp_path)
    assert HFModelRunner.load(tmp_path, block_size=4).vocab_size == 128


def test_buffers_of_another_layout_are_refused(paged, tiny_llama):
    other = HFModelRunner(copy.deepcopy(tiny_llama), 8)
    with pytest.raises(ConfigError, match=r"runner\.kv_spec"):
        other.bind(paged.buffers)


@pytest.mark.model
def test_real_model_writes_what_generate_writes(smollm2_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    chat = [{"role": "user", "content": "Name three rivers of Europe and the seas they reach."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text)["input_ids"]
    plain = load_model(smollm2_path)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )[0, len(prompt) :].tolist()
    paged = Paged(plain, block_size=16)
    assert paged.runner.vocab_size == 49152
    assert paged.runner.max_model_len == 8192
    paged.step({"x": prompt[:17]})
    logits = paged.step({"x": prompt[17:]})["x"]
    written = []
    while len(written) < 20:
        written.append(int(logits[-1].argmax()))
        logits = paged.step({"x": written[-1:]})["x"]
    assert written == expected
    assert len(set(written)) > 5, "a text that repeats itself would hide faults"
