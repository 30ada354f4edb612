"""A target small enough to train several drafters in a minute, and text that it wrote itself.

Used by the training experiments of this folder where no feature store is given. A random model's
text is chaos that no drafter learns, so this one is trained first, for seconds, on a language of 32
tokens whose next token is a fixed function of the last two, seven times in eight.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle4.training import FeatureStore, FeatureWriter
from eagle4.training.extract import extract
from eagle4.training.features import FeatureSequence, target_identity

VOCAB, HIDDEN, TAPS, RULE = 32, 64, [0, 1, 2], 7 / 8


def language(sequences: int, length: int, seed: int) -> torch.Tensor:
    """Sentences ``[sequences, length]``."""
    rules = torch.randint(VOCAB, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (sequences, length), generator=generator)
    obeys = torch.rand(sequences, length, generator=generator) < RULE
    for t in range(2, length):
        ruled = rules[text[:, t - 2], text[:, t - 1]]
        text[:, t] = torch.where(obeys[:, t], ruled, text[:, t])
    return text


def small_target(steps: int = 500) -> LlamaForCausalLM:
    """Three layers, trained on the language; always the same weights on one machine."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        ids = language(32, 48, seed=step)
        loss = target(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return target.eval().requires_grad_(False)


@torch.no_grad()
def small_store(target: LlamaForCausalLM, folder: Path, sequences: int = 192) -> FeatureStore:
    """What the target writes, sampled: greedily it would soon repeat itself."""
    prompts = language(sequences, 6, seed=10**6)
    torch.manual_seed(0)
    texts = target.generate(  # pyright: ignore
        prompts, do_sample=True, top_k=0, max_new_tokens=58
    )
    with FeatureWriter(folder, target_identity(target.config, TAPS, None)) as writer:
        for text in texts:
            taps, last = extract(target, TAPS, text)
            writer.add(FeatureSequence(text.int(), taps, last, torch.arange(len(text)) >= 6))
    return FeatureStore(folder)
