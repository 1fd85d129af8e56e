"""Experts of which files hold a tensor each, read as the one parameter that the model has for all of them.

Mixtures are published so (Qwen3-MoE, DeepSeek-V3, OLMoE). transformers merges them while it reads the whole model. Its
rules are followed here for one parameter at a time, so each rank reads its own experts alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from policies.weights.stored import SafetensorsTensors, Stored

_MERGED, _CONCATENATED = ("MergeModulelist",), ("MergeModulelist", "Concatenate")
"""The steps of rules that are known here: stack experts; and put the tensors of each below one another."""


class StoredExperts(NamedTuple):
    """A parameter [experts, out, in] of which files hold the parts."""

    key: str  # the model's name
    experts: tuple[tuple[Stored, ...], ...]  # of each the tensors [., in] that lie below one another

    @property
    def path(self) -> Path:
        return self.experts[0][0].path

    @property
    def paths(self) -> set[Path]:
        return {tensor.path for tensors in self.experts for tensor in tensors}

    def read(self, file: Any, part: tuple[slice, ...] = (), device: torch.device | str = "cpu") -> torch.Tensor:
        """As `Stored.read`; only the experts of the part are read."""
        experts = self.experts[part[0]] if part else self.experts
        others = {tensor.path for tensors in experts for tensor in tensors} - {self.path}
        with ExitStack() as stack:
            files = {self.path: file}
            files |= {path: stack.enter_context(safe_open(path, framework="pt")) for path in others}
            whole = torch.empty(0)
            for index, tensors in enumerate(experts):
                matrix = torch.cat([tensor.read(files[tensor.path]) for tensor in tensors])
                if not index:
                    whole = matrix.new_empty((len(experts), *matrix.shape))
                whole[index] = matrix
        return whole[(slice(None), *part[1:])]


def merging_rules(model: PreTrainedModel) -> dict[str, list[str]]:
    """The ends of names in files, with `*` for the number of an expert, by the end of the model's name."""
    rules: dict[str, list[str]] = {}
    for rule in get_model_conversion_mapping(model):
        steps = getattr(rule, "operations", None) or []
        kinds = tuple(type(step).__name__ for step in steps)
        if kinds not in (_MERGED, _CONCATENATED) or [step.dim for step in steps] != [0, 1][: len(steps)]:
            continue
        sources, targets = list(rule.source_patterns), list(rule.target_patterns)
        if len(targets) == 1 and all(source.count("*") == 1 for source in sources):
            rules[targets[0]] = sources
    return rules


def find_experts_stored(
    rules: dict[str, list[str]], name: str, shape: tuple[int, ...], files: SafetensorsTensors
) -> StoredExperts | None:
    """The parts of a model's parameter in files; None if they do not hold it so.

    Args:
        rules: `merging_rules` of the model.
        shape: the parameter's.
    """
    target = next((target for target in rules if name.endswith(target)), None)
    if target is None or len(shape) != 3:
        return None
    ends, prefix = rules[target], name.removesuffix(target)
    names = [[prefix + end.replace("*", str(index)) for end in ends] for index in range(shape[0])]
    entries = [[files.index.get(key) for key in of_expert] for of_expert in names]
    for of_expert in entries:
        found = [entry for entry in of_expert if entry is not None and entry.dtype.is_floating_point]
        if len(found) < len(ends) or any(len(entry.shape) != 2 or entry.shape[1] != shape[2] for entry in found):
            return None
        if sum(entry.shape[0] for entry in found) != shape[1]:
            return None
    return StoredExperts(name, tuple(tuple(files.place_of(key) for key in of_expert) for of_expert in names))
