"""How busy the experts of a mixture are: counted in training for the loss that evens them out, and in evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from data.batches.counts import BatchCounts
from policies.routing.balancing import RouterInputs, WatchedRouter, watch
from policies.routing.routers import Router

SHARES = "routing.expert_shares"  # its name in a checkpoint


class Routing:
    """The routers of a model; without routers all methods do nothing."""

    def __init__(
        self, routers: Sequence[Router] = (), *, coefficient: float = 0.0, device: torch.device | str = "cpu"
    ) -> None:
        """
        Args:
            routers: of `policies.routing.routers.find_routers`; their forwards are replaced.
            coefficient: of the loss; 0: it is not computed.
            device: that computes.
        """
        self.coefficient = coefficient if routers else 0.0
        self._evaluated_tokens = 0
        self._num_loss_terms = 0.0
        self._inputs = RouterInputs(torch.zeros(0, dtype=torch.bool, device=device))
        shape = (len(routers), routers[0].num_experts if routers else 0)
        num_chosen = routers[0].num_chosen if routers else 0
        # f of the last step; before the first one, equal for all.
        self.shares = torch.full(shape, num_chosen / max(1, shape[1]), dtype=torch.float64, device=device)
        self._pulls = torch.zeros(shape, device=device)  # without the factor that the loss's gradient has
        self._scaled_pulls = torch.zeros(shape, device=device)
        self._scale = 0.0

        def zeros() -> torch.Tensor:
            return torch.zeros(shape[1], dtype=torch.float64, device=device)

        self._watched = [
            WatchedRouter(router, self._inputs, pull, zeros().requires_grad_(), zeros())
            for router, pull in zip(routers, self._scaled_pulls, strict=True)
        ]
        for watched in self._watched:
            watch(watched)

    @contextmanager
    def step(self, counts: BatchCounts) -> Iterator[None]:
        """A context for one optimizer step. Every rank must call this.

        The loss is `coefficient` times the mean over layers, and over the step's tokens without padding.

        Args:
            counts: of the global batch.
        """
        if not self.coefficient:
            yield
            return
        num_layers, num_experts = self.shares.shape
        factor = self.coefficient * num_experts / num_layers / max(1, counts.num_tokens)
        self._pulls.copy_(self.shares * factor)
        self._num_loss_terms, self._scale = max(1.0, counts.num_loss_terms), 0.0
        yield
        chosen = torch.stack([self._taken(watched) for watched in self._watched])
        dist.all_reduce(chosen)
        if counts.num_tokens:
            self.shares.copy_(chosen / counts.num_tokens)

    def watching(self, summed_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss of a task, or its sums of an evaluation, during which the routers are watched.

        With gradients enabled, backward of the result also brings the gradient of the routers' loss. The result itself
        is the task's loss alone.
        """
        if not self._watched:
            return summed_loss

        def loss(model: Any, batch: Any, *loss_grad: float | None) -> torch.Tensor:
            with self._watching(batch, *loss_grad):
                return summed_loss(model, batch, *loss_grad)

        return loss

    @contextmanager
    def _watching(self, batch: Any, loss_grad: float | None = None) -> Iterator[None]:
        inputs, evaluates = self._inputs, not torch.is_grad_enabled()
        if evaluates:
            self._evaluated_tokens += batch.num_tokens
        elif self.coefficient:
            # Backward multiplies by the loss's gradient, which is per term of it; that of the routers' is per token.
            self._scale_pulls((1.0 if loss_grad is None else loss_grad) * self._num_loss_terms)
        if evaluates or self.coefficient:
            self._note_tokens(batch)
            inputs.mode = "evaluation" if evaluates else "training"
        try:
            yield
        finally:
            if evaluates:
                inputs.mode = "off"

    @contextmanager
    def trying(self, batch: Any) -> Iterator[None]:
        """A context in which layers compute as in training, over this batch alone. Nothing of it is counted."""
        if self.coefficient:
            self._note_tokens(batch)
            self._inputs.mode = "training"
        try:
            yield
        finally:
            self._inputs.mode = "off"
            for watched in self._watched:
                watched.trained.grad = None

    def _scale_pulls(self, scale: float) -> None:
        if scale != self._scale:  # once per step
            torch.mul(self._pulls, scale, out=self._scaled_pulls)
            self._scale = scale

    def _note_tokens(self, batch: Any) -> None:
        """Note which positions of the flattened [batch x seq] are tokens, in memory that compiled graphs know."""
        is_token = self._is_token(batch).flatten()
        if len(self._inputs.is_token) < len(is_token):
            # Of few sizes, since graphs are made for one.
            size = 1 << (len(is_token) - 1).bit_length()
            self._inputs.is_token = is_token.new_zeros(size)
        self._inputs.is_token[: len(is_token)].copy_(is_token)

    @staticmethod
    def _is_token(batch: Any) -> torch.Tensor:
        """Bool [batch, seq], False at padding."""
        rows, width = batch.text_ids.shape
        if batch.row_lengths is None:
            return torch.ones(rows, width, dtype=torch.bool, device=batch.text_ids.device)
        places = torch.arange(width, device=batch.text_ids.device)
        is_token: torch.Tensor = places < batch.row_lengths.unsqueeze(-1)
        return is_token

    @staticmethod
    def _taken(watched: WatchedRouter) -> torch.Tensor:
        """The tokens of this rank's step that chose each expert, and 0 from now on."""
        counted, watched.trained.grad = watched.trained.grad, None
        return torch.zeros_like(watched.evaluated) if counted is None else counted

    def take_loads(self) -> dict[str, float]:
        """The figures of the evaluation that has ended (`reporting.expert_line`). Every rank must call this."""
        if not self._watched:
            return {}
        chosen = torch.stack([watched.evaluated for watched in self._watched])
        # The number of tokens is one more entry, so that one sum over ranks does.
        sums = torch.cat([chosen.flatten(), chosen.new_tensor([self._evaluated_tokens])])
        dist.all_reduce(sums)
        self._evaluated_tokens = 0
        for watched in self._watched:
            watched.evaluated.zero_()
        shares = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        router = self._watched[0].router
        places = range(len(shares))
        busiest = self._figures("busiest", shares, max(places, key=shares.__getitem__))
        idlest = self._figures("idlest", shares, min(places, key=shares.__getitem__))
        return busiest | idlest | {"equal_expert_share": router.num_chosen / router.num_experts}

    def _figures(self, name: str, shares: Sequence[float], place: int) -> dict[str, float]:
        """The share, layer and number of one expert. `place` counts all layers' experts."""
        layer, expert = divmod(place, self._watched[0].router.num_experts)
        figures = {"_share": shares[place], "_layer": self._watched[layer].router.layer, "": expert}
        return {f"{name}_expert{of}": figure for of, figure in figures.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state that a checkpoint keeps, the same on every rank."""
        return {SHARES: self.shares} if self.coefficient else {}
