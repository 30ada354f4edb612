"""What masks and position ids say about a prompt, and which tokens only a cache knows."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from .prefix import Eagle4Cache


def left_padding(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Left-padding columns per row. Raises `ValueError` for holes, right padding, empty rows."""
    if mask is None:
        return [0] * len(ids)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but the prompt {tuple(ids.shape)}"
        )
    if not is_left_padded(mask):
        raise ValueError(
            "attention_mask must be left padding only (zeros, then ones) and leave every row a "
            "token; set padding_side='left' on the tokenizer. Without an attention_mask, "
            "pad_token_id inside a prompt counts as padding"
        )
    return (mask == 0).sum(dim=1).tolist()


def is_left_padded(mask: torch.Tensor | None) -> bool:
    """Whether every row is zeros, then at least one 1."""
    if mask is None:
        return True
    kept = mask.bool()
    columns = torch.arange(mask.shape[1], device=mask.device)
    ordered = kept == (columns >= (~kept).sum(dim=1, keepdim=True))
    return bool(ordered.all() and kept.any(dim=1).all())


def are_default_positions(position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    """Whether the position ids are those that Transformers derives itself."""
    if position_ids is None:
        return True
    if position_ids.ndim != 2:
        return False
    expected = torch.arange(position_ids.shape[1], device=position_ids.device).unsqueeze(0)
    if mask is not None:
        expected = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return position_ids.shape[1] == expected.shape[1] and bool((position_ids == expected).all())


def num_known(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    generation_config: GenerationConfig,
    cache: Eagle4Cache | None,
) -> int:
    """Columns that the mask covers before ``input_ids``: their tokens are in the cache.

    Raises `ValueError` when there is no cache, when it does not hold them, or when the mask is
    shorter than the prompt.
    """
    # A mask of ones is dropped by `generate`, which leaves its length behind.
    covered = (
        mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)
    )
    known = (covered or input_ids.shape[1]) - input_ids.shape[1]
    if known == 0:
        return 0
    if known < 0:
        raise ValueError(
            f"attention_mask covers {covered} tokens but the prompt has {input_ids.shape[1]}"
        )
    if cache is None:
        raise ValueError(
            f"attention_mask covers {covered} tokens but input_ids has {input_ids.shape[1]}; pass "
            "the cache that holds the others, or all input_ids"
        )
    if known > cache.num_columns:
        raise ValueError(
            f"attention_mask covers {covered} tokens, but cache and input_ids hold only "
            f"{cache.num_columns + input_ids.shape[1]}"
        )
    return known
