"""The proof that a compiled layer computes what it was written to: it is run both ways, forward and backward.

Its arguments are those of a batch of the run, so what is compiled here is what the run goes on with.

How far apart two correct computations are is no constant: a gradient may be a small difference of large sums. So the
layer is run as written twice, the second time on hidden states moved by one rounding. The compiled layer may be FACTOR
times as far from the first run as the second one is, and ROUNDINGS of its numbers' dtype besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from policies.compilation.layer_calls import LayerCall
from policies.compilation.layers import num_compiled
from policies.compilation.routing import RouterChoices, near_ties
from utils.local_tensors import local_tensor
from utils.seeding import seed_everything

FACTOR = 2.0

ROUNDINGS = 2

FINEST = 2.0**-16
"""The finest rounding that is looked for, relative. On GPUs products in fp32 may be in TF32, and compiled kernels
approximate functions otherwise; a mistake in what is computed is larger."""

NOISY = 16.0
"""Roundings by which dropout may move outputs in a comparison that means anything. Adapters that were just made add
nothing to them; a model's own dropout moves them by far more."""

SHARE_APART = 1e-3
"""Of the tokens so many may be further apart: one may have changed its experts in spite of `near_ties`."""

MOST_IN_DOUBT = 0.95
"""The largest share of tokens whose experts a rounding may change."""


def difference_compiled(
    call: LayerCall, dtype: torch.dtype, on_any: Callable[[bool], bool] = lambda found: found
) -> str | None:
    """What is wrong if the compiled layer is further from the written one than roundings explain, as a clause. Every
    rank must call this for the same layers, in the same order.

    It leaves no gradients, and other states of random generators.

    Args:
        dtype: that products are computed in. Hidden states may be kept in a finer one.
        on_any: whether it was found on any of the ranks that the layer needs to compute (shards of weights, shared
            rows): one that tried once more by itself would wait for them.
    """
    trial = _Trial(call, dtype)
    if on_any(trial.is_noisy()):
        # Without its dropout the layer is another graph, and so compiled once more.
        with _evaluated(call.layer):
            trial = _Trial(call, dtype)
    return trial.difference()


def run_both_ways(call: LayerCall) -> None:
    """Run the layer forward and backward, so that it is compiled. It leaves no gradients."""
    _results(call, call.states(), _random_like)


def num_compiled_again(call: LayerCall) -> int:
    """The graphs that a compiled layer needs for other values of its hidden states, once it has met some. It is 0 for
    a layer that does not branch by its values. Every rank must call this.
    """
    states = call.states()
    # All tokens go to the experts of one.
    _results(call, [state[..., :1, :].expand_as(state).contiguous() for state in states], _random_like)
    before = num_compiled()
    _results(call, [state.flip(-2) for state in states], _random_like)
    return num_compiled() - before


class _Trial:
    """A layer's runs in its present mode, and how far apart they are."""

    def __init__(self, call: LayerCall, dtype: torch.dtype) -> None:
        states = call.states()
        self._unit = max(FINEST, *(torch.finfo(each).eps for each in (dtype, *(state.dtype for state in states))))
        moved = [_moved(state, self._unit) for state in states]
        with torch.compiler.set_stance("force_eager"):
            self._near = _near_ties(call, states, moved)
            written = _results(call, states, self._output_gradient)
            other = _results(call, moved, self._output_gradient, seed=1)
        self._sizes = _distances(written)
        self._noise = _distances(written, other)
        del other
        self._apart = _distances(written, _results(call, states, self._output_gradient))

    def _output_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Random; 0 for tokens whose experts may change, so that they take no part in any gradient."""
        gradient = _random_like(output)
        rows = gradient.view(-1, gradient.shape[-1])
        if len(rows) == len(self._near):
            rows[self._near] = 0
        return gradient

    def is_noisy(self) -> bool:
        """Whether the outputs of the layer as it was written move by more than roundings explain."""
        most = {name: NOISY * self._unit * size for name, size in self._sizes.items() if name.startswith("output")}
        return any(bool(self._is_beyond(self._noise[name], allowed).any()) for name, allowed in most.items())

    def difference(self) -> str | None:
        """What is wrong, as a clause: the first result that is too far apart."""
        in_doubt = float(self._near.float().mean())
        if in_doubt > MOST_IN_DOUBT:
            return f"cannot be compared: one rounding may change the experts of {in_doubt:.0%} of its tokens"
        for name, size in self._sizes.items():
            apart, allowed = self._apart[name], FACTOR * self._noise[name] + ROUNDINGS * self._unit * size
            # A number that the layer itself does not have is asked of no compiled one.
            is_wrong = self._is_beyond(apart, allowed) & size.isfinite()
            if is_wrong.any():
                worst = int((apart / size).nan_to_num(nan=torch.inf).masked_fill(~is_wrong, -1.0).argmax())
                found, explained = (float(values[worst] / size[worst]) for values in (apart, allowed))
                away = f"{name} is {found:.2g} of its size away, of which rounding explains {explained:.2g}"
                return f"computes something else if it is compiled: {away}"
        return None

    def _is_beyond(self, apart: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Which of them are, if they are more than a few tokens."""
        beyond = ~(apart <= allowed)
        if len(beyond) == len(self._near):
            beyond &= ~self._near
        return beyond & (beyond.sum() > int(SHARE_APART * len(beyond)))


def _near_ties(call: LayerCall, states: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which of the layer's output tokens may change their experts: bool [tokens]."""
    found = []
    for seed, values in enumerate((states, moved)):
        seed_everything(seed)
        with torch.no_grad(), RouterChoices() as router:
            output = call.with_states(values).outputs()[0]
        found.append(router.found)
    return near_ties(found[0], found[1], output.numel() // output.shape[-1]).to(output.device)


def _results(
    call: LayerCall,
    states: Sequence[torch.Tensor],
    gradient_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """The layer's outputs, and its gradients, of which parameters keep none.

    Args:
        states: its hidden states.
        gradient_of: the gradient of an output.
    """
    seed_everything(seed)
    leaves = [state.detach().requires_grad_(call.needs_gradient) for state in states]
    with torch.enable_grad():
        outputs = call.with_states([leaf.clone() for leaf in leaves]).outputs()  # no leaves, as in the model
        if trained := [output for output in outputs if output.requires_grad]:
            torch.autograd.backward(trained, [gradient_of(output) for output in trained])
    gradients = {f"gradient of states {place}": leaf.grad for place, leaf in enumerate(leaves)}
    for name, parameter in call.layer.named_parameters():
        gradients[f"gradient of {name}"], parameter.grad = parameter.grad, None
    found = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
    return found | {name: local_tensor(gradient) for name, gradient in gradients.items() if gradient is not None}


def _random_like(output: torch.Tensor) -> torch.Tensor:
    # Small, for fp16: sums over tokens must not overflow.
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, generator=generator, device=output.device).mul_(2.0**-6).to(output.dtype)


def _moved(state: torch.Tensor, unit: float) -> torch.Tensor:
    """The hidden states, each number moved up or down by one rounding."""
    generator = torch.Generator(state.device).manual_seed(1)
    ups = torch.randint(0, 2, state.shape, generator=generator, device=state.device, dtype=torch.int8)
    return (state * (1 + unit * (2.0 * ups - 1))).to(state.dtype)


def _distances(
    written: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The norms of differences, or of the results themselves: of a parameter's gradient as a whole, else by token."""
    found = {}
    for name, tensor in written.items():
        difference = tensor if other is None else tensor - other[name]
        is_by_token = name.startswith(("output", "gradient of states "))
        rows = difference.reshape(-1, difference.shape[-1] if is_by_token else difference.numel())
        found[name] = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    return found


@contextmanager
def _evaluated(layer: nn.Module) -> Iterator[None]:
    """Inside this context the layer is in the mode of evaluations, without dropout."""
    trained = [module for module in layer.modules() if module.training]
    layer.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
