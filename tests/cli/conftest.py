import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raykv.engine.build import load_tokenizer

from .pair_tokenizer import PairTokenizer


@pytest.fixture
def tokenizer():
    return PairTokenizer()


@pytest.fixture(autouse=True)
def _environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_model():
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        # Wide enough that logits are of order one and a wrong block is far from rounding.
        initializer_range=0.15,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tiny_model, tmp_path_factory):
    """A model folder without tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The real model's tokenizer; a failure to fetch is a failure, not a skip."""
    return load_tokenizer("smollm2")
