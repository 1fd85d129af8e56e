"""Layers that pass a state from token to token, told where the documents of a packed row begin.

Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid), Kimi Delta Attention and Mamba-2 have a causal convolution and a
recurrent rule. transformers (5.17 to 5.23 at least) writes all of them alike: the layer's forward calls functions of
its module, by the names below, and hands each of them the row's offsets among its keyword arguments. Of those functions
the convolution ignores the offsets, and so do Kimi's rule and Mamba-2's; the others take them of one row alone.

So each such layer gets its own forward, with other functions under these names. Nothing of transformers is changed:
other models of the process keep theirs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from policies.linear_attention.convolution import convolution
from policies.linear_attention.delta_rule_kernel import gated_delta_rule
from policies.linear_attention.kernels import Kernels
from policies.linear_attention.rows import reference_of
from policies.linear_attention.rules import delta_rule, fused_scan, kimi_delta_rule, state_space_scan

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": kimi_delta_rule,
}
"""transformers' names of them, and each by flash-linear-attention's kernels."""

SCAN_OF_MAMBA_1 = "mamba_selective_scan"
SCAN, FUSED_SCAN = "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"
_OF_ONE_TOKEN = {
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    "mamba2_selective_state_update",
}
_REPLACED = {CONVOLUTION, *DELTA_RULES, SCAN, FUSED_SCAN, *_OF_ONE_TOKEN}


def state_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that can be told where documents begin; none if it has others with a state, too."""
    kinds = _kinds(type(module) for module in model.modules()) or set()
    return [module for module in model.modules() if type(module) in kinds]


def packages_of(model_class: type[nn.Module]) -> set[str] | None:
    """The packages whose kernels tell documents apart in such models; None if nothing does in one of their layers."""
    kinds = _kinds(_classes_beside(model_class))
    if not kinds:
        return None
    called = {name for kind in kinds for name in _functions_of(kind)}
    packages = {"fla"} if called & DELTA_RULES.keys() else set()
    return packages | ({"mamba_ssm", "causal_conv1d"} if SCAN in called else set())  # which the former calls


def packages_against_loops(model_class: type[nn.Module]) -> set[str]:
    """The packages without whose kernels layers of such models loop over tokens, or chunks of them, in Python."""
    called = {name for kind in _classes_beside(model_class) for name in _functions_of(kind)}
    return ({"fla"} if called & DELTA_RULES.keys() else set()) | ({"mamba_ssm"} if SCAN_OF_MAMBA_1 in called else set())


def tell_documents_apart(layers: Iterable[nn.Module], kernels: Kernels) -> None:
    """Give each of these layers a forward whose functions take the offsets of documents."""
    forwards: dict[type, FunctionType] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in forwards:
            written = inspect.unwrap(kind.forward)
            values_per_key = getattr(layer, "num_v_heads", 1) // getattr(layer, "num_k_heads", 1)
            own = {
                name: _own_function(name, written.__globals__[name], kernels, values_per_key)
                for name in _functions_of(kind)
            }
            forwards[kind] = _with_functions(written, own)
        layer.forward = MethodType(forwards[kind], layer)


def _own_function(name: str, written: Callable[..., Any], kernels: Kernels, values_per_key: int) -> Callable[..., Any]:
    if name in _OF_ONE_TOKEN:  # for a cache; on a CPU, too, it would call a kernel that is installed
        return written if any(kernels) else reference_of(written)
    if name == CONVOLUTION:
        return convolution(written, kernels)
    if name == SCAN:
        return state_space_scan(written, kernels)
    if name == FUSED_SCAN:
        return fused_scan(written, kernels)
    return delta_rule(written, DELTA_RULES[name], kernels, values_per_key)


def _with_functions(written: Any, own: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same code, which finds these functions under their names, and all else where it was.

    A copy of it: torch.compile keeps what it compiled with the code, and stores the names that this needs in one scope.
    """
    # Without its module's name torch.compile looks names up in this scope, and not in the module.
    scope = {name: value for name, value in written.__globals__.items() if name != "__name__"} | dict(own)
    function = FunctionType(
        written.__code__.replace(), scope, written.__name__, written.__defaults__, written.__closure__
    )
    function.__kwdefaults__ = written.__kwdefaults__
    return function


def _classes_beside(model_class: type[nn.Module]) -> Iterator[type]:
    """The classes of the same module of transformers."""
    return filter(inspect.isclass, vars(sys.modules[model_class.__module__]).values())


def _kinds(classes: Iterable[type]) -> set[type] | None:
    """Those of them that are layers with a state; None if one calls other functions than those that are replaced."""
    called = {kind: names for kind in set(classes) if (names := _functions_of(kind))}
    return None if any(names - _REPLACED for names in called.values()) else set(called)


def _functions_of(kind: type) -> set[str]:
    """The functions with a kernel in some package that a layer with a state calls; none of another module."""
    forward: Any = getattr(kind, "forward", None)
    written = inspect.unwrap(forward)
    code, scope = getattr(written, "__code__", None), getattr(written, "__globals__", {})
    names = set(code.co_names if code else ())
    # transformers wraps such functions, around the one that it wrote in plain torch; it leaves out LFM3's.
    found = {name for name in names if name in _REPLACED or hasattr(scope.get(name), "__wrapped__")}
    return found & scope.keys() if CONVOLUTION in names else set()
