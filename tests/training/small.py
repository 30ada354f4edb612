"""A sure-footed tiny target, and stores and drafters for it."""

import torch
from tiny import tiny_llama
from transformers import LlamaForCausalLM

from eagle4.config import Eagle4Config
from eagle4.drafter.model import Eagle4Drafter
from eagle4.training.extract import extract
from eagle4.training.features import FeatureSequence, FeatureStore, FeatureWriter, target_identity

VOCAB, HIDDEN, TAPS = 64, 32, [0, 1, 2]


def tiny_target() -> LlamaForCausalLM:
    """A random Llama whose next token is fairly sure, so that accuracy means something."""
    target = tiny_llama(vocab=VOCAB, layers=3, hidden=HIDDEN).requires_grad_(False)
    target.lm_head.weight.mul_(4.0)
    return target


def tiny_drafter(target, **overrides) -> Eagle4Drafter:
    """Random weights, large enough that every part of the block matters."""
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
