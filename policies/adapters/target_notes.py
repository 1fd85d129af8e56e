"""Lines to print about what LoRA adapts: experts, layers that all-linear leaves out, and weights that are shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from configs.peft import ALL_LINEAR, LoraConfig
from policies.adapters.expert_targets import find_expert_weights, holder_of, other_experts
from policies.adapters.peft_names import first_of, is_named, last_part
from policies.adapters.targets import Targets, choose_targets, find_all_linear, language_modules
from policies.experts.finding import find_experts
from policies.wrapping import has_tied_embeddings
from utils.device import DeviceFacts
from utils.wording import plural


def target_notes(model: PreTrainedModel, lora: LoraConfig, device: DeviceFacts) -> list[str]:
    """All lines on `target_modules`.

    Raises:
        ConfigError: as `choose_targets`.
    """
    targets = choose_targets(model, lora)
    notes = [*_notes_on_experts(targets, lora, device), *_rest_of_experts(model, targets)]
    if lora.target_modules == (ALL_LINEAR,):
        notes += [*_left_out_notes(model, lora), *_experts_left_out(model, lora)]
    return [*notes, *tied_notes(model, lora.target_modules)]


def _notes_on_experts(targets: Targets, lora: LoraConfig, device: DeviceFacts) -> Iterator[str]:
    if not targets.experts:
        return
    num_layers = len({name.rpartition(".")[0] for name in targets.experts})
    millions = sum(weight.num_weights for weight in targets.experts.values()) / 1e6
    yield f"target_modules: experts of {plural(num_layers, 'layer')}, {millions:,.1f} million weights"
    if lora.lora_dropout:
        yield f"lora_dropout {lora.lora_dropout:g}: of linear layers' inputs alone; peft has none for experts"
    if device.type == "cuda" and not device.has_grouped_products:
        yield "LoRA on experts: below compute capability 9.0 torch multiplies one expert after the other, and is slow"


def _rest_of_experts(model: PreTrainedModel, targets: Targets) -> Iterator[str]:
    """A line if experts are adapted in part: a dense model's names match their `down_proj` alone."""
    holders, weights = set(map(holder_of, targets.experts)), find_expert_weights(model, language_modules(model))
    rest = {n: w for n, w in weights.items() if holder_of(n) in holders and n not in targets.experts}
    if rest:
        millions = sum(weight.num_weights for weight in rest.values()) / 1e6
        yield (
            f"target_modules: {', '.join(sorted(set(map(last_part, rest))))} of these experts gets no adapter, "
            f"{millions:,.1f} million weights; name it too, or experts"
        )


def _experts_left_out(model: PreTrainedModel, lora: LoraConfig) -> Iterator[str]:
    """A line for experts that all-linear leaves out."""
    start, inside = f"target_modules {ALL_LINEAR}: leaves out", language_modules(model)
    if lora.use_dora and find_experts(model):
        yield f"{start} the experts, since DoRA takes linear layers only"
    if others := other_experts(model, inside):
        millions = sum(parameter.numel() for parameter in others.values()) / 1e6
        yield (
            f"{start} experts with {millions:,.1f} million weights, {first_of(list(others))}, whose products "
            f"{model.config.model_type} models compute by code of their own"
        )


def tied_notes(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """A line for an adapter on an embedding or a head that share a weight."""
    if not has_tied_embeddings(model):
        return []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    return [
        f"LoRA on {names[adapted]}: {names[other]} shares its weight and gets no adapter; merged, the model stores two "
        "weights"
        for adapted, other in ((embedding, head), (head, embedding))
        if any(is_named(names[adapted], target) for target in targets)
    ]


def _left_out_notes(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """A line for linear layers that all-linear leaves out, for each of three reasons."""
    taken, of_experts, renamed, uncalled = found = find_all_linear(model, lora)
    start, total, kind = f"target_modules {ALL_LINEAR}: leaves out", sum(map(len, found)), model.config.model_type
    notes = []
    if of_experts:
        names = ", ".join(sorted(set(map(last_part, of_experts))))
        notes.append(
            f"{start} {len(of_experts)} of {total} linear layers, those called {names}, since peft takes these names "
            f"of {kind} models for the experts"
        )
    if renamed and taken:  # else the run is refused
        notes.append(
            f"{start} {len(renamed)} of {total} linear layers, {first_of(renamed)}, since peft renames them when it "
            f"loads an adapter of {kind} models, and would not find them"
        )
    if uncalled:
        names = ", ".join(sorted(set(map(last_part, uncalled))))
        notes.append(
            f"{start} {len(uncalled)} of {total} linear layers, those called {names}, since other modules "
            "multiply their weights (a Mamba layer's kernel, a router in fp32), past an adapter"
        )
    return notes
