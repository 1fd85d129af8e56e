"""Conflicts between settings, and settings that follow from others."""

import shlex

import pytest

from configs.flags import parse_flags
from configs.run import SETTINGS, RunConfig
from configs.training import TrainConfig
from configs.validation import validate
from configs.values import convert
from utils.errors import ConfigError


def parse(line: str = "") -> RunConfig:
    return parse_flags(["--model_name", "M", *shlex.split(line)])


PREFIX = "--use_peft --peft_method prefix --batching_strategy padding"


@pytest.mark.parametrize(
    ("line", "start", "remedy"),
    [
        *(
            (f"--split_slice 1% {given}", "--quantization: quantized weights cannot be trained", "add --use_peft")
            for given in (
                "--quantization True --use_fp16 False",
                "--quantization True --use_fp16 True",
                "--quantization 8bit --enable_fsdp",
                "--quantization",
            )
        ),
        *(
            (f"--use_peft {given}", f"{given.split()[0]}: nothing is quantized without --quantization", "add it")
            for given in ("--quant_type fp4", "--use_double_quant", "--compute_dtype bf16", "--quant_storage uint8")
        ),
        ("--use_peft --quantization False --quant_type nf4", "--quant_type: nothing is quantized", "leave this out"),
        (
            "--use_peft --quantization 8bit --quant_type nf4",
            "--quant_type: 8bit has no such choice",
            "--quantization 4bit",
        ),
        (
            "--use_peft --quantization 8bit --use_double_quant",
            "--use_double_quant: 8bit has no such choice",
            "--quantization 4bit",
        ),
        ("--dataset chat_dataset --mask_prompt False", "--mask_prompt: chat_dataset has no such", "leave this out"),
        *(
            (
                f"--{name}.data_path {url}{more}",
                f"--{name}.data_path: {url} is a URL",
                "download it and give the file",
            )
            for name, url, more in (
                ("samsum_dataset", "https://a.b/c.json", ""),
                ("samsum_dataset", "s3://bucket/train.jsonl", ""),
                ("custom_dataset", "hf://datasets/a/b", " --dataset custom_dataset"),
            )
        ),
        ("--optimizer SGD --adam_beta1 0.8", "--adam_beta1: SGD has none", "AdamW"),
        ("--optimizer Adafactor --adam_beta2 0.95", "--adam_beta2: Adafactor has none", "AdamW"),
        ("--min_lr 1e-3", "--min_lr: 0.001 is above --lr 0.0001", "lower it"),
        ("--warmup_ratio 0.1 --warmup_steps 5", "--warmup_ratio: it sets --warmup_steps", "leave one of them out"),
        ("--evals_per_epoch 2 --eval_every_steps 5", "--evals_per_epoch: it sets --eval_every_steps", "leave one"),
        ("--evals_per_epoch 2 --run_validation False", "--evals_per_epoch: nothing is evaluated", "leave one"),
        (
            "--samsum_dataset.streaming --max_train_step 5 --evals_per_epoch 3",
            "--evals_per_epoch: the steps of a stream's epoch are not known",
            "give --eval_every_steps",
        ),
        ("--scheduler constant --min_lr 1e-5", "--min_lr: lr never falls", "leave one of them out"),
        (
            "--samsum_dataset.streaming --max_train_step 5 --limit_train_batches 3",
            "--limit_train_batches: a stream has no epochs",
            "leave this out",
        ),
        ("--dataset chat_dataset --chat_dataset.roles a", "--chat_dataset.roles: 'a' names no role", "NAME=ROLE"),
        ("--dataset chat_dataset --chat_dataset.roles a=b", "--chat_dataset.roles: 'a=b' names no role", "NAME=ROLE"),
        ("--lora_config.r 8", "--lora_config.r: there is no adapter without --use_peft", "add it"),
        ("--peft_method lora", "--peft_method: there is no adapter without --use_peft", "add it"),
        ("--from_peft_checkpoint d", "--from_peft_checkpoint: there is no adapter without --use_peft", "add it"),
        ("--use_dora", "--use_dora: there is no adapter without --use_peft", "add it"),
        ("--num_virtual_tokens 3", "--num_virtual_tokens: there is no adapter without --use_peft", "add it"),
        (
            "--use_peft --from_peft_checkpoint d --r 8",
            "--lora_config.r: the adapter in --from_peft_checkpoint keeps",
            "leave one of them out",
        ),
        (
            "--use_peft --peft_method llama_adapter --from_peft_checkpoint d --adapter_len 8",
            "--adapter_len: the adapter in --from_peft_checkpoint keeps",
            "leave one of them out",
        ),
        (
            "--use_peft --adapter_len 8",
            "--adapter_len: only --peft_method llama_adapter has it, not lora",
            "leave one of them out",
        ),
        (
            "--use_peft --peft_method llama_adapter --lora_config.r 8",
            "--lora_config.r: only --peft_method lora has it, not llama_adapter",
            "leave one of them out",
        ),
        (
            "--use_peft --lora_config.target_modules all-linear,q_proj",
            "--target_modules: all-linear already means every linear layer but the head",
            "give it alone",
        ),
        ("--use_peft --use_dora --compile", "--compile: torch.compile cannot trace", "leave one of them out"),
        ("--use_peft --peft_method prefix", "--peft_method: prefix gives each row one", "--batching_strategy padding"),
        (
            f"{PREFIX} --activation_checkpointing selective",
            "--activation_checkpointing: --peft_method prefix passes the prefix in a cache",
            "give off",
        ),
        (
            f"{PREFIX} --enable_fsdp --fsdp_activation_checkpointing",
            "--fsdp_activation_checkpointing: --peft_method prefix passes the prefix in a cache",
            "give False",
        ),
        (f"{PREFIX} --compile", "--compile: --peft_method prefix passes", "leave one"),
        (f"{PREFIX} --freeze_layers", "--freeze_layers: --peft_method prefix trains nothing inside", "leave one"),
        (
            "--train_config.mixed_precision True --fsdp_config.mixed_precision False",
            "--mixed_precision: train_config says True and fsdp_config says False",
            "give one --mixed_precision",
        ),
        ("--pure_bf16 --mixed_precision True", "--pure_bf16: cannot be combined with --mixed_precision", "leave one"),
        ("--pure_bf16 --fsdp_config.mixed_precision True", "--pure_bf16: cannot be combined with", "leave one"),
        ("--pure_bf16 --use_fp16 True", "--pure_bf16: cannot be combined with --use_fp16", "leave one"),
        ("--use_fp16 --mixed_precision False", "--use_fp16: True cannot be combined with --mixed_precision", "leave"),
        ("--fsdp_config.use_fp16 True --fsdp_config.mixed_precision False", "--use_fp16: True cannot be", "leave"),
        ("--peft_dtype fp32", "--peft_dtype: there is no adapter without --use_peft", "add it"),
        (
            "--enable_fsdp --hsdp --sharding_strategy SHARD_GRAD_OP",
            "--hsdp: True cannot be combined with --sharding_strategy SHARD_GRAD_OP",
            "leave one",
        ),
        (
            "--enable_fsdp --hsdp False --sharding_strategy HYBRID_SHARD",
            "--hsdp: False cannot be combined with --sharding_strategy HYBRID_SHARD",
            "leave one",
        ),
        ("--enable_fsdp --sharding_group_size 2", "--sharding_group_size: there are groups only", "--hsdp"),
        ("--enable_fsdp --replica_group_size 2", "--replica_group_size: there are groups only", "--hsdp"),
        ("--sharding_strategy FULL_SHARD", "--sharding_strategy: FULL_SHARD needs --enable_fsdp", "add it"),
        ("--hsdp", "--hsdp: True needs --enable_fsdp", "add it"),
        ("--timeout_seconds 9 --step_timeout_seconds 8", "--timeout_seconds: 9 cannot be combined with", "leave one"),
        ("--fsdp_activation_checkpointing", "--fsdp_activation_checkpointing: True needs --enable_fsdp", "add it"),
        ("--accumulate_unsharded False", "--accumulate_unsharded: False needs --enable_fsdp", "add it"),
        (
            "--enable_fsdp --sharding_strategy NO_SHARD --accumulate_unsharded False",
            "--accumulate_unsharded: False has no effect under NO_SHARD",
            "leave one",
        ),
        (
            "--enable_fsdp --accumulate_unsharded --reduce_dtype bf16",
            "--accumulate_unsharded: True would add the gradients of micro-batches in bf16",
            "leave one",
        ),
        ("--wrap root", "--wrap: root needs --enable_fsdp", "add it"),
        ("--enable_fsdp --wrap root,OPTDecoderLayer", "--wrap: 'root,OPTDecoderLayer' is neither layer", "give one"),
        ("--max_text_length 9", "--max_text_length: cuts captions", "add --dataset caption_dataset"),
        ("--dataset caption_dataset,text_dataset", "--dataset: caption_dataset cannot be mixed", "alone"),
        ("--dataset caption_dataset --streaming --max_train_step 2", "--streaming: images are read while", "leave it"),
        ("--dataset caption_dataset --truncation left", "--truncation: captions are cut to", "leave this out"),
        (
            "--dataset caption_dataset --caption_dataset.prompt a --caption_dataset.prompt_column b",
            "--caption_dataset.prompt: --caption_dataset.prompt_column gives each row its own",
            "give one",
        ),
        ("--fsdp_cpu_offload", "--fsdp_cpu_offload: True needs --enable_fsdp", "add it"),
        ("--use_peft --num_replicated_layers 2", "--num_replicated_layers: 2 needs --enable_fsdp", "add it"),
        (
            "--enable_fsdp --num_replicated_layers 2",
            "--num_replicated_layers: this run trains all weights",
            "leave this",
        ),
        (
            "--enable_fsdp --use_peft --sharding_strategy NO_SHARD --num_replicated_layers 2",
            "--num_replicated_layers: NO_SHARD keeps all weights whole",
            "leave one",
        ),
        (
            "--enable_fsdp --use_peft --fsdp_cpu_offload --num_replicated_layers 2",
            "--num_replicated_layers: --fsdp_cpu_offload keeps weights in host memory",
            "leave one",
        ),
        ("--direct_collectives", "--direct_collectives: True needs --enable_fsdp", "add it"),
        (
            "--enable_fsdp --sharding_strategy NO_SHARD --direct_collectives",
            "--direct_collectives: NO_SHARD gathers no weights",
            "leave one",
        ),
        (
            "--enable_fsdp --fsdp_cpu_offload --direct_collectives",
            "--direct_collectives: --fsdp_cpu_offload keeps weights in host memory",
            "leave one",
        ),
        ("--num_offloaded_layers 2", "--num_offloaded_layers: needs --activation_offloading True", "add it"),
        (
            "--activation_offloading auto --num_offloaded_layers 2",
            "--num_offloaded_layers: needs --activation_offloading True",
            "leave this out",
        ),
        (
            "--enable_fsdp --fsdp_cpu_offload --optimizer_cpu_offload",
            "--optimizer_cpu_offload: --fsdp_cpu_offload already keeps",
            "leave one",
        ),
        ("--num_freeze_layers 2", "--num_freeze_layers: nothing is frozen without --freeze_layers", "add it"),
        (
            "--global_batch_size 8 --gradient_accumulation_steps 1",
            "--global_batch_size: it sets --gradient_accumulation_steps",
            "leave one",
        ),
        ("--scheduler cosine --gamma 0.9", "--gamma: only --scheduler step uses it, not cosine", "leave one"),
        ("--momentum 0.5", "--momentum: AdamW has none", "add --optimizer SGD"),
        ("--optimizer anyprecision --momentum 0.5", "--momentum: anyprecision has none", "add --optimizer SGD"),
        ("--momentum_dtype bf16", "--momentum_dtype: only anyprecision has it", "add --optimizer anyprecision"),
        ("--optimizer SGD --variance_dtype fp32", "--variance_dtype: only anyprecision", "or leave this out"),
        ("--use_kahan_summation", "--use_kahan_summation: only anyprecision has it", "add --optimizer anyprecision"),
        ("--decay_norms_and_biases False", "--decay_norms_and_biases: nothing decays", "give one, or leave"),
        (
            "--optimizer AdamW8bit --optimizer_cpu_offload",
            "--optimizer_cpu_offload: 8-bit states save GPU memory",
            "give --optimizer PagedAdamW8bit instead",
        ),
        (
            "--enable_fsdp --optimizer PagedAdamW8bit --fsdp_cpu_offload",
            "--fsdp_cpu_offload: 8-bit states save GPU memory",
            "leave this out",
        ),
        ("--optimizer SGD --compile_optimizer", "--compile_optimizer: only AdamW's step is compiled", "leave one"),
        (
            "--optimizer_cpu_offload --compile_optimizer",
            "--compile_optimizer: --optimizer_cpu_offload steps on the CPU",
            "leave one",
        ),
        ("--flop_counter --compile_optimizer", "--flop_counter: cannot count inside compiled code", "or this out"),
        (
            "--optimizer Adafactor --optimizer_cpu_offload",
            "--optimizer_cpu_offload: Adafactor has almost no states",
            "leave one of them out",
        ),
        ("--gradient_clipping_threshold 1", "--gradient_clipping_threshold: nothing is clipped", "add it"),
        ("--dataset samsum", "--dataset: 'samsum' is not one of", "did you mean samsum_dataset?"),
        ("--dataset my/chats.jsonl", "--dataset: 'my/chats.jsonl' is not one of", "--NAME.data_path my/chats.jsonl"),
        ("--dataset wiki.csv", "--dataset: 'wiki.csv' is not one of", "FILE.py:FUNCTION"),
        ("--dataset f.py:1x", "--custom_dataset.file: 'f.py:1x' is not FILE.py or FILE.py:FUNCTION", "name one"),
        ("--dataset custom_dataset --custom_dataset.file f.txt", "--custom_dataset.file: 'f.txt' is not", "name one"),
        (
            "--dataset a.py --custom_dataset.file b.py",
            "--dataset: a.py is not --custom_dataset.file b.py",
            "one of the",
        ),
        (
            "--custom_dataset.file f.py",
            "--custom_dataset.file: the chosen dataset is samsum_dataset",
            "add --dataset custom_dataset",
        ),
        (
            "--dataset f.py --samsum_dataset.data_path d",
            "--samsum_dataset.data_path: the chosen dataset is custom",
            "add",
        ),
        (
            "--dataset samsum_dataset,samsum_dataset",
            "--dataset: samsum_dataset is named twice",
            "--dataset_weights",
        ),
        ("--dataset samsum_dataset,sum", "--dataset: 'sum' is not one of", "FILE.py:FUNCTION"),
        ("--dataset a.py,b.py:f", "--dataset: a.py and b.py:f are two custom datasets", "one function"),
        (
            "--dataset samsum_dataset,f.py --alpaca_dataset.data_path d",
            "--alpaca_dataset.data_path: the chosen dataset is samsum_dataset,custom_dataset",
            "add --dataset alpaca_dataset",
        ),
        ("--dataset_weights 0.5", "--dataset_weights: there is one dataset", "name several"),
        (
            "--dataset samsum_dataset,f.py --dataset_weights 0.5,0.3,0.2",
            "--dataset_weights: 3 weights for 2 datasets",
            "give one for each",
        ),
        ("--streaming", "--streaming: needs --max_train_step", "give the optimizer steps"),
        (
            "--dataset samsum_dataset,f.py --max_train_step 5 --samsum_dataset.streaming",
            "--streaming: custom_dataset would not be streamed",
            "give --streaming for all",
        ),
        ("--streaming --max_train_step 5 --num_epochs 2", "--num_epochs: a stream has no epochs", "leave this out"),
        ("--streaming --max_train_step 5 --gamma 0.9", "--gamma: a stream has no epochs", "leave this out"),
        ("--streaming --max_train_step 5 --split_slice 1%", "--split_slice: 1% of a stream is unknown", "a number"),
        ("--shuffle_buffer_size 5", "--shuffle_buffer_size: only a stream has a buffer", "add --streaming"),
        (
            "--alpaca_dataset.streaming --max_train_step 5",
            "--alpaca_dataset.streaming: the chosen dataset is samsum_dataset",
            "add --dataset",
        ),
        ("--split_slice 0%", "--split_slice: '0%' is neither", "like 1%"),
        ("--split_slice 101%", "--split_slice: '101%' is neither", "like 1%"),
        ("--split_slice 0", "--split_slice: '0' is neither", "like 1%"),
        ("--split_slice 1.5", "--split_slice: '1.5' is neither", "like 1%"),
        ("--split_slice=-5", "--split_slice: '-5' is neither", "like 1%"),
        ("--run_validation False --eval_every_steps 5", "--eval_every_steps: nothing is evaluated", "leave one"),
        ("--norun_validation --eval_before_training", "--eval_before_training: nothing is evaluated", "leave one"),
        ("--save_optimizer", "--save_optimizer: it applies only to the copy", "add that folder"),
        ("--dist_checkpoint_folder f", "--dist_checkpoint_folder: it is a subfolder of", "add that"),
        ("--resume auto --overwrite", "--resume: cannot be combined with --overwrite", "leave one"),
        ("--flop_counter --use_profiler", "--flop_counter: cannot count while --use_profiler", "leave one"),
        ("--flop_counter --compile", "--compile: --flop_counter cannot count", "leave one of them out"),
        *(
            (f"{given}", f"{given.split()[0]}: a run takes the machines that it finds", "add --dry_run")
            for given in ("--dry_run_hardware 4xT4", "--nodes 2", "--device_memory_gib 16", "--dry_run_json plan.json")
        ),
        ("--network_speeds f --network_gbps 9", "--network_speeds: holds what was measured", "give one"),
        ("--load_only --dry_run", "--load_only: cannot be combined with --dry_run", "leave one of them out"),
        ("--load_only --resume auto", "--load_only: loads what a new run would", "leave it or --resume out"),
        ("--flop_counter_start 4", "--flop_counter_start: nothing is recorded without --flop_counter", "add it"),
        ("--profiler_dir d", "--profiler_dir: nothing is recorded without --use_profiler", "add it"),
    ],
)
def test_settings_in_conflict_are_refused_with_reason_and_remedy(line, start, remedy):
    with pytest.raises(ConfigError) as caught:
        parse(line)
    message = str(caught.value)
    assert message.startswith(start)
    reason, _, rest = message.rpartition("; ")
    assert reason
    assert remedy in rest
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "--sharding_strategy NO_SHARD",
        "--timeout_seconds 9 --step_timeout_seconds 9",
        "--hsdp False --fsdp_activation_checkpointing False --sharding_group_size 0 --accumulate_unsharded True",
        "--pure_bf16 --optimizer SGD",
        "--pure_bf16 --optimizer anyprecision --use_kahan_summation --momentum_dtype fp32 --variance_dtype fp32",
        "--optimizer anyprecision --optimizer_cpu_offload --use_kahan_summation False",
        "--use_kahan_summation False",
        "--optimizer AdamW8bit --weight_decay 0.1 --decay_norms_and_biases False",
        "--enable_fsdp --optimizer PagedAdamW8bit --use_peft",
        "--enable_fsdp --optimizer Adafactor --fsdp_cpu_offload",
        "--pure_bf16 --mixed_precision False",
        "--mixed_precision True --use_fp16 False",
        "--mixed_precision True --use_fp16",
        "--use_peft --use_fp16 --peft_dtype fp32",
        "--use_peft --pure_bf16 --peft_dtype bf16",
        "--enable_fsdp --one_gpu",
        "--enable_fsdp --hsdp --sharding_strategy HYBRID_SHARD --sharding_group_size 2 --replica_group_size 2",
        "--use_peft --from_peft_checkpoint d",
        "--freeze_layers",
        "--use_peft --freeze_layers --num_freeze_layers 3",
        "--wrap layer --fsdp_cpu_offload False",
        "--enable_fsdp --wrap root --fsdp_cpu_offload --activation_checkpointing selective",
        "--enable_fsdp --wrap OPTDecoderLayer,Blip2EncoderLayer",
        "--enable_fsdp --sharding_strategy NO_SHARD --fsdp_cpu_offload",
        "--optimizer_cpu_offload",
        "--enable_fsdp --optimizer_cpu_offload --optimizer SGD",
        "--global_batch_size None --gradient_accumulation_steps 2",
        "--gradient_clipping --gradient_clipping_threshold 0.5",
        "--split_slice 100%",
        "--split_slice 0.5%",
        "--split_slice 10",
        "--resume False --overwrite",
        "--resume ''",
        "--resume",
        "--resume auto --resume_anyway",
        "--resume outputs/a --save_every_steps 5 --save_every_minutes 0 --keep_last 1 --keep_best --async_save",
        "--checkpoint_type FULL_STATE_DICT --save_every_steps 0",
        "--save_optimizer --dist_checkpoint_root_folder d",
        "--quantization none",
        "--use_peft --quantization 4bit --quant_type fp4 --use_double_quant --quant_storage bf16 --compute_dtype bf16",
        "--use_peft --quantization 8bit --quant_storage fp32 --compute_dtype fp16 --use_fp16",
        "--use_peft --use_dora --quantization --enable_fsdp",
        "--dataset custom_dataset --custom_dataset.data_path rows.jsonl",
        "--dataset alpaca_dataset",
        "--dataset grammar_dataset --grammar_dataset.data_path d",
        "--dataset chat_dataset --chat_dataset.data_path d --chat_dataset.chat_template f",
        "--dataset samsum_dataset,f.py:g --dataset_weights 0.7,0.3 --samsum_dataset.data_path d",
        "--dataset 'samsum_dataset, custom_dataset' --custom_dataset.file f.py",
        "--streaming --max_train_step 5 --shuffle_buffer_size 9 --split_slice 10",
        "--samsum_dataset.streaming --max_train_step 5",
        "--streaming False",
        "--num_workers_dataloader 0 --loss_chunk_size 0 --weight_decay 0",
        "--use_wandb --use_tensorboard --use_profiler --profiler_dir d",
        "--flop_counter --flop_counter_start 1",
        "--flop_counter False --flop_counter_start 3 --use_profiler False",
        f"{PREFIX} --enable_fsdp --activation_checkpointing off --fsdp_activation_checkpointing False",
        f"{PREFIX} --num_virtual_tokens 5",
        "--use_peft --use_dora --use_rslora --lora_config.target_modules all-linear",
        "--use_peft --peft_method llama_adapter --adapter_len 4 --adapter_layers 2 --compile --freeze_layers",
    ],
)
def test_settings_that_hold_together_are_accepted(line):
    parse(line)


@pytest.mark.parametrize(
    ("line", "expected", "note"),
    [
        ("--optimizer SGD", {"train_config.momentum": 0.9}, "--momentum is 0.9 with --optimizer SGD"),
        (
            "--use_peft --use_dora",
            {"lora_config.lora_dropout": 0.05},
            "--use_dora with --lora_dropout 0.05 multiplies by each adapted weight twice, the second time in fp32; "
            "--lora_dropout 0 avoids that",
        ),
        (
            "--enable_fsdp --hsdp",
            {"fsdp_config.sharding_strategy": "HYBRID_SHARD"},
            "--hsdp selects --sharding_strategy HYBRID_SHARD",
        ),
        (
            "--enable_fsdp --hsdp --sharding_strategy FULL_SHARD",
            {"fsdp_config.sharding_strategy": "HYBRID_SHARD"},
            "--hsdp selects --sharding_strategy HYBRID_SHARD",
        ),
        (
            "--train_config.mixed_precision False",
            {"fsdp_config.mixed_precision": False},
            "--train_config.mixed_precision False applies to fsdp_config too",
        ),
        (
            "--fsdp_config.mixed_precision False",
            {"train_config.mixed_precision": False},
            "--fsdp_config.mixed_precision False applies to train_config too",
        ),
        (
            "--enable_fsdp --fsdp_activation_checkpointing --activation_checkpointing off",
            {"train_config.activation_checkpointing": "off"},
            "--activation_checkpointing off overrides --fsdp_activation_checkpointing True",
        ),
        (
            "--use_peft --quantization True",
            {"quantization_config.quantization": "4bit"},
            "quantization True means 4bit",
        ),
        (
            "--norun_validation --val_batch_size 2",
            {"train_config.run_validation": False},
            "--val_batch_size has no effect with --run_validation False",
        ),
        (
            "--norun_validation --best_metric token_accuracy",
            {"train_config.run_validation": False},
            "--best_metric has no effect with --run_validation False",
        ),
    ],
)
def test_an_adapted_setting_leaves_a_note(line, expected, note):
    config = parse(line)
    assert {name: config.value(name) for name in expected} == expected
    assert config.notes == (note,)


def test_nothing_said_leaves_no_note():
    assert parse().notes == ()


def test_momentum_of_zero_is_plain_sgd():
    config = parse("--optimizer SGD --momentum 0")
    assert config.train_config.momentum == 0.0
    assert config.notes == ()


def test_hybrid_shard_and_hsdp_are_the_same_choice():
    config = parse("--enable_fsdp --sharding_strategy HYBRID_SHARD")
    assert config.fsdp_config == parse("--enable_fsdp --hsdp").fsdp_config
    assert config.notes == ()


@pytest.mark.parametrize(
    ("raw", "value"),
    [("True", "4bit"), ("4bit", "4bit"), ("8BIT", "8bit"), ("False", None), ("none", None), ("", None)],
)
def test_quantization_true_means_4bit_and_false_none(raw, value):
    assert convert(raw, SETTINGS["quantization_config.quantization"]) == value


@pytest.mark.parametrize("file", ["my_data.py:get_my_dataset", "my_data.py", "../a b/my_data.py:f"])
def test_a_file_is_short_for_the_custom_dataset(file):
    short = parse_flags(["--model_name", "M", "--dataset", file])
    full = parse_flags(["--model_name", "M", "--dataset", "custom_dataset", "--custom_dataset.file", file])
    assert short == full
    assert short.custom_dataset.file == file
    assert parse_flags(["--model_name", "M", "--dataset", file, "--custom_dataset.file", file]) == full


def test_a_config_built_in_code_is_validated_alike():
    validate(RunConfig(TrainConfig(model_name="M")))
    with pytest.raises(ConfigError, match=r"^--dataset: 'x'"):
        validate(RunConfig(TrainConfig(model_name="M", dataset="x")))


def test_several_datasets_are_a_list_with_one_custom_file_at_most():
    config = parse("--dataset samsum_dataset,f.py:g --dataset_weights 7,3")
    assert config.train_config.datasets == ("samsum_dataset", "custom_dataset")
    assert config.custom_dataset.file == "f.py:g"
    assert config.train_config.dataset_weights == (7.0, 3.0)


@pytest.mark.parametrize("weights", ["0,1", "-1,2", "a,b", "1,,2", "1,nan"])
def test_weights_are_positive_numbers(weights):
    with pytest.raises(ConfigError, match=r"^--dataset_weights: "):
        parse(f"--dataset samsum_dataset,f.py --dataset_weights={weights}")


def test_a_bare_streaming_streams_every_dataset_and_a_stream_is_one_epoch():
    config = parse("--dataset samsum_dataset,f.py --streaming --max_train_step 7 --num_workers_dataloader 3")
    assert config.streams
    assert config.datasets["samsum_dataset"].streaming
    assert config.custom_dataset.streaming
    assert config.train_config.num_epochs == 1
    notes = "\n".join(config.notes)
    assert "--streaming set in samsum_dataset and all other datasets\n" in notes
    assert "--num_workers_dataloader 3 applies to validation only; one process per rank reads the stream" in notes
    assert "--scheduler step keeps lr constant" in notes
    assert not parse("--streaming False").streams
