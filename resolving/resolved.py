"""The settings with every default decided for this model and these ranks, before any data is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from configs.recipe_file import recipe_for
from configs.run import RunConfig
from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from evaluation.measures import check_best_metric
from policies.activations.checkpointing import Checkpointing, with_default_mode
from policies.activations.offloading import Offloaded
from policies.adapters.folder import find_saved_adapter
from policies.apply_policies import Policies
from policies.attention.choice import keep_documents_apart
from policies.attention.flash_attention_4 import AttentionKind, attention_kinds, find_flash_attention_4
from policies.compilation.choice import decide_compilation, uncompiled
from policies.context_parallel.choice import check_shared_rows, find_context_group, kinds_over_ranks, lengths_to_share
from policies.loading import load_model_config
from policies.mixed_precision import resolve_precision, resolve_saved_dtype, two_in_bf16
from policies.quantization.choice import resolve_quantization
from policies.quantization.float8 import resolve_float8
from policies.routing.coefficient import resolve_coefficient
from policies.sharding import choose_layout
from ranks.environment import Environment
from resolving.batches_and_steps import batch_layout, with_batches
from resolving.beginning import Beginning
from resolving.lengths import resolve_lengths, scale_positions
from resolving.shared_prompts import shares_prompts, with_shared_prompts
from resolving.sizes import check_model_sizes
from tasks.finding import find_task, settings_of_task
from tasks.task import Task
from utils.compat import caps_scores, import_bitsandbytes_without_inductor
from utils.wording import plural

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Resolved:
    """The settings of a run with every default decided. A run trains by it, and a plan is made from it."""

    config: RunConfig  # with the defaults that depend on the task
    task: Task
    model_config: PreTrainedConfig
    batches: BatchLayout
    began_with: Beginning
    lr: float  # the peak learning rate
    policies: Policies
    lengths: tuple[int, ...]  # tokens of the longest row, and of the longest target if targets are apart
    notes: tuple[str, ...]  # lines to print: which defaults were adapted
    saved_dtype: torch.dtype | None  # of the weights in output_dir/model; None: that of training
    chose_to_compile: bool = False  # --compile auto chose to, if layers pass their trial on every rank
    rope: Mapping[str, Any] = field(default_factory=dict)  # values of config.json that the base's own does not have

    @property
    def config_overrides(self) -> dict[str, Any]:
        """All such values that an adapter needs besides its base's config.json."""
        return {**self.rope, **self.task.config_values(self.model_config)}

    @property
    def context_length(self) -> int:
        """Input tokens of the longest row."""
        return self.lengths[0]

    @property
    def widths(self) -> tuple[PaddedWidth, ...]:
        """The padded widths of a micro-batch: of its inputs, and of targets if they are apart."""
        # Ranks that share rows have parts of one length.
        multiple_of = self.config.train_config.pad_to_multiple_of * self.policies.context.size
        return tuple(PaddedWidth(multiple_of, length) for length in self.lengths)

    @property
    def batch_flags(self) -> tuple[str, ...]:
        """The flags of the batches, if --min_steps may have chosen others than the given ones; empty without it."""
        if not self.config.train_config.min_steps:
            return ()
        rows, accumulation = self.batches.rows_per_micro_batch, self.batches.gradient_accumulation_steps
        return ("--batch_size_training", str(rows), "--gradient_accumulation_steps", str(accumulation))

    def to_dict(self) -> dict[str, Any]:
        """The entries of run.yaml's section `resolved` that are known here."""
        packed_length = self.began_with.packed_length
        return {
            "precision": self.policies.precision.name,
            "sharding_strategy": self.policies.layout.strategy,
            "mesh_shape": list(self.policies.layout.mesh_shape),
            "task": self.task.NAME,
            **dict(zip(self.task.LENGTHS, self.lengths, strict=True)),
            "gradient_accumulation_steps": self.batches.gradient_accumulation_steps,
            "global_batch_size": self.batches.global_batch_size,
            "lr": self.lr,
            **({"rope": dict(self.rope)} if self.rope else {}),
            **({"labels": labels} if (labels := self.task.config_values(self.model_config)) else {}),
            **({} if packed_length is None else {"packed_length": packed_length}),
        }


def resolve(
    config: RunConfig,
    env: Environment,
    *,
    resumed_size: int | None = None,
    began_with: Beginning | None = None,
    was_compiled: bool | None = None,
    were_shared: bool | None = None,
) -> Resolved:
    """Decide every setting that depends on the model's config.json or on the machine. Reads no weights and no data.

    Args:
        resumed_size: rows of the global batch of the checkpoint that the run goes on from: it stays as it is.
        began_with: how the run was started first, if it goes on from a checkpoint.
        was_compiled: whether that checkpoint was trained compiled.
        were_shared: whether its pairs share their prompt.

    Raises:
        ConfigError: if a setting cannot hold for this model or on these ranks.
    """
    device = env.device if env.planned_device is None else None  # to try kernels on; a planned one is not here
    if config.train_config.use_peft:
        import_bitsandbytes_without_inductor()  # peft is imported from here on, and imports it
    config = with_default_mode(config, env.device_facts.type)
    context, context_notes = find_context_group(config.fsdp_config.context_parallel_size, env)
    data_parallel_size = env.world_size // context.size
    batches, batch_notes = batch_layout(config.train_config, data_parallel_size, resumed_size)
    if batches.rows_per_micro_batch != config.train_config.batch_size_training:
        config = with_batches(config, batches)
    began_with = began_with or Beginning(data_parallel_size, config.train_config.batch_size_training)
    if config.train_config.limit_train_batches:
        # Counted in the micro-batches that the run began with: an epoch keeps its length on other ranks.
        rows = config.train_config.limit_train_batches * began_with.rows_per_micro_batch
        batches = replace(batches, max_rows_per_epoch=rows)
    lr, lr_notes = resolve_lr(config.train_config, began_with)
    precision, precision_notes = resolve_precision(config.train_config, config.fsdp_config, env.device_facts)
    layout = choose_layout(config.train_config, config.fsdp_config, precision, env)
    if layout.kind == "fully_shard":
        accumulation = batches.gradient_accumulation_steps
        precision = two_in_bf16(precision, config.train_config, config.fsdp_config, layout.mesh_shape, accumulation)
    quantization = resolve_quantization(config.quantization_config, precision, layout, device)
    if config.train_config.from_peft_checkpoint:
        find_saved_adapter(config.train_config.from_peft_checkpoint)  # refuses a wrong path before the hub is asked
    model_config = load_model_config(config.train_config, needs_weights=env.planned_device is None)
    base_dtype = cast("torch.dtype | None", model_config.dtype)  # building the model puts that of training there
    task = find_task(model_config, config.train_config.task).for_run(config)
    task.check_config(model_config, config.train_config.model_name)
    check_best_metric(config.train_config, task)
    is_causal_task = task.PACKS and not task.READS_IMAGES and task.HEAD == "tokens"
    check_shared_rows(context, config, model_config, is_causal_task=is_causal_task)
    config = keep_documents_apart(
        settings_of_task(config, task, model_config), model_config, precision, env.device_facts
    )
    config = with_default_targets(config, model_config)
    router_coefficient, router_notes = resolve_coefficient(
        config.train_config.router_aux_loss_coef, model_config, task.AUTO_MODEL, config.train_config.model_name
    )
    is_open = config.train_config.compile is None
    config = decide_compilation(
        config,
        model_config,
        env.device_facts,
        was_compiled=was_compiled,
        is_planned=env.planned_device is not None,
    )
    chose_to_compile = is_open and bool(config.train_config.compile)
    rope, rope_notes = scale_positions(config.train_config, config.prefix_config, model_config, task.LENGTHS)
    lengths, length_notes = resolve_lengths(config.train_config, config.prefix_config, model_config, task.LENGTHS)
    lengths, share_notes = lengths_to_share(lengths, context, asked=config.train_config.context_length)
    check_model_sizes(config, model_config, lengths[0], env)
    task, prompt_notes = with_shared_prompts(
        task, config, model_config, precision, env.device_facts, lengths[0], were_shared=were_shared
    )
    flash_4, flash_notes = find_flash_attention_4(
        device,
        precision,
        kinds_over_ranks(_attention_kinds(config.train_config, task, model_config), context),
    )
    float8 = resolve_float8(
        config.train_config,
        precision,
        layout,
        [PaddedWidth(config.train_config.pad_to_multiple_of, length // context.size) for length in lengths],
        env.device_facts,
        device,
    )
    saved_dtype, save_notes = resolve_saved_dtype(config.train_config, base_dtype, precision)
    return Resolved(
        config=config,
        task=task,
        model_config=model_config,
        batches=batches,
        began_with=began_with,
        lr=lr,
        policies=Policies(
            precision,
            quantization,
            layout,
            float8,
            compile_is_tried=chose_to_compile,
            flash_4=flash_4,
            context=context,
            router_aux_loss_coef=router_coefficient,
        ),
        lengths=lengths,
        rope=rope,
        notes=(
            *precision_notes,
            *batch_notes,
            *lr_notes,
            *_recipe_notes(config, task),
            *rope_notes,
            *length_notes,
            *context_notes,
            *share_notes,
            *flash_notes,
            *save_notes,
            *router_notes,
            *prompt_notes,
        ),
        saved_dtype=saved_dtype,
        chose_to_compile=chose_to_compile,
    )


def _recipe_notes(config: RunConfig, task: Task) -> list[str]:
    """A line on the recipe for such a run, if neither a recipe nor a learning rate was given."""
    is_open = config.recipe is None and not config.was_given("train_config.lr")
    if not is_open or task.NAME != "causal_lm" or config.train_config.random_weights:
        return []
    name = recipe_for(config)
    return [f"lr: {config.train_config.lr:g}, as in llama-recipes; --config {name} has measured settings"]


def _attention_kinds(train: TrainConfig, task: Task, model_config: PreTrainedConfig) -> set[AttentionKind]:
    """The kinds of attention that FlashAttention 4 might serve; none if the model's attention needs more."""
    prefixed = train.use_peft and train.peft_method == "prefix"  # in a cache, which takes masks
    is_text = task.packs(model_config) and not task.READS_IMAGES
    is_asked = is_text and train.use_fast_kernels is not False and not (prefixed or caps_scores(model_config))
    kinds = attention_kinds(model_config, packed=train.batching_strategy == "packing") if is_asked else set()
    if shares_prompts(task):
        kinds |= {kind._replace(shares_keys=True) for kind in kinds if kind.packed}
    return kinds


def with_choice(
    resolved: Resolved,
    checkpointing: Checkpointing | None,
    offloaded: Offloaded | None = None,
    num_replicated: int | None = None,
) -> Resolved:
    """The settings with what a plan chose: checkpointing, offloading, replicated layers; None: the flags decide."""
    policies = resolved.policies._replace(checkpointing=checkpointing, offloaded=offloaded)
    if num_replicated is not None:
        policies = policies._replace(layout=replace(policies.layout, num_replicated=num_replicated))
    return replace(resolved, policies=policies)


def without_compiling(resolved: Resolved, why: str) -> Resolved:
    """The settings uncompiled, as --compile auto asks if a layer, or one of the ranks, cannot be compiled.

    Args:
        why: as a clause.
    """
    return replace(
        resolved,
        config=uncompiled(resolved.config, why),
        policies=resolved.policies._replace(compile_is_tried=False),
        chose_to_compile=False,
    )


def resolve_lr(train: TrainConfig, began_with: Beginning) -> tuple[float, list[str]]:
    """The peak learning rate, and lines to print: --lr, scaled with the ranks that the run began with."""
    world_size, scale = began_with.world_size, train.lr_scale_with_world_size
    if scale == "none":
        return train.lr, []
    lr = train.lr * (world_size if scale == "linear" else math.sqrt(world_size))
    return lr, [f"lr: {lr:g}, {train.lr:g} scaled with {plural(world_size, 'rank')} ({scale})"]


def with_default_targets(config: RunConfig, model_config: PreTrainedConfig) -> RunConfig:
    """The settings with the layers that LoRA adapts in models with this config, if none were named."""
    train, given = config.train_config, config.was_given("lora_config.target_modules")
    if not train.use_peft or train.peft_method != "lora" or train.from_peft_checkpoint or given:
        return config
    from policies.adapters.targets import default_targets  # peft takes seconds to import

    targets = default_targets(model_config, config.lora_config.target_modules)
    if targets == config.lora_config.target_modules:
        return config
    note = (
        f"--lora_config.target_modules is {','.join(targets)} with a {model_config.get_text_config().model_type} model"
    )
    return replace(config, lora_config=replace(config.lora_config, target_modules=targets), notes=(*config.notes, note))
