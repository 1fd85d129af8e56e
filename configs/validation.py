"""All conflicts between settings. World size, devices and files are checked later, where they are known."""

from typing import Any

from configs.adaptation import SHARED_FIELDS, why_not_compiled, why_optimizer_not_compiled
from configs.adapter_validation import check_what_is_trained
from configs.data_validation import check_data
from configs.names import find, flag
from configs.optimizers import OPTIMIZERS, SETTINGS_OF_SOME, optimizers_with
from configs.preference_validation import check_preferences
from configs.run import SETTINGS, RunConfig
from utils.errors import ConfigError
from utils.urls import refuse_url

# Values allowed without --enable_fsdp, because such a run acts by them anyway.
_HOLDS_WITHOUT_FSDP: dict[str, tuple[Any, ...]] = {
    "train_config.low_cpu_fsdp": (None, False),
    "fsdp_config.sharding_strategy": ("NO_SHARD",),
    "fsdp_config.hsdp": (None, False),
    "fsdp_config.accumulate_unsharded": (None, True),
    "fsdp_config.num_replicated_layers": (None, "auto", 0),
    "fsdp_config.direct_collectives": (False,),
    "fsdp_config.fsdp_activation_checkpointing": (None, False),
    "fsdp_config.wrap": (("layer",),),
    "fsdp_config.fsdp_cpu_offload": (False,),
}


def validate(config: RunConfig) -> None:
    """Check that the settings fit together.

    Raises:
        ConfigError: for the first conflict.
    """
    check_what_is_trained(config)
    _check_precision(config)
    _check_layout(config)
    _check_optimizer(config)
    _check_batches_and_schedule(config)
    check_data(config)
    check_preferences(config)
    _check_evaluation_and_results(config)
    _check_generation(config)
    _check_places(config)
    _check_recording(config)
    _check_planning(config)


def _check_precision(config: RunConfig) -> None:
    train, fsdp = config.train_config, config.fsdp_config
    for field in SHARED_FIELDS:
        ours, theirs = config.value(f"train_config.{field}"), config.value(f"fsdp_config.{field}")
        if ours != theirs:
            raise ConfigError(
                f"--{field}: train_config says {ours} and fsdp_config says {theirs}; give one --{field} for both"
            )
    if fsdp.pure_bf16 and train.use_fp16:
        raise ConfigError("--pure_bf16: cannot be combined with --use_fp16 True; leave one of them out")
    if train.use_fp16 and train.mixed_precision is False:
        raise ConfigError(
            "--use_fp16: True cannot be combined with --mixed_precision False, which computes in fp32; "
            "leave one of them out"
        )
    if fsdp.pure_bf16 and train.mixed_precision:
        raise ConfigError("--pure_bf16: cannot be combined with --mixed_precision True; leave one of them out")


def _check_layout(config: RunConfig) -> None:
    fsdp = config.fsdp_config
    is_hybrid = fsdp.sharding_strategy == "HYBRID_SHARD"
    if fsdp.hsdp not in (None, is_hybrid):
        raise ConfigError(
            f"--hsdp: {fsdp.hsdp} cannot be combined with --sharding_strategy {fsdp.sharding_strategy}; "
            "leave one of them out"
        )
    for field in ("sharding_group_size", "replica_group_size"):
        if getattr(fsdp, field) and not is_hybrid:
            raise ConfigError(f"--{field}: there are groups only under HYBRID_SHARD; add --hsdp, or leave this out")
    if not config.train_config.enable_fsdp:
        for name, values in _HOLDS_WITHOUT_FSDP.items():
            if config.was_given(name) and config.value(name) not in values:
                value = config.value(name)
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise ConfigError(f"{flag(name)}: {shown} needs --enable_fsdp; add it, or leave this out")
    if isinstance(fsdp.num_replicated_layers, int) and fsdp.num_replicated_layers:
        train = config.train_config
        frozen = (train.use_peft, train.freeze_layers, train.freeze_vision, train.freeze_qformer)
        if not any((*frozen, train.freeze_language_model)):
            raise ConfigError("--num_replicated_layers: this run trains all weights, so none is frozen; leave this out")
        if fsdp.sharding_strategy == "NO_SHARD":
            raise ConfigError("--num_replicated_layers: NO_SHARD keeps all weights whole; leave one of them out")
        if fsdp.fsdp_cpu_offload:
            raise ConfigError(
                "--num_replicated_layers: --fsdp_cpu_offload keeps weights in host memory; leave one of them out"
            )
    if fsdp.direct_collectives and fsdp.sharding_strategy == "NO_SHARD":
        raise ConfigError("--direct_collectives: NO_SHARD gathers no weights; leave one of them out")
    if fsdp.direct_collectives and fsdp.fsdp_cpu_offload:
        raise ConfigError(
            "--direct_collectives: --fsdp_cpu_offload keeps weights in host memory; leave one of them out"
        )
    if fsdp.accumulate_unsharded is False and fsdp.sharding_strategy == "NO_SHARD":
        raise ConfigError("--accumulate_unsharded: False has no effect under NO_SHARD; leave one of them out")
    if fsdp.accumulate_unsharded and fsdp.reduce_dtype == "bf16":
        raise ConfigError(
            "--accumulate_unsharded: True would add the gradients of micro-batches in bf16, as --reduce_dtype bf16 "
            "reduces them; leave one of them out"
        )
    if not fsdp.wrap or (len(fsdp.wrap) > 1 and {"layer", "root"} & {*fsdp.wrap}):
        raise ConfigError(f"--wrap: {','.join(fsdp.wrap)!r} is neither layer nor root nor names of classes; give one")
    train = config.train_config
    if train.num_offloaded_layers is not None and train.activation_offloading is not True:
        remedy = "leave this out" if train.activation_offloading else "add it, or leave this out"
        raise ConfigError(f"--num_offloaded_layers: needs --activation_offloading True; {remedy}")
    if fsdp.fsdp_cpu_offload and fsdp.optimizer_cpu_offload:
        raise ConfigError(
            "--optimizer_cpu_offload: --fsdp_cpu_offload already keeps the optimizer states in host memory; "
            "leave one of them out"
        )


def _check_optimizer(config: RunConfig) -> None:
    train, fsdp = config.train_config, config.fsdp_config
    name = fsdp.optimizer
    for field in SETTINGS_OF_SOME:
        (dotted,), owners = find(field), optimizers_with(field)
        value = config.value(dotted)
        # A switch that is off asks for nothing, so no optimizer refuses it.
        if name in owners or not config.was_given(dotted) or value is None or value is False:
            continue
        lacking = f"only {owners[0]} has it" if len(owners) == 1 else f"{name} has none"
        raise ConfigError(f"--{field}: {lacking}; add --optimizer {owners[0]}, or leave this out")
    if fsdp.compile_optimizer and (reason := why_optimizer_not_compiled(config)) is not None:
        raise ConfigError(f"--compile_optimizer: {reason}; leave one of them out")
    if not train.decay_norms_and_biases and not train.weight_decay:
        raise ConfigError("--decay_norms_and_biases: nothing decays with --weight_decay 0; give one, or leave this out")
    for field, conflict in OPTIMIZERS[name].conflicts.items():
        if config.value(*find(field)):
            raise ConfigError(f"--{field}: {conflict}")


def _check_batches_and_schedule(config: RunConfig) -> None:
    train = config.train_config
    if train.neftune_noise_alpha and config.fsdp_config.context_parallel_size > 1:
        raise ConfigError(
            "--neftune_noise_alpha: noise depends on whole sequences, of which ranks with --context_parallel_size have "
            "parts; leave one of them out"
        )
    if train.loss_type == "dft" and train.label_smoothing:
        raise ConfigError("--label_smoothing: --loss_type dft weighs each token by its own probability; give one")
    if train.timeout_seconds not in (None, train.step_timeout_seconds):
        raise ConfigError(
            f"--timeout_seconds: {train.timeout_seconds} cannot be combined with --step_timeout_seconds "
            f"{train.step_timeout_seconds}, which it is short for; leave one of them out"
        )
    if train.global_batch_size is not None and config.was_given("train_config.gradient_accumulation_steps"):
        raise ConfigError("--global_batch_size: it sets --gradient_accumulation_steps; leave one of them out")
    if config.was_given("train_config.gamma") and train.scheduler != "step":
        raise ConfigError(f"--gamma: only --scheduler step uses it, not {train.scheduler}; leave one of them out")
    if train.warmup_steps and train.warmup_ratio:
        raise ConfigError("--warmup_ratio: it sets --warmup_steps; leave one of them out")
    if train.min_lr > train.lr:
        raise ConfigError(f"--min_lr: {train.min_lr:g} is above --lr {train.lr:g}, from where it would fall; lower it")
    if train.min_lr and train.scheduler == "constant":
        raise ConfigError("--min_lr: lr never falls with --scheduler constant; leave one of them out")
    if config.was_given("train_config.gradient_clipping_threshold") and not train.gradient_clipping:
        raise ConfigError("--gradient_clipping_threshold: nothing is clipped without --gradient_clipping; add it")


def _check_evaluation_and_results(config: RunConfig) -> None:
    train = config.train_config
    if train.eval_every_steps and train.evals_per_epoch:
        raise ConfigError("--evals_per_epoch: it sets --eval_every_steps; leave one of them out")
    if train.evals_per_epoch and config.streams:
        raise ConfigError("--evals_per_epoch: the steps of a stream's epoch are not known; give --eval_every_steps")
    for field in ("eval_every_steps", "evals_per_epoch", "eval_before_training", "early_stopping_patience"):
        if getattr(train, field) and train.run_validation is False:
            raise ConfigError(f"--{field}: nothing is evaluated with --run_validation False; leave one of them out")
    if train.dist_checkpoint_root_folder is None:
        if train.save_optimizer:
            raise ConfigError(
                "--save_optimizer: it applies only to the copy in --dist_checkpoint_root_folder; "
                "add that folder, or leave this out (checkpoints always hold the optimizer)"
            )
        if config.was_given("train_config.dist_checkpoint_folder"):
            raise ConfigError(
                "--dist_checkpoint_folder: it is a subfolder of --dist_checkpoint_root_folder; add that too"
            )
    if train.keep_best and train.run_validation is False:
        raise ConfigError("--keep_best: nothing is evaluated with --run_validation False; leave one of them out")
    if train.resume_anyway and train.resume is False:
        raise ConfigError("--resume_anyway: cannot be combined with --resume False; leave one of them out")
    if train.resume and train.overwrite:
        raise ConfigError(
            "--resume: cannot be combined with --overwrite, which starts a new run; leave one of them out"
        )


def _check_generation(config: RunConfig) -> None:
    train = config.train_config
    if train.eval_generate and train.run_validation is False:
        raise ConfigError("--eval_generate: nothing is evaluated with --run_validation False; leave one of them out")
    if config.was_given("train_config.top_p") and not train.temperature:
        raise ConfigError("--top_p: nothing is drawn without --temperature; add it, or leave this out")
    if train.temperature and train.num_beams > 1:
        raise ConfigError("--temperature: beams are searched, not drawn; leave --num_beams or this out")
    if "choice" in train.eval_metric and config.fsdp_config.context_parallel_size > 1:
        raise ConfigError("--eval_metric: choice takes whole rows, not those of --context_parallel_size; leave one out")
    if train.eval_json_schema is not None and "json" not in train.eval_metric:
        raise ConfigError("--eval_json_schema: only --eval_metric json reads it; add that, or leave this out")
    if train.eval_generate:
        return
    for field in ("num_beams", "max_new_tokens", "max_generate_samples", "eval_metric", "temperature"):
        if config.was_given(f"train_config.{field}"):
            raise ConfigError(f"--{field}: nothing is generated without --eval_generate; add it, or leave this out")


def _check_places(config: RunConfig) -> None:
    """Refuse URLs as folders that are written. A local folder of that name is not what was meant."""
    train = config.train_config
    refuse_url("--output_dir", train.output_dir or "")
    refuse_url("--dist_checkpoint_root_folder", train.dist_checkpoint_root_folder or "")
    refuse_url("--dist_checkpoint_folder", train.dist_checkpoint_folder)
    refuse_url("--profiler_dir", config.tracking_config.profiler_dir or "")


def _check_recording(config: RunConfig) -> None:
    tracking = config.tracking_config
    if config.train_config.compile and (reason := why_not_compiled(config)) is not None:
        raise ConfigError(f"--compile: {reason}; leave one of them out")
    if tracking.flop_counter and tracking.use_profiler:
        raise ConfigError("--flop_counter: cannot count while --use_profiler records; leave one of them out")
    if tracking.flop_counter and config.fsdp_config.compile_optimizer:
        raise ConfigError("--flop_counter: cannot count inside compiled code; leave --compile_optimizer or this out")
    for name, needed in (("flop_counter_start", "flop_counter"), ("profiler_dir", "use_profiler")):
        if getattr(tracking, name) != SETTINGS[f"tracking_config.{name}"].default and not getattr(tracking, needed):
            raise ConfigError(f"--{name}: nothing is recorded without --{needed}; add it, or leave this out")


def _check_planning(config: RunConfig) -> None:
    planning = config.planning_config
    for field in ("dry_run_hardware", "nodes", "device_memory_gib", "host_memory_gib", "dry_run_json"):
        if getattr(planning, field) is not None and not planning.dry_run:
            raise ConfigError(f"--{field}: a run takes the machines that it finds; add --dry_run, or leave this out")
    if planning.network_speeds is not None and planning.network_gbps is not None:
        raise ConfigError("--network_speeds: holds what was measured, and --network_gbps would say otherwise; give one")
    if planning.load_only and planning.dry_run:
        raise ConfigError("--load_only: cannot be combined with --dry_run, which loads nothing; leave one of them out")
    if planning.load_only and config.train_config.resume:
        raise ConfigError("--load_only: loads what a new run would, and no checkpoint; leave it or --resume out")
