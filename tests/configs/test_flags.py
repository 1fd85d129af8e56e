"""The command line: what parses to what, and what is refused with which line."""

import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.flags import parse_flags
from configs.hints import HINTS
from configs.names import explain_unknown, find
from configs.run import SETTINGS, RunConfig
from configs.unsupported_flags import UNSUPPORTED
from utils.errors import ConfigError


def parse(line: str = "") -> RunConfig:
    return parse_flags(["--model_name", "M", *shlex.split(line)])


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    message = str(caught.value)
    assert message == " ".join(message.splitlines())
    return message


DOCUMENTED_DEFAULTS = {
    "train_config": {
        "tokenizer_name": None,
        "enable_fsdp": False,
        "low_cpu_fsdp": False,
        "run_validation": True,
        "batch_size_training": 4,
        "batching_strategy": "packing",
        "context_length": 4096,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": False,
        "gradient_clipping_threshold": 1.0,
        "num_epochs": 3,
        "max_train_step": 0,
        "max_eval_step": 0,
        "num_workers_dataloader": 1,
        "lr": 1e-4,
        "weight_decay": 0.0,
        "gamma": 0.85,
        "seed": 42,
        "use_fp16": False,
        "mixed_precision": True,
        "val_batch_size": 1,
        "dataset": "samsum_dataset",
        "peft_method": "lora",
        "use_peft": False,
        "from_peft_checkpoint": "",
        "output_dir": None,
        "freeze_layers": False,
        "num_freeze_layers": 1,
        "one_gpu": False,
        "save_model": True,
        "dist_checkpoint_root_folder": None,
        "dist_checkpoint_folder": "fine-tuned",
        "save_optimizer": False,
        "use_fast_kernels": False,
    },
    "fsdp_config": {
        "mixed_precision": True,
        "use_fp16": False,
        "sharding_strategy": "FULL_SHARD",
        "hsdp": False,
        "sharding_group_size": 0,
        "replica_group_size": 0,
        "checkpoint_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_offload": False,
        "pure_bf16": False,
        "optimizer": "AdamW",
    },
    "lora_config": {"r": 8, "lora_alpha": 32, "target_modules": ("q_proj", "v_proj"), "lora_dropout": 0.05},
    "llama_adapter_config": {"adapter_len": 10, "adapter_layers": 30},
    "prefix_config": {"num_virtual_tokens": 30},
    "quantization_config": {
        "quantization": None,
        "quant_type": "nf4",
        "use_double_quant": False,
        "compute_dtype": None,
        "quant_storage": "auto",
    },
    "tracking_config": {
        "use_wandb": False,
        "save_metrics": False,
        "flop_counter": False,
        "flop_counter_start": 3,
        "use_profiler": False,
        "profiler_dir": None,
    },
}


@pytest.mark.parametrize(
    ("name", "default"),
    [(f"{section}.{name}", value) for section, names in DOCUMENTED_DEFAULTS.items() for name, value in names.items()],
)
def test_documented_settings_have_their_documented_defaults(name, default):
    """A setting that tells apart what was left out has None there, and names what that stands for."""
    value = parse().value(name)
    value = SETTINGS[name].stands_for if value is None and default is not None else value
    assert value == default
    assert type(value) is type(default)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("batching_strategy", ["packing", "padding"]),
        ("fsdp_config.optimizer", ["AdamW", "SGD", "anyprecision", "AdamW8bit", "PagedAdamW8bit", "Muon", "Adafactor"]),
        ("scheduler", ["step", "cosine", "linear", "constant"]),
        ("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]),
        ("checkpoint_type", ["SHARDED_STATE_DICT"]),
        ("activation_checkpointing", ["off", "selective", "full", "auto"]),
        ("peft_method", ["lora", "llama_adapter"]),
        ("quantization_config.quantization", ["4bit", "8bit"]),
    ],
)
def test_documented_choices_are_accepted(name, allowed):
    (dotted,) = find(name)
    for choice in allowed:
        assert parse(f"--enable_fsdp --use_peft --{name} {choice}").value(dotted) == choice


DOCUMENTED_COMMANDS = [
    "--enable_fsdp --use_peft --peft_method lora --output_dir O",
    "--enable_fsdp --use_peft --peft_method lora --output_dir O --use_fast_kernels",
    "--enable_fsdp --dist_checkpoint_root_folder model_checkpoints --dist_checkpoint_folder fine-tuned --pure_bf16 "
    "--use_fast_kernels",
    "--enable_fsdp --low_cpu_fsdp --pure_bf16 --batch_size_training 1 --dist_checkpoint_root_folder c "
    "--dist_checkpoint_folder fine-tuned",
    "--enable_fsdp --use_peft --peft_method lora --dataset samsum_dataset --save_model "
    "--dist_checkpoint_root_folder model_checkpoints --dist_checkpoint_folder fine-tuned --pure_bf16 --output_dir O",
    "--split_slice 1% --use_peft --quantization True --use_fp16 True",
    "--split_slice 1% --use_peft --quantization True --use_fp16 False",
    "--split_slice 1% --use_peft --quantization False --use_fp16 False",
    "--split_slice 1% --use_peft --quantization False --use_fp16 True",
    "--split_slice 1% --quantization False --use_fp16 False",
    "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False",
    "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False --fsdp_config.fsdp_cpu_offload True",
    "--split_slice 10 --enable_fsdp --quantization False --use_fp16 False --fsdp_config.fsdp_cpu_offload True",
    "--split_slice 1% --enable_fsdp --quantization False --use_fp16 False --fsdp_config.optimizer SGD",
]


@pytest.mark.parametrize("line", DOCUMENTED_COMMANDS)
def test_documented_commands_parse(line):
    config = parse(line)
    assert config.train_config.enable_fsdp == ("--enable_fsdp" in line)
    assert config.train_config.use_peft == ("--use_peft" in line)
    assert config.fsdp_config.pure_bf16 == ("--pure_bf16" in line)
    assert config.quantization_config.quantization == ("4bit" if "--quantization True" in line else None)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--save_model", True),
        ("--save_model True", True),
        ("--save_model=true", True),
        ("--save_model 1", True),
        ("--save-model yes", True),
        ("--save_model False", False),
        ("--save_model=False", False),
        ("--save_model 0", False),
        ("--nosave_model", False),
        ("--no-save-model", False),
        ("--train_config.nosave_model", False),
        ("--train-config.save-model off", False),
    ],
)
def test_booleans_have_the_documented_spellings(line, value):
    assert parse(line).train_config.save_model is value
    assert parse(f"{line} --use_peft").train_config.save_model is value
    assert parse(f"--use_peft {line}").train_config.use_peft is True


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--lr 1e5", "train_config.lr", 1e5),
        ("--lr=5e-5", "train_config.lr", 5e-5),
        ("--lr .5", "train_config.lr", 0.5),
        ("--max_train_step 1e5", "train_config.max_train_step", 100000),
        ("--max_train_step 2.0", "train_config.max_train_step", 2),
        ("--output_dir 2024_01", "train_config.output_dir", "2024_01"),
        ("--output_dir 1e5", "train_config.output_dir", "1e5"),
        ("--output_dir a,b", "train_config.output_dir", "a,b"),
        ("--output_dir '[a, b]'", "train_config.output_dir", "[a, b]"),
        ("--output_dir '{a: 1}'", "train_config.output_dir", "{a: 1}"),
        ("--output_dir 'my runs/one=two'", "train_config.output_dir", "my runs/one=two"),
        ("--output_dir=a=b", "train_config.output_dir", "a=b"),
        ("--output_dir=--x", "train_config.output_dir", "--x"),
        ("--output_dir -", "train_config.output_dir", "-"),
        ("--output_dir '#1'", "train_config.output_dir", "#1"),
        ("--output_dir True", "train_config.output_dir", "True"),
        ("--output_dir 007", "train_config.output_dir", "007"),
        ("--output_dir ''", "train_config.output_dir", None),
        ("--output_dir=", "train_config.output_dir", None),
        ("--output_dir None", "train_config.output_dir", None),
        ("--tokenizer_name null", "train_config.tokenizer_name", None),
        ("--from_peft_checkpoint None", "train_config.from_peft_checkpoint", ""),
        ("--output-dir a-b", "train_config.output_dir", "a-b"),
        ("--scheduler Cosine", "train_config.scheduler", "cosine"),
        ("--fsdp_config.optimizer sgd", "fsdp_config.optimizer", "SGD"),
        ("--optimizer adamw_8bit", "fsdp_config.optimizer", "AdamW8bit"),
        ("--optimizer paged_adamw_8bit", "fsdp_config.optimizer", "PagedAdamW8bit"),
        ("--optimizer adamw_torch", "fsdp_config.optimizer", "AdamW"),
        ("--optimizer AdamW_AnyPrecision", "fsdp_config.optimizer", "anyprecision"),
        ("--optimizer adafactor", "fsdp_config.optimizer", "Adafactor"),
        ("--optimizer anyprecision --variance_dtype bfloat16", "fsdp_config.variance_dtype", "bf16"),
        ("--quantization 4bit --use_peft --compute_dtype torch.float16", "quantization_config.compute_dtype", "fp16"),
        ("--enable_fsdp --accumulate_unsharded", "fsdp_config.accumulate_unsharded", True),
        ("--enable_fsdp --accumulate_unsharded no", "fsdp_config.accumulate_unsharded", False),
        ("--enable_fsdp --noaccumulate_unsharded", "fsdp_config.accumulate_unsharded", False),
        ("--enable_fsdp --accumulate_unsharded auto", "fsdp_config.accumulate_unsharded", None),
        ("--async_save", "train_config.async_save", True),
        ("--async_save off", "train_config.async_save", False),
        ("--async_save Auto", "train_config.async_save", None),
        ("--mixed_precision", "train_config.mixed_precision", True),
        ("--nouse_fp16", "train_config.use_fp16", False),
        ("--use_fp16 none", "train_config.use_fp16", None),
        ("--context_length 128", "train_config.context_length", 128),
        ("--resume", "train_config.resume", "auto"),
        ("--resume True", "train_config.resume", "auto"),
        ("--resume AUTO", "train_config.resume", "auto"),
        ("--resume outputs/a", "train_config.resume", "outputs/a"),
        ("--resume False", "train_config.resume", False),
        ("--resume none", "train_config.resume", False),
        ("--resume no", "train_config.resume", False),
        ("--use_peft --target_modules k_proj", "lora_config.target_modules", ("k_proj",)),
        ("--use_peft --lora_config.target_modules a,b", "lora_config.target_modules", ("a", "b")),
        ("--use_peft --target_modules '[a, b]'", "lora_config.target_modules", ("a", "b")),
        ("""--use_peft --target_modules "['a','b']" """, "lora_config.target_modules", ("a", "b")),
        ("--use_peft --r 16", "lora_config.r", 16),
        ("--pure_bf16", "fsdp_config.pure_bf16", True),
        ("--samsum_dataset.data_path d", "samsum_dataset.data_path", "d"),
        ("--dataset f.py --custom_dataset.train_split tr", "custom_dataset.train_split", "tr"),
    ],
)
def test_values_are_parsed_by_the_type_of_their_setting(line, name, value):
    config = parse(line)
    assert config.value(name) == value
    assert type(config.value(name)) is type(value)
    assert config.was_given(name)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))  # a name has 255 bytes
def test_any_text_arrives_as_it_was_typed(text):
    given_with_equals = parse_flags([f"--model_name=x{text}", "--use_peft"]).train_config
    assert given_with_equals.model_name == f"x{text}"
    assert parse_flags(["--model_name", f"x{text}"]).train_config.model_name == f"x{text}"
    assert given_with_equals.use_peft


@settings(deadline=None)
@given(st.integers(0, 10**18), st.floats(1e-300, 1e18))
def test_numbers_arrive_as_they_were_typed(integer, number):
    train = parse(f"--max_train_step {integer} --lr {number!r}").train_config
    assert train.max_train_step == integer
    assert train.lr == number


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr", "--lr: needs a value (a number)"),
        ("--lr --use_peft", "--lr: needs a value (a number)"),
        ("--output_dir", "--output_dir: needs a value (text or None)"),
        ("--config", "--config: needs a value (the path of a YAML file, or the name of a shipped recipe)"),
        ("--lr -1", "--lr: -1.0 is too small; give more than 0"),
        ("--lr=-1e-4", "--lr: -0.0001 is too small; give more than 0"),
        ("--lr nan", "--lr: 'nan' is not a number"),
        ("--lr inf", "--lr: 'inf' is not a number"),
        ("--lr 1e400", "--lr: '1e400' is too large"),
        ("--tile_tokens 1e400", "--tile_tokens: '1e400' is too large"),
        ("--lr 1_0", "--lr: '1_0' is not a number"),
        ("--lr ''", "--lr: '' is not a number"),
        ("--num_epochs 1.5", "--num_epochs: '1.5' is not a whole number"),
        ("--num_epochs 1e999999999", "--num_epochs: '1e999999999' is not a whole number"),
        ("--num_epochs True", "--num_epochs: 'True' is not a whole number"),
        ("--batch_size_training four", "--batch_size_training: 'four' is not a whole number"),
        ("--batch_size_training 0", "--batch_size_training: 0 is too small; give 1 or more (rows)"),
        ("--global_batch_size x", "--global_batch_size: 'x' is not a whole number"),
        ("--context_length 7", "--context_length: 7 is too small; give 8 or more (tokens)"),
        ("--lora_dropout 1 --use_peft", "--lora_dropout: 1.0 is too large; give less than 1"),
        ("--gamma 1.5", "--gamma: 1.5 is too large; give 1 or less"),
        ("--enable_fsdp maybe", "--enable_fsdp: 'maybe' is not True or False"),
        ("--activation_offloading maybe", "--activation_offloading: 'maybe' is not auto or True or False"),
        ("--tile_tokens some", "--tile_tokens: 'some' is not a whole number or auto"),
        ("--target_modules a,,b", "--target_modules: an entry of the list is empty; write it like a,b"),
        (
            "--scheduler linea",
            "--scheduler: 'linea' is not one of step, cosine, linear, constant; did you mean linear?",
        ),
        ("--nosave_model True", "--nosave_model: takes no value; write --save_model True or False"),
        ("x", "unexpected argument 'x'; flags start with --, lists are written a,b, and globs in quotes"),
        (
            "--use_peft True x",
            "unexpected argument 'x'; flags start with --, lists are written a,b, and globs in quotes",
        ),
        ("--lr=1 -1", "unexpected argument '-1'; flags start with --, lists are written a,b, and globs in quotes"),
        ("--use_peft -", "--use_peft: '-' is not True or False"),
        ("-lr 1", "-lr: flags start with two dashes; a value that starts with one is written --flag=-lr"),
        ("---lr 1", "---lr: flags start with two dashes; a value that starts with one is written --flag=---lr"),
        ("--", "unexpected argument '--'; flags start with -- and a name"),
        ("--lr 1 -- --trace", "unexpected argument '--'; flags start with -- and a name"),
        ("--=1", "unexpected argument '--=1'; flags start with -- and a name"),
        ("--lr 1 --lr 2", "--lr: given twice; leave one of them out"),
        (
            "--batch-size-training=1 --batch_size_training 1",
            "--batch_size_training: given twice; leave one of them out",
        ),
        ("--pure_bf16 --fsdp_config.pure_bf16", "--fsdp_config.pure_bf16: given twice; leave one of them out"),
        ("--use_peft --nouse_peft", "--nouse_peft: given twice; leave one of them out"),
        ("--batch_size_trainin 1", "--batch_size_trainin: unknown flag; did you mean --batch_size_training?"),
        ("--fsdp_config.optimiser SGD", "--fsdp_config.optimiser: unknown flag; did you mean --fsdp_config.optimizer?"),
        ("--fsdp.optimizer SGD", "--fsdp.optimizer: unknown flag; did you mean --fsdp_config.optimizer?"),
        ("--peft_config.r 8", "--peft_config.r: unknown flag; did you mean --lora_config.r?"),
        ("--train.lr 1", "--train.lr: unknown flag; did you mean --train_config.lr?"),
        (
            "--batchsize 4",
            "--batchsize: unknown flag; here it is --batch_size_training (rows per rank per micro-batch)",
        ),
        ("--find", "--find: unknown flag; leave it out: `python -m tools.plan FLAGS --find` lists what fits"),
        (
            "--samsum_dataset.trust_remote_code",
            "--samsum_dataset.trust_remote_code: unknown flag; leave it out: data is read, and code that comes with it "
            "never runs",
        ),
        ("--zzz 1", "--zzz: unknown flag; --help all lists every flag"),
        ("--nonsense", "--nonsense: unknown flag; --help all lists every flag"),
        ("--interactive", "--interactive: unknown flag; --help all lists every flag"),
        ("--nolr", "--nolr: unknown flag; --help all lists every flag"),
        (
            "--micro_batch_size 4",
            "--micro_batch_size: unknown flag; here it is --batch_size_training (rows per rank per micro-batch)",
        ),
        ("--train_config.learning_rate 1", "--train_config.learning_rate: unknown flag; here it is --lr"),
        (
            "--data_path d",
            "--data_path: each dataset has its own; write --NAME.data_path with the NAME of --dataset",
        ),
        (
            "--fsdp_config SGD",
            "--fsdp_config: is a group of settings; set one of them, like --fsdp_config.sharding_strategy",
        ),
    ],
)
def test_what_cannot_be_parsed_is_refused_with_one_line(line, message):
    assert refusal(line) == message


def test_a_name_or_value_with_a_line_break_still_gives_one_line():
    for argv in (["--a\nb", "1"], ["--lr", "a\r\nb"], ["a\nb"], ["--dataset", "a\nb"], ["--config", "a\nb"]):
        with pytest.raises(ConfigError) as caught:
            parse_flags(["--model_name", "M", *argv])
        assert len(str(caught.value).splitlines()) == 1


def test_the_model_is_required():
    for argv in ([], ["--use_peft"], ["--model_name", ""]):
        with pytest.raises(ConfigError, match=r"^--model_name: is required; "):
            parse_flags(argv)


def test_a_name_in_two_groups_is_set_in_both_and_noted():
    config = parse("--mixed_precision False")
    assert config.train_config.mixed_precision is config.fsdp_config.mixed_precision is False
    assert config.notes == ("--mixed_precision set in train_config and fsdp_config",)
    assert config.given == {"train_config.model_name", "train_config.mixed_precision", "fsdp_config.mixed_precision"}


def test_only_what_the_user_set_counts_as_given():
    config = parse("--lr 1e-4 --fsdp_config.pure_bf16")
    assert config.given == {"train_config.model_name", "train_config.lr", "fsdp_config.pure_bf16"}
    assert config.was_given("train_config.lr")
    assert not config.was_given("train_config.seed")
    with pytest.raises(KeyError):
        config.was_given("lr")


def test_the_settings_come_out_in_plain_types():
    plain = parse("--use_peft --target_modules a,b").to_dict()
    assert plain["lora_config"]["target_modules"] == ["a", "b"]
    assert {f"{section}.{name}" for section, names in plain.items() for name in names} == set(SETTINGS)


def test_every_hint_leads_to_real_flags_from_a_name_that_is_none():
    launcher = {"nproc_per_node", "nnodes"}
    for name, hint in HINTS.items():
        assert not find(name), name
        flags = set(re.findall(r"--([a-z_][\w.]*)", hint)) - launcher
        assert flags or launcher & set(re.findall(r"\w+", hint)), hint
        for flag in flags:
            assert find(flag), hint


def test_what_needs_no_flag_is_no_flag_and_has_no_hint():
    assert not {name for name in UNSUPPORTED if find(name) or name in HINTS}


def test_all_unknown_names_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--learning_rate 1e-4 --lr fast --epochs 4 --zzz 1")
    assert list(caught.value.parts()) == [
        "--learning_rate: unknown flag; here it is --lr (2 more below)\n"
        "--epochs: unknown flag; here it is --num_epochs\n"
        "--zzz: unknown flag; --help all lists every flag"
    ]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--peft_method None", "leave --use_peft and this out"),
        ("--optimizer adam_8bit", "here it is AdamW8bit"),
        ("--use_peft --quantization int4", "here it is 4bit"),
        ("--mixed_precision fp16", "here it is --use_fp16"),
        ("--strategy deepspeed", "--optimizer_cpu_offload"),
        ("--lora_head True", "--lora_config.target_modules, with lm_head"),
        ("--model-ckpt bart", "--model_name"),
        ("--evaluation-steps 500", "--eval_every_steps"),
        ("--enable_checkpointing False", "--save_every_steps"),
        ("--gradient_as_bucket_view True", "NO_SHARD"),
        ("--val_set_size 0.1", "--chat_dataset.validation_fraction"),
        ("--save_total_limit 3", "--keep_last"),
        ("--lora_target_linear True", "--lora_config.target_modules, with all-linear"),
        ("--train_on_inputs False", "--mask_prompt"),
        ("--load_best_model_at_end", "--best_metric"),
        ("--do_train", "--do_train: unknown flag; leave it out: a run trains"),
        ("--push_to_hub", "leave it out: a run uploads nothing; `python -m tools.export RUN --push_to_hub OWNER/NAME`"),
        ("--activation_checkpointing True", "here it is full"),
        ("--batching_strategy true", "here it is packing"),
        (
            "--target_modules q_proj k_proj",
            "unexpected argument 'k_proj'; flags start with --, lists are written a,b, and globs in quotes",
        ),
    ],
)
def test_spellings_of_other_tools_are_told_what_to_write(line, hint):
    assert hint in refusal(line)


def test_nothing_is_printed_while_parsing(capsys):
    parse("--use_peft")
    refusal("--zzz")
    refusal("x --trace")
    assert capsys.readouterr() == ("", "")


def test_parsing_needs_no_heavy_library():
    heavy = {"torch", "numpy", "transformers", "datasets", "jinja2", "peft"}
    code = f"import sys, configs.flags; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_timeout_seconds_is_short_for_step_timeout_seconds() -> None:
    train = parse_flags(["--model_name", "m", "--timeout_seconds", "60"]).train_config
    assert train.step_timeout_seconds == 60


@pytest.mark.parametrize(
    ("line", "guess"),
    [
        ("--learning_rat 1", "if learning_rate is meant, here it is --lr"),
        ("--max_seq_lenght 9", "if max_seq_length is meant, here it is --context_length (tokens)"),
        ("--adam_beta3 1", "did you mean --adam_beta1 or --adam_beta2?"),
        (
            "--eval 1",
            "did you mean --eval_every_steps or --evals_per_epoch or --eval_before_training or --eval_generate or"
            " --eval_metric or --eval_json_schema?",
        ),
        ("--context 9", "did you mean --context_length or --context_parallel_size?"),
        ("--fsdp_config.shardng_strategy X", "did you mean --fsdp_config.sharding_strategy?"),
        ("--lora_config.targets q_proj", "did you mean --lora_config.target_modules?"),
        ("--lora_config.lora_rnk 4", "if lora_rank is meant, here it is --lora_config.r"),
        ("--lora_config.zzz 4", "--help all lists every flag"),
        ("--samsum.data_pth a", "did you mean --samsum_dataset.data_path?"),
        ("--data_pth a", "did you mean --NAME.data_path, with the NAME of --dataset?"),
        ("--noenable_fsd", "did you mean --noenable_fsdp?"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_was_probably_meant(line: str, guess: str) -> None:
    assert refusal(line) == f"{line.split()[0]}: unknown flag; {guess}"


def test_a_flag_that_lacks_a_letter_or_has_two_changed_around_is_recognised() -> None:
    missed = []
    for name in {dotted.split(".")[1] for dotted in SETTINGS}:
        middle = len(name) // 2
        swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
        for wrong in (name[:middle] + name[middle + 1 :], swapped):
            if len(name) > 6 and find(name) and not find(wrong) and f"--{name}" not in explain_unknown(wrong):
                missed.append((name, wrong, explain_unknown(wrong)))
    assert not missed
