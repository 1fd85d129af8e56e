"""Recurrent rules of packed rows, by the kernels of optional packages, or by transformers' functions for each document.

All have the signatures of transformers' functions, whose place they take in a layer
(policies/linear_attention/layers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from policies.linear_attention.kernels import Kernels
from policies.linear_attention.planned import planned_kimi_rule
from policies.linear_attention.rows import documents_of_tokens, for_each_document, in_one_row, reference_of

Function = Callable[..., Any]


def delta_rule(written: Function, rule_of_fla: Function, kernels: Kernels, values_per_key: int) -> Function:
    """A function in the place of a gated delta rule, or of Kimi's, which decays each element of a key by itself.

    Args:
        written: transformers' function.
        rule_of_fla: the rule by flash-linear-attention's kernels: `gated_delta_rule`, `kimi_delta_rule`.
        values_per_key: heads of values that a head of keys serves.
    """

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors, option = (query, key, value, g, beta), {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        offsets = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        reference = reference_of(written)
        if offsets is None and (not kernels.fla or _has_cache(kwargs)):
            # On a CPU, too, transformers' function would call a kernel that is installed.
            return (written if kernels.fla else reference)(*tensors, **option, **kwargs)
        _check_no_cache(kwargs)
        if kernels.fla:
            if not use_qk_l2norm_in_kernel:
                raise ValueError("the rule by kernels divides queries and keys by their norms")
            if values_per_key > 1 and query.shape[2] == value.shape[2]:
                # transformers repeats them until 5.22; the kernels take them as they are.
                query, key = (tensor[:, :, ::values_per_key].contiguous() for tensor in (query, key))
            return rule_of_fla(query, key, value, g, beta, offsets), None
        if query.is_meta:
            return reference(*tensors, **option)
        return for_each_document(lambda *parts: reference(*parts, **option)[0], tensors, offsets), None

    return rule


def kimi_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Kimi's rule by flash-linear-attention's kernels, which compiled code ends for.

    Args and Returns: as of `gated_delta_rule`, with a decay [batch, seq, heads, key_dim].
    """
    tensors = query, key, value, decay, beta
    if query.is_meta:
        return planned_kimi_rule(*tensors)
    from fla.ops.kda import chunk_kda

    if cu_seqlens is None:
        alone: torch.Tensor = chunk_kda(*tensors, use_qk_l2norm_in_kernel=True)[0]
        return alone
    # The kernel takes the documents of one row. It makes tables of the offsets, once for all layers of a pass, and
    # knows them by the tensor itself, so the offsets must not be copied here.
    rows = map(in_one_row, tensors)
    output: torch.Tensor = chunk_kda(*rows, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)[0]
    return output[0].unflatten(0, value.shape[:2])


def state_space_scan(written: Function, kernels: Kernels) -> Function:
    """A function in the place of Mamba-2's scan.

    Args:
        written: transformers' function, which calls the kernel if there is one.
    """

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        reference = reference_of(written)
        if cu_seq_lens_q is None or hidden_states.is_meta:
            serves = kernels.mamba_ssm and not hidden_states.is_meta
            return (written if serves else reference)(hidden_states, dt, A, B, C, **kwargs)
        _check_no_cache(kwargs)
        if kernels.mamba_ssm:
            documents = documents_of_tokens(cu_seq_lens_q, *hidden_states.shape[:2])
            return written(hidden_states, dt, A, B, C, seq_idx=documents, **kwargs)

        def scan_document(hidden: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = reference(hidden, dt, A, B, C, **kwargs)
            return output

        return for_each_document(scan_document, (hidden_states, dt, B, C), cu_seq_lens_q)

    return scan


def fused_scan(written: Function, kernels: Kernels) -> Function:
    """A function in the place of Mamba-2's convolution, scan, norm and output in one kernel.

    It returns None if the layer is to call them one by one.
    """

    def scan(projected: torch.Tensor, *args: Any, cu_seq_lens_q: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if projected.is_meta or not kernels.mamba_ssm:
            return None
        if cu_seq_lens_q is not None:
            kwargs["seq_idx"] = documents_of_tokens(cu_seq_lens_q, *projected.shape[:2])
        return written(projected, *args, **kwargs)

    return scan


def _has_cache(options: dict[str, Any]) -> bool:
    """Whether the layer is given a state to go on from, or asked for its last one."""
    names = ("initial_state", "initial_states", "output_final_state", "return_final_states")
    return any(options.get(name) is not None and options[name] is not False for name in names)


def _check_no_cache(options: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: `_has_cache`.
    """
    if _has_cache(options):
        raise ValueError("a rule that is told documents apart takes no cache")
