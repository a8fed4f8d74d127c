import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raykv.engine import model_store


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama():
    """A random Llama that runs on its own; give a runner a deep copy, for it switches attention."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Wide enough that logits are of order one and a wrong block is far from rounding.
        initializer_range=0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def smollm2_path():
    """The real model's folder; fetched once per machine. A failure is a failure, not a skip."""
    try:
        return model_store.pull("smollm2")
    except Exception as error:  # noqa: BLE001
        pytest.fail(f"pulling smollm2 failed: {error!r}")
