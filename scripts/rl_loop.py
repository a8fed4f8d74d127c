#!/usr/bin/env python3
"""Reinforcement learning with a pool: sample groups, take a step, give the ranks the new weights.

Teaches a tiny random model to say even tokens, in the manner of GRPO; a minute on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import raykv

PROMPTS = [[first, first + 1, first + 2] for first in range(0, 120, 15)]
SAMPLES = raykv.SamplingParams(max_tokens=16, temperature=1.0, logprobs=1, n=8, ignore_eos=True)
TINY = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
)  # fmt: skip


def reward(token_ids: tuple[int, ...]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def train(
    pool: raykv.BlockManagerPool, model: LlamaForCausalLM, num_rounds: int
) -> Iterator[tuple[float, float, list[raykv.TokenOutput]]]:
    """Yield, per round, the mean reward, how far pool and trainer disagree, and the samples."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for version in range(1, num_rounds + 1):
        outputs = pool.generate(PROMPTS, SAMPLES)  # SAMPLES.n in a row for each prompt
        prompts = torch.tensor(PROMPTS).repeat_interleave(SAMPLES.n, 0)
        tokens = torch.tensor([output.token_ids for output in outputs])
        old = torch.tensor([output.log_probs for output in outputs])
        rewards = torch.tensor([reward(output.token_ids) for output in outputs])
        groups = rewards.view(-1, SAMPLES.n)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        logits = model(torch.cat([prompts, tokens], 1)).logits[:, prompts.shape[1] - 1 : -1]
        new = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        optimizer.zero_grad()
        (-torch.exp(new - old) * advantages.view(-1, 1)).mean().backward()
        optimizer.step()
        pool.update_weights(version, model.state_dict())
        yield rewards.mean().item(), (new - old).abs().max().item(), outputs


if __name__ == "__main__":
    torch.manual_seed(0)
    student = LlamaForCausalLM(TINY)
    with tempfile.TemporaryDirectory() as folder:
        student.save_pretrained(folder)
        config = raykv.PoolConfig(dp_size=2, num_blocks=512, model={"path": folder})
        with raykv.actors.launch(config) as ranks:
            for number, (mean, gap, _) in enumerate(train(ranks, student, 20)):
                print(f"round {number:2}: mean reward {mean:.3f}, log-probs within {gap:.0e}")
