"""The memory of generation at evaluation (--eval_generate) besides the weights, counted on meta tensors.

Two passes of the model's own code are counted: one over the prompts, and one for the last token of the longest answers,
with the cache of all tokens before. So no formula per family of models is needed: shared key heads, windows, and the
cache of the attention to an encoder come out as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from planning.machines.cards import Card
from planning.memory.device_kernels import KernelsOfCard
from planning.memory.live_bytes import LiveBytes
from planning.memory.meta_pass import buffers_on_meta, computed_in, kernels_of
from planning.memory.row_lengths import RowLengths
from planning.model.planned_model import PlannedModel
from policies.attention.choice import attention_with_masks, goes_by_offsets, set_attention
from resolving.lengths import num_positions

# fp32 numbers per sequence and word of the vocabulary. While the next token is computed and its logits are copied,
# transformers' loops still hold those that chose the one before: its logits, and under a beam search (True) its
# log-probabilities (`_sample` and `_beam_search` of transformers/generation/utils.py).
_HELD = {False: 1, True: 2}


@dataclass(frozen=True)
class GenerationBytes:
    """Bytes on one rank, besides the weights."""

    cache: int  # keys and values of all tokens up to the last, and an encoder's output
    peak: int  # the most at once, the cache included


def bytes_of_generation(planned: PlannedModel, card: Card, rows: RowLengths) -> GenerationBytes | None:
    """The bytes of one batch of the longest answers; None for models of images, whose prompts are not known.

    Prompts count as long as the longest row. As in `policies.generating.generating`, the model attends by masks.
    """
    resolved, base = planned.resolved, planned.adapted.base
    train, precision = planned.config.train_config, resolved.policies.precision
    if resolved.task.READS_IMAGES:
        return None
    attention = base.config.get_text_config()._attn_implementation
    if goes_by_offsets(attention):
        set_attention(base, attention_with_masks(base))
    base.eval()
    live = LiveBytes([*base.parameters(), *base.buffers()])
    try:
        with (
            computed_in(base, precision.compute_dtype if precision.casts else None),
            buffers_on_meta(base),
            KernelsOfCard(kernels_of(card), answer=rows.eval_rows == 1),
            torch.no_grad(),
            live,
        ):
            if base.config.is_encoder_decoder:
                cache, peak = _source_and_answer(base, live, rows, train.num_beams, train.max_new_tokens)
            else:
                positions = num_positions(train, planned.config.prefix_config, resolved.model_config)
                # Longer prompts leave too few positions for an answer, and are refused (evaluation/generation.py).
                room = rows.widest_evaluated[0] if positions is None else positions - train.max_new_tokens
                prompt = max(1, min(rows.widest_evaluated[0], room))
                cache, peak = _prompt_and_answer(
                    base, live, rows.eval_rows, train.num_beams, prompt, train.max_new_tokens
                )
    finally:
        if goes_by_offsets(attention):
            set_attention(base, attention)
    return GenerationBytes(cache, peak)


def _prompt_and_answer(
    model: PreTrainedModel, live: LiveBytes, rows: int, beams: int, prompt: int, new_tokens: int
) -> tuple[int, int]:
    """Bytes of the cache, and the peak, of a decoder."""
    rows, length = rows * beams, prompt + new_tokens
    window = live.enter()
    model(input_ids=_ids(rows, prompt), attention_mask=_ids(rows, prompt), use_cache=True, logits_to_keep=1)
    at_prompt = window.peak
    whole = model(input_ids=_ids(rows, length - 1), attention_mask=_ids(rows, length - 1), use_cache=True)
    cache = whole.past_key_values
    # Frees the logits of all positions, which generation never has.
    del whole
    window = live.enter()
    last = model(input_ids=_ids(rows, 1), attention_mask=_ids(rows, length), past_key_values=cache, use_cache=True)
    return _of_last(live, window.peak, last, beams, at_prompt)


def _source_and_answer(
    model: PreTrainedModel, live: LiveBytes, rows: RowLengths, beams: int, new_tokens: int
) -> tuple[int, int]:
    """The same for an encoder-decoder: its encoder reads each source once, its decoder once for each beam."""
    num_rows, (source, *_) = rows.eval_rows, rows.widest_evaluated
    window = live.enter()
    encoded = model.get_encoder()(input_ids=_ids(num_rows, source), attention_mask=_ids(num_rows, source))[0]
    encoded = encoded.repeat_interleave(beams, dim=0) if beams > 1 else encoded
    at_source = window.peak
    given: dict[str, Any] = {
        "encoder_outputs": BaseModelOutput(last_hidden_state=encoded),
        "attention_mask": _ids(num_rows * beams, source),
        "use_cache": True,
    }
    whole = model(decoder_input_ids=_ids(num_rows * beams, max(1, new_tokens - 1)), **given)
    cache = whole.past_key_values
    del whole
    window = live.enter()
    last = model(decoder_input_ids=_ids(num_rows * beams, 1), past_key_values=cache, **given)
    return _of_last(live, window.peak, last, beams, at_source)


def _of_last(live: LiveBytes, peak: int, last: Any, beams: int, before: int) -> tuple[int, int]:
    """The cache that is there with the last token's logits, and the most of all moments."""
    logits = last.logits
    copied = 4 * logits.shape[0] * logits.shape[-1]
    held = _HELD[beams > 1] * copied
    return live.live - live.size_of(logits), max(before, peak + held, live.live + held + copied)


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
