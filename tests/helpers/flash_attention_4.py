"""What FlashAttention 4's two functions compute, in plain torch on a CPU, in the place of its package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import MappingProxyType
from typing import Any

import pytest
import torch

from configs.flags import parse_flags
from preparation.start import agree_on_attention
from ranks.environment import read_environment
from ranks.process_group import start_process_group, stop_process_group
from resolving.resolved import resolve


class StandIn:
    """The two functions of `flash_attn.cute.interface` that we call, in fp32.

    Args:
        off_by: a factor on the gradients of keys and sinks.
        off_if: it applies if exactly these options are given (True) or not given (False); empty: always.
    """

    def __init__(self, *, off_by: float = 1.0, off_if: Mapping[str, bool] = MappingProxyType({})) -> None:
        self.num_forward = 0
        self.off_by, self._off_if = off_by, off_if

    def _flash_attn_fwd(self, q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> tuple[Any, ...]:
        self.num_forward += 1
        assert return_lse
        sinks = options.pop("learnable_sink", None)
        scores, _, values = self._scores(q, k, v, **options)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[:, None])
        out = (scores - lse[..., None]).exp() @ values
        return torch.empty(q.shape, dtype=q.dtype).copy_(out.transpose(-3, -2)), lse, None, None, None

    def _flash_attn_bwd(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, deterministic: bool, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        is_off = all((options.get(name) is not None) == given for name, given in self._off_if.items())
        off_by = self.off_by if is_off else 1.0
        sinks = options.pop("learnable_sink", None)
        assert (lse.dtype, out.dtype, dout.dtype) == (torch.float32, q.dtype, q.dtype)
        scores, keys, values = self._scores(q, k, v, **options)
        queries, out, dout = (tensor.float().transpose(-3, -2) for tensor in (q, out, dout))
        weights = (scores - lse[..., None]).exp()
        of_scores = weights * (dout @ values.mT - (dout * out).sum(-1, keepdim=True)) * options["softmax_scale"]
        found = []
        for grad, like in (
            (of_scores @ keys, q),
            (of_scores.mT @ queries * off_by, k),
            (weights.mT @ dout, v),
        ):
            shared = grad.unflatten(-3, (like.shape[-2], -1)).sum(-3)  # by the query heads of a group
            found.append(torch.empty_like(like).copy_(shared.transpose(-3, -2)))
        if sinks is not None:
            of_rows = -((sinks.float()[:, None] - lse).exp() * (dout * out).sum(-1)).sum(-1)
            found.append((of_rows.sum(0) if of_rows.dim() == 2 else of_rows).to(sinks.dtype) * off_by)
        return tuple(found)

    @staticmethod
    def _scores(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Scores [..., heads, seq, seq], and keys and values [..., heads, seq, head_dim], of all query heads."""
        places, key_places = torch.arange(q.shape[-3]), torch.arange(k.shape[-3])
        before = places[:, None] - key_places  # how many tokens a key is before the query
        if cu_seqlens_q is not None:
            assert (q.dim(), cu_seqlens_q.dtype, cu_seqlens_k.dtype) == (3, torch.int32, torch.int32)  # type: ignore[union-attr]
            assert (max_seqlen_q, max_seqlen_k) == tuple(int(of.diff().max()) for of in (cu_seqlens_q, cu_seqlens_k))  # type: ignore[union-attr]
            document, of_key = (
                torch.bucketize(at, of, right=True)  # type: ignore[arg-type]
                for at, of in ((places, cu_seqlens_q), (key_places, cu_seqlens_k))
            )
            # The last query of a document is at its last key.
            before = (cu_seqlens_k[of_key] - key_places) - (cu_seqlens_q[document] - places)[:, None]  # type: ignore[index]
        right = 0 if causal else window_size_right
        visible = torch.ones_like(before, dtype=torch.bool)
        if window_size_left is not None:
            visible &= before <= window_size_left
        if right is not None:
            visible &= before >= -right
        if cu_seqlens_q is not None:
            visible &= document[:, None] == of_key
        queries, keys, values = (tensor.float().transpose(-3, -2) for tensor in (q, k, v))
        group = queries.shape[-3] // keys.shape[-3]
        keys, values = (tensor.repeat_interleave(group, -3) for tensor in (keys, values))
        return (queries @ keys.mT * softmax_scale).masked_fill(~visible, -torch.inf), keys, values


def agreeing_where_it_works(argv: Sequence[str], ranks: Sequence[int]) -> Callable[[], int]:
    """Each rank prints whether it takes FlashAttention 4 once they have agreed, if it works on these ranks."""
    return partial(_agree, tuple(argv), tuple(ranks))


def _agree(argv: Sequence[str], ranks: Sequence[int]) -> int:
    env = read_environment()
    start_process_group(env)
    resolved = resolve(parse_flags(argv), env)
    resolved = replace(resolved, policies=resolved.policies._replace(flash_4=env.rank in ranks))
    print(agree_on_attention(resolved, env).policies.flash_4)
    stop_process_group()
    return 0


def install(monkeypatch: pytest.MonkeyPatch, functions: Any) -> None:
    """Let `flash_attn.cute.interface` be these functions."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module: Any = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        monkeypatch.setitem(sys.modules, name, module)
    module._flash_attn_fwd, module._flash_attn_bwd = functions._flash_attn_fwd, functions._flash_attn_bwd


def has_kernels() -> bool:
    """Whether the package and a GPU that it is for are here."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False
