"""Tiny random targets, stores and drafters for the training tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle4.config import Eagle4Config
from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.extract import extract
from eagle4.training.features import FeatureSequence, FeatureStore, FeatureWriter, target_identity

VOCAB, HIDDEN, TAPS = 64, 32, [0, 1, 2]


def tiny_target(seed: int = 0, num_layers: int = 3) -> LlamaForCausalLM:
    """A random Llama whose greedy text is not constant and whose next token is fairly sure."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    target.lm_head.weight.mul_(4.0)
    return target


def tiny_drafter(target, **overrides) -> Eagle4Drafter:
    overrides = {"tap_layers": TAPS, "intermediate_size": 48, "candidate_rank": 0, **overrides}
    torch.manual_seed(1)
    drafter = Eagle4Drafter(Eagle4Config.for_target(target.config, **overrides))
    for param in drafter.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=0.2)
    return drafter.bind(target.get_input_embeddings(), target.lm_head)


def tiny_store(folder, target, num_sequences=6, length=40, prompt=8, seed=0) -> FeatureStore:
    """Greedy continuations of random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    identity = target_identity(target.config, TAPS, None)
    with FeatureWriter(folder, identity, shard_size=4) as writer:
        for i in range(num_sequences):
            ids = torch.randint(1, VOCAB, (1, prompt + i % 3), generator=generator)
            text = target.generate(ids, do_sample=False, max_new_tokens=length - ids.shape[1])[0]
            mask = torch.arange(len(text)) >= ids.shape[1]
            taps, last = extract(target, TAPS, text)
            writer.add(FeatureSequence(text.int(), taps, last, mask))
    return FeatureStore(folder)
