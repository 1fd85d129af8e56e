"""A trained model made ready to generate, and ready to train again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from policies.adapters.adapted_model import base_model
from policies.apply_policies import Policies
from policies.attention.choice import attention_with_masks, goes_by_offsets, set_attention
from policies.sharding import reshard, unwrap
from ranks.collectives import max_on_host
from ranks.environment import Environment, print_rank_zero
from utils.host_memory import free_host_bytes
from utils.quiet import quiet_generation


@contextmanager
def generating(model: nn.Module, policies: Policies, env: Environment) -> Iterator[bool]:
    """A context in which `unwrap(model).generate` works. Every rank must enter and leave it.

    Sharded weights are gathered once if they take at most half of the free memory of every rank: each new token is a
    forward pass, and gathering every layer for each of them would cost far more than computing. Otherwise layers are
    gathered one at a time, and every rank has to call the model equally often.

    Yields:
        Whether the ranks must go in step.
    """
    # modules() begins with the root, so units[0] is the root unit.
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    training, inner = model.training, base_model(unwrap(model))
    attention = inner.config.get_text_config()._attn_implementation
    whole = bool(units) and _fits(model, policies, env)
    if units and not whole:
        print_rank_zero(env, "generating: the whole model does not fit; layers are gathered for every token, slowly")
    model.eval()
    # Keys in a cache, and prompts longer than a sliding window, need masks, which these functions never get.
    if goes_by_offsets(attention):
        set_attention(inner, attention_with_masks(inner))
    # The root's weights are whole only in its own forward, which generation does not call under an adapter, nor for an
    # encoder alone.
    for unit in units if whole else units[:1]:
        unit.unshard()
    if whole:
        # This sets all units: the call recurses.
        units[0].set_reshard_after_forward(False)
    try:
        # Every new token has another length, and compiled layers would be compiled again and again.
        with torch.compiler.set_stance("force_eager"), quiet_generation():
            yield bool(units) and not whole and policies.layout.mesh_shape[1] > 1
    finally:
        if whole:
            # Not the root: `policies.sharding.shard` never lets it reshard after forward.
            for unit in units[1:]:
                unit.set_reshard_after_forward(policies.layout.reshard_after_forward, recurse=False)
        reshard(model)
        if goes_by_offsets(attention):
            set_attention(inner, attention)
        model.train(training)


def _fits(model: nn.Module, policies: Policies, env: Environment) -> bool:
    """Whether the whole weights, as they are computed with, take at most half of the free memory of every rank."""
    precision = policies.precision
    num_bytes = 0
    for parameter in (p for p in model.parameters() if isinstance(p, DTensor)):  # others are whole already
        casts = parameter.is_floating_point() and precision.casts
        num_bytes += parameter.numel() * (precision.compute_dtype.itemsize if casts else parameter.element_size())
    # One rank without room decides for all, since every rank must gather the same units.
    (is_short,) = max_on_host(2 * num_bytes > free_bytes(env))
    return not is_short


def free_bytes(env: Environment) -> int:
    """Memory that this rank can still take on the device where it computes."""
    if env.device.type != "cuda":
        return free_host_bytes() // env.local_world_size
    # Blocks that the caching allocator holds and does not use are free for tensors, too.
    kept = torch.cuda.memory_reserved(env.device) - torch.cuda.memory_allocated(env.device)
    return torch.cuda.mem_get_info(env.device)[0] + kept


@contextmanager
def seeded(seed: int, model: nn.Module, *, is_needed: bool) -> Iterator[None]:
    """A context in which tokens are drawn by this seed; the run's own random numbers go on as if none had been.

    Args:
        is_needed: without it nothing changes.
    """
    if not is_needed:
        yield
        return
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
