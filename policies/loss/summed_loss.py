"""The loss: summed cross-entropy, computed in chunks of tokens so that whole logits are never held.

Logits of a long batch are often the largest tensor of a run ([batch x seq, vocab] in fp32: 8 x 2048 tokens of a
128k vocabulary are 8 GiB, and their gradient as much again).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from data.tokens.labels import IGNORE_INDEX
from policies.compilation.layers import compilation_named
from policies.loss.distillation import summed_divergence
from policies.loss.head_gradients import loss_with_gradients
from policies.loss.objectives import Objective, loss_by_objective, token_losses
from policies.only_some import only_some


class PositionsError(RuntimeError):
    """A model whose positions are not those of its text."""


class CrossEntropy(Protocol):
    """A function like `summed_cross_entropy`."""

    def __call__(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        label_smoothing: float = 0.0,
        *,
        by_probability: bool = False,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def summed_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    by_probability: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the cross-entropy over label tokens: fp32 scalar; 0, with zero gradients, if there is none.

    Args:
        logits: [tokens, vocab], any floating dtype.
        targets: [tokens], the token that each position predicts; -100 = no label.
        label_smoothing: the share of each target that is spread evenly over the vocabulary (Szegedy et al., "Rethinking
            the Inception Architecture", 2016), as transformers' LabelSmoother does.
        by_probability: multiply each token's loss by the token's own probability, as a constant: dynamic fine-tuning
            (Wu et al., "On the Generalization of SFT", 2025, arXiv 2508.05629, equation 9). Without smoothing only.
        weights: fp32 [tokens], factors of each token's loss; None: 1.
    """
    compute = partial(F.cross_entropy, logits.float(), targets, ignore_index=IGNORE_INDEX)
    if not by_probability and weights is None:
        return compute(reduction="sum", label_smoothing=label_smoothing)
    losses = compute(reduction="none", label_smoothing=label_smoothing)  # 0 where there is no label
    if by_probability:
        losses = losses * (-losses.detach()).exp()
    return (losses if weights is None else losses * weights).sum()


class WantedTokens(NamedTuple):
    """What some positions have to predict."""

    ids: torch.Tensor  # int64 [tokens], -100 = no label
    weights: torch.Tensor | None = None  # fp32 [tokens]
    teacher_ids: torch.Tensor | None = None  # int64 [tokens, k]
    teacher_logprobs: torch.Tensor | None = None  # fp32 [tokens, k]

    def split(self, size: int) -> list[WantedTokens]:
        """As torch.split, along the tokens."""
        count = len(self.ids.split(size))
        fields = ([None] * count if field is None else field.split(size) for field in self)
        return [WantedTokens(*parts) for parts in zip(*fields, strict=True)]


@dataclass
class LossChunks:
    """The chunks of a model's loss: its `loss_chunks`, if it is a sum over tokens."""

    only_some: bool = False  # see `some_chunks`

    def left_out(self, number: int) -> range:
        """The places of those, of so many, that are not computed."""
        return range(2, number - 2) if self.only_some else range(0)


def some_chunks(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside this context a sum computes four chunks, two at each end: the last one may be smaller than the others."""
    chunks: LossChunks | None = getattr(model, "loss_chunks", None)
    return only_some([] if chunks is None else [chunks])


def use_summed_loss(
    model: PreTrainedModel,
    backbone: Sequence[nn.Module],
    chunk_size: int,
    compute_logits: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor],
    *,
    label_smoothing: float = 0.0,
    by_probability: bool = False,
    teacher_weight: float = 0.0,
    cross_entropy: CrossEntropy = summed_cross_entropy,
) -> None:
    """Make `model(..., targets=targets)` return the summed loss alone; a call without targets is as before.

    `targets` ([n]) holds the token to predict at each of `target_positions` ([n], indices into the flattened
    [batch x seq] of the backbone's output; unset: at every position). Other positions never reach the head: of a
    dialogue with its summary, nine tenths. `target_weights`, `teacher_ids` and `teacher_logprobs` belong to these
    targets (`WantedTokens`). They count in training only.

    The forward of this one instance is replaced, inside whatever later wraps it, because sharded weights are whole
    only while their module's own forward runs. All code is the model's own. Its forward is called once with the
    inputs, up to the backbone's output, and then for each chunk with that output given (`_Backbone`). So what a
    model does between encoder and decoder, and logit scaling or soft-capping after them, are never forgotten.

    If gradients are enabled, they are computed with the loss (see `policies.loss.head_gradients`). `loss_grad` is the
    gradient of the loss that `backward` will bring. Gradients in fp16 need to know it: without the loss scale, small
    ones would be rounded to zero. `objective` makes another loss of the targets' losses, in place of their sum
    (`policies.loss.objectives`).

    Without gradients, `reduction="none"` returns the loss of each target, fp32 [n]; `reduction="figures"` sums over the
    targets, fp64 [3]: of the loss, of targets that are most likely, and of entropies; and `top_k` the logarithms of the
    largest probabilities at each target, fp32 [n, top_k], and their tokens.

    Args:
        model: a transformers model whose head runs on the backbone's output alone.
        backbone: the submodules that compute the head's input; the last returns it (`tasks.task.Task.backbone`).
        chunk_size: tokens whose logits are held at a time; 0 computes all at once.
        compute_logits: the logits of this output of the backbone (`tasks.task.Task`).
        label_smoothing, by_probability: see `summed_cross_entropy`; in training only, so that evaluations can be
            compared.
        teacher_weight: the share of the loss that is the divergence from the teacher (`policies.loss.distillation`),
            if targets have one; the rest is cross-entropy.
        cross_entropy: computes what `summed_cross_entropy` does; compiled, it reads and writes a chunk's logits once.
    """
    own_forward, decoder, cut = model.forward, _Backbone(backbone[-1]), LossChunks()
    model.loss_chunks = cut  # type: ignore[assignment]
    in_training: dict[str, Any] = {"label_smoothing": label_smoothing, "by_probability": by_probability}
    # The logits of routers, for a loss that is not computed there (policies/routing/), would only be kept.
    collects = getattr(model.config.get_text_config(), "output_router_logits", False)
    unused = {"output_router_logits": False} if collects else {}

    def loss_of(logits: torch.Tensor, wanted: WantedTokens) -> torch.Tensor:
        weights: dict[str, Any] = {} if wanted.weights is None else {"weights": wanted.weights}
        loss = cross_entropy(logits, wanted.ids, **(in_training if model.training else {}), **weights)
        if wanted.teacher_ids is None or wanted.teacher_logprobs is None or not teacher_weight:
            return loss
        teacher = wanted.teacher_ids, wanted.teacher_logprobs
        return (1 - teacher_weight) * loss + teacher_weight * summed_divergence(logits, wanted.ids, *teacher, **weights)

    # generate() looks at the signature of forward.
    @functools.wraps(own_forward)
    def forward(
        *args: Any,
        targets: torch.Tensor | None = None,
        target_positions: torch.Tensor | None = None,
        target_weights: torch.Tensor | None = None,
        teacher_ids: torch.Tensor | None = None,
        teacher_logprobs: torch.Tensor | None = None,
        loss_grad: float | None = None,
        reduction: Literal["sum", "none", "figures"] = "sum",
        objective: Objective | None = None,
        top_k: int = 0,
        labels: torch.Tensor | None = None,  # peft hands it on, None where it was not given
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            given = {} if labels is None else {"labels": labels}
            return own_forward(*args, **given, **kwargs)
        hidden = decoder.output_of(lambda: own_forward(*args, **unused, **kwargs))
        _check_positions(model, hidden, kwargs)
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        if target_positions is not None:
            hidden = hidden[:, target_positions]

        def logits_of(hidden_chunk: torch.Tensor) -> torch.Tensor:
            with decoder.returning(hidden_chunk):
                logits: torch.Tensor = compute_logits(model, hidden_chunk)
            return logits.squeeze(0)  # not [0], whose backward copies the gradient

        wanted = (
            WantedTokens(targets, target_weights, teacher_ids, teacher_logprobs)
            if model.training
            else WantedTokens(targets)
        )
        size = chunk_size or max(1, targets.numel())  # an empty micro-batch has no targets; split() needs 1 at least
        chunks = list(zip(hidden.split(size, dim=1), wanted.split(size), strict=True))
        plain = [(inputs, part.ids) for inputs, part in chunks]
        if top_k:
            found = [logits_of(h).float().log_softmax(-1).topk(top_k) for h, _ in chunks]
            return torch.cat([values for values, _ in found]), torch.cat([ids for _, ids in found])
        if reduction == "none":
            return token_losses(plain, logits_of)
        with compilation_named("the cross-entropy", "--compile"):
            if objective is not None:
                return loss_by_objective(hidden, plain, logits_of, cross_entropy, objective, loss_grad)
            left_out = cut.left_out(len(chunks))
            if torch.is_grad_enabled():
                return loss_with_gradients(hidden, chunks, logits_of, loss_of, loss_grad, left_out)
            chunks = [chunk for place, chunk in enumerate(chunks) if place not in left_out]
            if reduction == "figures":
                return torch.stack([_figures(logits_of(inputs), part, loss_of) for inputs, part in chunks]).sum(0)
            return torch.stack([loss_of(logits_of(inputs), part) for inputs, part in chunks]).sum()

    model.forward = forward


def _figures(
    logits: torch.Tensor, wanted: WantedTokens, loss_of: Callable[[torch.Tensor, WantedTokens], torch.Tensor]
) -> torch.Tensor:
    """Sums over the targets of a chunk, fp64 [3]: the loss, how many are most likely, and entropies in nats."""
    is_label = wanted.ids != IGNORE_INDEX
    entropies = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    # No label is -100. The largest of NaNs would be token 0.
    num_right = ((logits.argmax(-1) == wanted.ids) & entropies.isfinite()).sum()
    return torch.stack([loss_of(logits, wanted).double(), num_right.double(), (entropies * is_label).sum().double()])


def _check_positions(model: nn.Module, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Check that the backbone's output has the positions of the text, to which `target_positions` points.

    Raises:
        PositionsError: if not, as with models that put an image's positions in front of the text's.
    """
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if ids is not None and hidden.shape[:2] != ids.shape:
        raise PositionsError(
            f"it computes {hidden.shape[1]} positions for a text of {ids.shape[1]} tokens, so labels would meet other "
            "positions than their own"
        )


class _Hidden(BaseModelOutputWithPast):
    """A backbone's output whose other fields are None, whichever of them the head's code asks for."""

    def __getattr__(self, name: str) -> None:
        # Python asks for special names, and takes None for a method that is there.
        if name.startswith("__"):
            raise AttributeError(name)


class _Backbone:
    """Replaces the forward of the backbone's last module, once, so that its output can be taken out or put in.

    Outside `output_of` and `returning` it computes what it did before.
    """

    def __init__(self, module: nn.Module) -> None:
        self._given: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] | None = None
        compute = module.forward

        @functools.wraps(compute)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return _Hidden(last_hidden_state=self._given)
            if self._outputs is None:
                return compute(*args, **kwargs)
            output: torch.Tensor = compute(*args, **kwargs)[0]
            self._outputs.append(output)
            return _Hidden(last_hidden_state=output[:, :0].detach())  # the head after it computes nothing

        module.forward = forward

    def output_of(self, run: Callable[[], Any]) -> torch.Tensor:
        """The module's output while `run` runs, [batch, seq, hidden_size]. The head gets no position at all."""
        outputs: list[torch.Tensor] = []
        self._outputs = outputs
        try:
            run()
        finally:
            self._outputs = None
        (hidden,) = outputs
        return hidden

    @contextmanager
    def returning(self, hidden: torch.Tensor) -> Iterator[None]:
        """Inside this context the module returns `hidden`, [1, tokens, hidden_size], and computes nothing."""
        self._given = hidden
        try:
            yield
        finally:
            self._given = None
