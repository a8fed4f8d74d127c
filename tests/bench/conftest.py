import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama's folder, without tokenizer."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Wide enough that logits are of order one and other prompts get other answers.
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(20)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
