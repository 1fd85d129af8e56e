"""Causal convolutions of packed rows: a document's first tokens do not see the last ones of the document before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from policies.linear_attention.kernels import Kernels
from policies.linear_attention.planned import planned_convolution
from policies.linear_attention.rows import documents_of_tokens, reference_of

Convolution = Callable[..., torch.Tensor]


def convolution(written: Convolution, kernels: Kernels) -> Convolution:
    """A function in the place of transformers' `causal_conv1d_fn`.

    Args:
        written: transformers' function. On a CPU, too, it would call a kernel that is installed.
    """

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if hidden_states.is_meta:
            if kernels.fla or kernels.causal_conv1d:
                return planned_convolution(hidden_states, weight)
            return reference_of(written)(hidden_states, weight, bias, activation)
        arguments = (hidden_states, weight, bias, activation)
        if torch.compiler.is_compiling() and any(kernels):
            return convolution_by_shifts(*arguments, cu_seq_lens_q)
        if kernels.causal_conv1d:
            return _by_causal_conv1d(*arguments, cu_seq_lens_q)
        if kernels.fla:
            return _by_fla(*arguments, cu_seq_lens_q)
        if cu_seq_lens_q is None:
            return reference_of(written)(*arguments)
        return convolution_with_gaps(reference_of(written), *arguments, cu_seq_lens_q)

    return convolve


def _by_causal_conv1d(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    from causal_conv1d import causal_conv1d_fn

    rows, _, length = hidden.shape
    # With seq_idx the kernel takes channels that lie side by side.
    hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
    documents = None if cu_seqlens is None else documents_of_tokens(cu_seqlens, rows, length)
    output: torch.Tensor = causal_conv1d_fn(hidden, weight, bias, seq_idx=documents, activation=activation)
    return output


def _by_fla(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    from fla.modules.convolution import causal_conv1d

    rows, channels, length = hidden.shape
    tokens = hidden.transpose(1, 2)
    if cu_seqlens is not None:
        tokens = tokens.reshape(1, rows * length, channels)
    output: torch.Tensor
    output, _ = causal_conv1d(tokens, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
    return output.reshape(rows, length, channels).transpose(1, 2)


def convolution_by_shifts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """The convolution as a sum over its taps of the tokens before, in fp32. Compiled it is one kernel, with what
    surrounds it; a package's kernel ends compiled code, and has the weight's gradient even if nothing trains it.

    The sum is rounded before the activation, as transformers' is: compiled code keeps it for backward.

    Args:
        hidden: [batch, channels, seq].
        weight: [channels, width].
        cu_seqlens: int32 [documents + 1] in the flattened [batch x seq]; None: each row is a document.

    Returns:
        [batch, channels, seq].
    """
    rows, _, length = hidden.shape
    documents = None if cu_seqlens is None else documents_of_tokens(cu_seqlens, rows, length)
    wide, taps = hidden.float(), weight.float()
    output = wide * taps[:, -1, None]
    for back in range(1, weight.shape[-1]):
        earlier = F.pad(wide, (back, 0))[..., :length]
        if documents is not None:
            is_same = documents == F.pad(documents, (back, 0), value=-1)[:, :length]
            earlier = torch.where(is_same[:, None], earlier, 0.0)
        output = output + earlier * taps[:, -1 - back, None]
    if bias is not None:
        output = output + bias.float()[:, None]
    output = output.to(hidden.dtype)
    return F.silu(output) if activation else output


def convolution_with_gaps(
    convolve: Convolution,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """The convolution of all rows in one, with zeros between documents, as they are before the first one.

    Args:
        convolve: the causal convolution of a row, `[1, channels, seq]`.
        hidden: [batch, channels, seq].
        weight: [channels, width].
        cu_seqlens: int32 [documents + 1] in the flattened [batch x seq].

    Returns:
        [batch, channels, seq].
    """
    rows, channels, length = hidden.shape
    gap = weight.shape[-1] - 1
    tokens = hidden.transpose(0, 1).reshape(channels, rows * length)
    places = torch.arange(rows * length, device=hidden.device)
    places = places + gap * documents_of_tokens(cu_seqlens, rows, length).flatten()
    with_gaps = tokens.new_zeros(channels, rows * length + gap * (cu_seqlens.shape[0] - 2))
    output = convolve(with_gaps.index_copy(1, places, tokens)[None], weight, bias, activation)[0]
    return output.index_select(1, places).view(channels, rows, length).transpose(0, 1)
