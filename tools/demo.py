"""Fine-tune a tiny model on the sample dialogues in three minutes, and show what it learned.

    make demo            or            python -m tools.demo [--out outputs/demo]

It builds a Llama model with random weights and a tokenizer from the samples, runs the command that a real run would
use, and shows one held-out dialogue with the summary that the model writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from configs.datasets import BUILT_IN_FOLDER
from tools.beginning import begin_tool
from utils.quiet import quiet_imports

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "datasets/samples/dialogue_summary"
FLAGS = {
    "--batching_strategy": "packing",
    "--context_length": "512",
    "--batch_size_training": "1",
    "--num_epochs": "3",
    "--lr": "1.5e-3",
    "--scheduler": "cosine",
    "--warmup_steps": "50",
    "--gradient_clipping": "True",
    "--fsdp_config.sharding_strategy": "SHARD_GRAD_OP",  # on CPU, gathering is what sharding costs
    "--fsdp_config.fsdp_activation_checkpointing": "False",
    "--eval_before_training": "True",
    "--val_batch_size": "4",
    "--num_workers_dataloader": "0",
    "--log_every_steps": "100",
}


def num_processes() -> int:
    """Two, or fewer if there are fewer GPUs; two without any GPU."""
    import torch  # takes seconds; --help does not wait for it

    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def training_command(model: Path, run: Path, max_train_step: int) -> list[str]:
    """torchrun and its flags, as a user would type them."""
    flags = {
        "--model_name": str(model),
        "--dataset": "samsum_dataset",
        "--samsum_dataset.data_path": str(DATA),
        "--output_dir": str(run),
        "--max_train_step": str(max_train_step),
    } | FLAGS
    words = [word for flag in flags.items() for word in flag]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes())]
    return [*launcher, str(ROOT / "finetuning.py"), "--enable_fsdp", *words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder for the model and the run")
    parser.add_argument("--max_train_step", type=int, default=1000, help="fewer take less time, and say less")
    given = parser.parse_args()
    from tools.make_tiny_model import make_tiny_model

    out = given.out
    model, run = out / "tiny-llama", out / "run"
    shutil.rmtree(run, ignore_errors=True)
    make_tiny_model(model, DATA)
    command = training_command(model, run, given.max_train_step)
    print(f"$ {shlex.join(command)}\n", flush=True)
    # torchrun would give each process one thread, unless the variable is set.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // num_processes()))}
    status = subprocess.run(command, env=threads | os.environ, check=False).returncode
    if status:
        return status
    show(run)
    return 0


def show(run: Path) -> None:
    """Print the losses before and after, and the summary of a dialogue that the model has not seen."""
    quiet_imports()
    from data.dataset_functions.importing import load_dataset_file
    from tasks.generation import AnswerSettings
    from tools.answering.loading import load

    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    sample = json.loads((DATA / "validation.jsonl").read_text().splitlines()[0])
    prompt = load_dataset_file(BUILT_IN_FOLDER / "samsum.py").PROMPT.format(dialogue=sample["dialogue"])
    model, tokenizer, task, _ = load(run / "model", None)
    answer = task.generate(model, tokenizer, prompt, AnswerSettings(max_new_tokens=80)).text
    print(f"\nA dialogue held out from training:\n\n{sample['dialogue']}\n")
    print(f"the model:  {answer}\nreference:  {sample['summary']}\n")
    print(f"eval loss before {losses[0]:.3f}, after {min(losses[1:]):.3f}")
    print(f"run folder: {run} (model/ loads with {task.AUTO_MODEL.__name__}; metrics.jsonl has every figure)")


if __name__ == "__main__":
    begin_tool()
    sys.exit(main())
