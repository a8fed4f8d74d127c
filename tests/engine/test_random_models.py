import json

import numpy as np
import pytest
import torch
import transformers

from raykv.engine import random_models
from raykv.engine.build import load_tokenizer
from raykv.engine.hf_runner import HFModelRunner, load_model
from raykv.engine.model_store import known_names, pull, resolve_model
from raykv.errors import ConfigError

TINY = ["qwen3_5-tiny", "qwen3_next-tiny"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "raykv" / "models"


@pytest.mark.parametrize("name", TINY)
def test_a_name_is_made_once_and_is_the_same_everywhere(cache, name):
    messages = []
    folder = resolve_model(name)
    assert folder == cache / f"random-{name}"
    weights = folder / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert pull(name, on_progress=lambda *what: messages.append(what)) == folder
    assert weights.stat().st_mtime_ns == made
    assert messages == []
    saved, drawn = load_model(folder).state_dict(), random_models.build(name).state_dict()
    assert saved.keys() == drawn.keys()
    for key, tensor in drawn.items():
        assert torch.equal(saved[key], tensor), key


def test_the_seed_is_the_models_own_and_nobody_elses():
    torch.manual_seed(1)
    first = random_models.build("qwen3_5-tiny").lm_head.weight
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn), "the caller's random numbers go on undisturbed"
    assert torch.equal(random_models.build("qwen3_5-tiny").lm_head.weight, first)


def test_a_folder_of_an_earlier_recipe_is_made_anew(cache):
    folder = pull("qwen3_5-tiny")
    manifest = folder / "raykv-manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "recipe": "0"}))
    assert pull("qwen3_5-tiny") == folder
    assert json.loads(manifest.read_text()) == content
    assert {path.name for path in cache.iterdir()} == {
        "random-qwen3_5-tiny",
        ".random-qwen3_5-tiny.lock",
    }


@pytest.mark.usefixtures("cache")
def test_a_loaded_tokenizer_is_that_of_bytes_and_writes_a_chat():
    text = "Hello, wörld!  two  spaces\n\n日本 \x00 d'accord"
    for tokenizer in (load_tokenizer("qwen3_5-tiny"), random_models.tokenizer()):
        assert len(tokenizer) == 259
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
        chat = [{"role": "user", "content": "hi"}]
        shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(shown)
        assert len(ids) == len("user\nhi\nassistant\n") + 3
        assert tokenizer.decode(ids) == shown
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("name", TINY)
def test_what_they_say_depends_on_the_whole_prompt(name):
    model, tokenizer = random_models.build(name), random_models.tokenizer()
    middle = " and then the quick brown fox jumped over the lazy dog" * 2
    said, logits = [], []
    for first in ("A", "B", "C"):
        ids = torch.tensor([tokenizer.encode(first + middle)])
        with torch.inference_mode():
            logits.append(model(ids).logits[0, -1].numpy())
            said.append(model.generate(ids, max_new_tokens=16, do_sample=False)[0, -16:].tolist())
    assert all(len(set(tokens)) > 8 for tokens in said), "no loop of a few tokens"
    assert len({tuple(tokens) for tokens in said}) == 3
    assert np.abs(logits[0] - logits[1]).max() > 1e-3, "109 bytes later the first one still shows"


@pytest.mark.parametrize("name", TINY)
def test_end_tokens_are_the_tokenizers(cache, name):
    runner = HFModelRunner.load(resolve_model(name), block_size=4)
    tokenizer = random_models.tokenizer()
    assert runner.eos_token_ids == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert runner.vocab_size == len(tokenizer)


def test_the_large_one_has_about_50m_parameters():
    config = random_models.RANDOM_MODELS["qwen3_5-50m"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3_5TextConfig(**config.sizes, vocab_size=259)
        )
    assert 45e6 < sum(parameter.numel() for parameter in model.parameters()) < 55e6


def test_names_are_known_and_an_old_transformers_is_told(monkeypatch):
    assert known_names() == ["smollm2", "qwen3_5-50m", "qwen3_5-tiny", "qwen3_next-tiny"]
    monkeypatch.setattr(transformers, "Qwen3_5TextConfig", None)
    with pytest.raises(ConfigError, match=r"needs Qwen3_5TextConfig, which transformers .* newer"):
        random_models.build("qwen3_5-tiny")


def test_the_text_part_of_a_multimodal_folder_runs(tmp_path):
    """Qwen3.5 is published with its vision part; text alone is what raykv serves."""
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 4}
    text = random_models.build("qwen3_5-tiny")
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision)
    )
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded).__name__ == "Qwen3_5ForCausalLM"
    for key, tensor in text.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert HFModelRunner.load(tmp_path, block_size=4).state_spec is not None
