"""torch.compile, one layer at a time, since one graph serves all equal layers; and how its errors are handled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn

from policies.tiling.compiled import AROUND_TILES, compile_around_tiles
from policies.tiling.tiles import tiled_parts
from utils.cudnn_attention import tag_of_kernels
from utils.errors import ConfigError, RunError, in_one_line
from utils.memory_errors import what_ran_out


class CompilationError(RunError):
    """Something does not compile. The first step shows it, when the code is first called, perhaps on one rank."""


RECOMPILE_LIMIT = 64
"""The most graphs of one function, which torch would run as it is, without a word, for anything after its 8th.

All layers share transformers' function around their forward, and graphs differ for each kind of layer, its first one
(whose input may need no gradient), each kind of batch, and for training and evaluation. T5 had 8 after two steps.
"""

OFFSETS_OF_ROWS = r".*((cu_seq_lens|max_length)_[qk]|key_places)"
"""The arguments of a layer, as a pattern, that differ from batch to batch of packed rows: how many sequences it holds,
the longest, and the keys of sequences that share some. One graph serves them all."""


class EagerFallback:
    """Calls compiled code, or all code as it was written once compiling is given up.

    One object serves all compiled code of a run, the vision encoder's aside: most obstacles lie in the machine, not in
    one function.

    torch's `torch._dynamo.config.suppress_errors` would print tracebacks, try each function inside the one that failed,
    and miss errors of code compiled for backward.

    Args:
        say: prints a line about the compiler's first error, which gives compiling up; None: it ends the call instead.
        what: goes on uncompiled then, for that line.
    """

    def __init__(self, say: Callable[[str], None] | None, what: str = "the run") -> None:
        self._say, self._what, self._is_given_up = say, what, False
        self._found: list[str] | None = None

    def give_up(self) -> None:
        """From now on call all code as it was written."""
        self._is_given_up = True

    @contextmanager
    def trying(self) -> Iterator[list[str]]:
        """A context in which the compiler's errors go to the list that it gives, without a word.

        As long as the list has an entry, all code is called as it was written: other ranks, which go on, enter the same
        collectives.
        """
        self._found = []
        try:
            yield self._found
        finally:
            self._found = None

    def around(self, compiled: Callable[..., Any], written: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls one of these, which compute the same."""

        @functools.wraps(written)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_given_up or self._found:
                return written(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except RuntimeError as error:
                if not is_of_compiler(error) or not self._goes_on(reason_of(error)):
                    raise
            return written(*args, **kwargs)

        return call

    def _goes_on(self, reason: str) -> bool:
        if self._found is not None:
            self._found.append(reason)
            return True
        if self._say is None:
            return False
        self.give_up()
        self._say(f"--compile auto: {self._what} goes on uncompiled: torch.compile failed ({reason})")
        return True


def compile_layers(
    layers: Sequence[nn.Module],
    norms: Sequence[nn.Module] = (),
    *,
    widths_vary: bool,
    fallback: EagerFallback | None = None,
) -> None:
    """Compile each layer at its first call.

    Args:
        norms: compiled too, each alone (`policies.wrapping.find_outer_norms`).
        widths_vary: batches differ in width, so one graph is to serve them all. Otherwise torch would compile for the
            first batch alone, and for any width when the second comes.
        fallback: if one does not compile; None: torch's error ends the call.

    Raises:
        ConfigError: if there is none.
    """
    if not layers:
        raise ConfigError("--compile: this model names no repeated layers, which are what is compiled; leave it out")
    set_compiler(falls_back=fallback is not None)
    # None and not False: sizes that change later may still become dynamic, as offsets of rows do.
    dynamic = widths_vary or None

    def compiled(written: Callable[..., Any]) -> Callable[..., Any]:
        function = torch.compile(written, dynamic=dynamic, options={**AROUND_TILES})
        return function if fallback is None else fallback.around(function, written)

    for module in (*layers, *norms):
        if tiled := tiled_parts(module):
            compile_around_tiles(module, tiled, compiled)
        if module._compiled_call_impl is None:
            module.compile(dynamic=dynamic, options={**AROUND_TILES} if tiled else None)
        call: Any = module._compiled_call_impl
        if any(parameter.requires_grad for parameter in module.parameters()):
            call = _with_gradient(call)
        module._compiled_call_impl = call if fallback is None else fallback.around(call, module._call_impl)


def set_compiler(*, falls_back: bool) -> None:
    """Set torch's compiler as layers need it. Since torch 2.12 its settings are those of the thread that sets them.

    Args:
        falls_back: code that does not compile is to run as it was written.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # DistributedDataParallel reduces a bucket while others are computed, since each layer is compiled by itself. torch
    # would also split each layer's graph by buckets, and compile it again, unsplit, where backward recomputes it: then
    # the recomputed tensors are others than those that were kept, which ends the run.
    torch._dynamo.config.optimize_ddp = False
    # Where widths vary, torch would make LoRA's scaling, too, an input: a tensor on the CPU, for whose arithmetic it
    # builds C++ kernels. On a GPU's machine that takes a minute, if there is a C++ compiler.
    torch._dynamo.config.specialize_float = True
    torch.compiler.config.dynamic_sources = OFFSETS_OF_ROWS
    torch.compiler.config.cache_key_tag = tag_of_kernels()
    # For graphs of whole models torch bans recomputing what ends a chain of a hundred operators. In a layer's graph
    # that keeps the inputs of an adapter after dropout: of Llama-3.1-8B 28 KiB per token and layer, a quarter of all.
    functorch.ban_recompute_long_fusible_chains = False
    if falls_back:
        # Code for backward is compiled with that for forward: later, nothing else could take its place.
        functorch.force_non_lazy_backward_lowering = True
    if torch.are_deterministic_algorithms_enabled():
        # torch sets it in the thread that enables them. A reduction's kernel is then not chosen by the time it takes.
        torch._inductor.config.deterministic = True


def set_compiler_in_backward(device: torch.device, *, falls_back: bool) -> None:
    """`set_compiler` in the thread where autograd works for a GPU: it recomputes layers, and compiles tiles anew.

    torch 2.12 and 2.13 would otherwise have their defaults there, 8 graphs of one function among them
    (https://github.com/pytorch/pytorch/issues/186537).
    """
    number = torch.zeros((), device=device, requires_grad=True) * 1.0
    number.register_hook(lambda _: set_compiler(falls_back=falls_back))
    number.backward()


def _with_gradient(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled call of a layer with trained weights, whose hidden states always need a gradient in training.

    Those of the first layer need none behind frozen embeddings, and torch would compile a graph of its own for that. So
    one layer computes a gradient that nobody reads: with LoRA on a Llama, three products of its seven in backward.
    """
    unread = torch.zeros((), requires_grad=True)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else None
        if torch.is_grad_enabled() and isinstance(states, torch.Tensor) and states.is_floating_point():
            args = (states if states.requires_grad else _GradientUnread.apply(states, unread), *args[1:])
        return compiled(*args, **kwargs)

    return call


class _GradientUnread(torch.autograd.Function):
    """The same numbers, which need a gradient; it is dropped.

    A detached tensor that needs one would stay in memory until backward ends, where activations are offloaded, too: the
    graph keeps the tensors whose gradients it stores.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return states.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def compile_for_any_rows(
    function: Callable[..., torch.Tensor],
    *,
    written: Callable[..., torch.Tensor],
    fallback: EagerFallback | None = None,
) -> Callable[..., torch.Tensor]:
    """The function, compiled once for any number of rows of its tensors: the first two arguments, and others by name.

    Args:
        written: computes the same, and runs as it is for less than two rows: torch compiles anew for the sizes 0 and 1.
        fallback: if it does not compile; None: torch's error ends the call.
    """
    compiled = torch.compile(function)
    if fallback is not None:
        compiled = fallback.around(compiled, written)

    @functools.wraps(written)
    def call(first: torch.Tensor, second: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if len(first) < 2:
            return written(first, second, **kwargs)
        for tensor in (first, second, *filter(torch.is_tensor, kwargs.values())):
            # maybe_: mark_dynamic would raise an error if torch specializes the size after all.
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(first, second, **kwargs)

    return call


def is_of_compiler(error: RuntimeError) -> bool:
    """Whether torch.compile raised this error because it could not compile. Memory that ran out is another matter."""
    dynamo = sys.modules.get("torch._dynamo.exc")  # importing it takes a second, and nothing else raises its errors
    return dynamo is not None and isinstance(error, dynamo.TorchDynamoException) and what_ran_out(error) is None


def num_compiled() -> int:
    """How many frames torch.compile has compiled in this process. Recompilations count again."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    return 0 if dynamo is None else dynamo.counters["frames"]["ok"]


def reason_of(error: Exception) -> str:
    """An error of the compiler in one line, without torch's advice on how to see more of it."""
    return in_one_line(str(error).partition("\nSet TORCHDYNAMO_VERBOSE=")[0]) or type(error).__name__


@contextmanager
def compilation_named(what: str, flag: str) -> Iterator[None]:
    """A context around calls of compiled code: an error of torch.compile leaves it as CompilationError, in one line.

    If contexts are nested, the innermost names the error. Memory that ran out is no error of the compiler, and passes:
    the out-of-memory report accounts for it.

    Args:
        what: the code that is compiled, for the message.
        flag: the flag that compiles it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_compiler(error):
            raise
        raise CompilationError(
            f"{flag}: torch.compile failed on {what} ({reason_of(error)}); give {flag} False "
            "(TORCH_LOGS=+dynamo,+inductor shows where it failed)"
        ) from error
