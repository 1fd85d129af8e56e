"""Ranks that share rows, and compare losses and gradients with those of whole rows on each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.batches.padding import PaddedWidth
from policies.attention.choice import BY_OFFSETS
from policies.attention.functions import attention_by_offsets
from policies.context_parallel.attention import over_ranks, share_attention
from policies.context_parallel.proof import find_other_losses
from policies.loss.summed_loss import use_summed_loss
from ranks.context_group import ContextGroup
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.row_shares import share_of
from tests.helpers.packed_models import CONFIGS, TASK, loss_and_gradients, make_documents, make_model

MODELS = [*CONFIGS, "gpt_oss"]
LENGTHS = [5, 13, 3, 9, 20, 2]


def whole_batch(num_ranks: int, *, packing: bool) -> CausalMicroBatch:
    """Two rows with padding at the end of one. Packed, borders of ranks are inside of documents."""
    collate = Collator(packing=packing, padding_id=0, width=PaddedWidth(num_ranks, 96), offsets="all")
    documents = make_documents(LENGTHS)
    return collate([documents[:3], documents[3:]] if packing else [documents[1:2], documents[4:5]])


def compare(folder: Path) -> None:
    """Each rank's differences of losses and gradients, by model and kind of row, go into a file; relative."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = ContextGroup(size, rank, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    found: dict[str, Any] = {}
    for name in MODELS:
        for packing in (True, False):
            whole = whole_batch(size, packing=packing)
            loss, gradients = loss_and_gradients(_model(name), whole)
            model = _model(name)
            share_attention(model, group)
            shared_loss, shared_gradients = loss_and_gradients(model, share_of(whole, group))
            sums = torch.tensor([shared_loss, *shared_gradients])
            dist.all_reduce(sums)
            difference = float((sums[1:] - gradients).abs().max() / gradients.abs().max())
            found[f"{name} {packing}"] = [abs(float(sums[0]) / loss - 1), difference]
    found["proof"] = _proof(group)
    found["compiled"] = _compiled(group)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _model(name: str) -> Any:
    model = make_model(name, BY_OFFSETS)
    use_summed_loss(model, TASK.backbone(model), 7, TASK.compute_logits)
    return model


def _compiled(group: ContextGroup) -> list[float]:
    """Differences of an attention's output and gradients, in one graph and as it is written."""
    attend, module = over_ranks(attention_by_offsets, group), torch.nn.Identity()
    cu_seqlens = torch.tensor([0, 5 * group.size, 8 * group.size], dtype=torch.int32)

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, sinks = tensors
        options = {"s_aux": sinks, "cu_seq_lens_q": cu_seqlens, "max_length_q": 5 * group.size}
        return attend(module, 2 * query, key, value, None, **options)[0].sin()

    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        generator = torch.Generator().manual_seed(group.rank)
        shapes = [(1, 4, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8), (4,)]
        tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        output = function(*tensors)
        output.sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    return [float((one - other).abs().max()) for one, other in zip(*results, strict=True)]


def _proof(group: ContextGroup) -> list[str | None]:
    """What the trial says of a model whose rows are shared, and of one that counts positions from each part's start."""
    model, device = _model("llama"), torch.device("cpu")
    share_attention(model, group)
    whole = whole_batch(group.size, packing=False)
    part = share_of(whole, group)
    tried = [part, replace(part, position_ids=None)]
    return [find_other_losses(model, TASK.token_losses, whole, p, group, device, tolerance=1e-3) for p in tried]
