"""What others put into a run's folders is never deleted or replaced: it is left there, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.absolute_paths import make_paths_absolute
from configs.flags import parse_flags
from ranks.environment import Environment
from reporting.report.page import write_report
from run_folder.checkpoint_folder import checkpoints, keep_only, publish, remove_leftovers, temporary_folder
from run_folder.lock import RunLock
from run_folder.resuming import settle_resume
from run_folder.run_folder import RunFolder
from run_folder.run_yaml import add_to_run_yaml, is_damaged, read_run_yaml
from run_folder.saved_weights import SavedWeights
from tests.helpers.checkpoints import complete
from tests.helpers.limited_files import files_limited_to
from tests.helpers.processes import ROOT, run_command, train_events
from tests.helpers.refusals import Bench, contents, error_lines
from utils.errors import ConfigError

ENV = Environment(0, 0, 1, 1, launched=False)


def begin(output: Path | None, *flags: str, model: Path | str = "org/model") -> Path:
    """Do with the folders what a run does until its first step."""
    where = [] if output is None else ["--output_dir", str(output)]
    config = make_paths_absolute(parse_flags(["--model_name", str(model), *where, *flags]), ENV.started_in)
    config = settle_resume(config, ENV)
    folder = RunFolder.plan(config, ENV)
    folder.check_usable(is_rank_zero=True)
    folder = folder.look()
    resumed = {"from": str(folder.checkpoints[0])} if folder.checkpoints else None
    with RunLock() as lock:
        return folder.take(lock, config, ENV, resolved={}, description={}, resumed=resumed).path


def refusal(output: Path | None, *flags: str, model: Path | str = "org/model", around: Path) -> str:
    before = contents(around)
    with pytest.raises(ConfigError) as refused:
        begin(output, *flags, model=model)
    assert contents(around) == before
    assert "; " in str(refused.value), "the remedy"
    return str(refused.value)


def write(path: Path, text: str = "mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def save(folder: Path) -> Path:
    """A folder like a checkpoint of this program."""
    write(folder / "state.json", json.dumps({"state": {}, "settings": {}}))
    write(folder / "__0_0.distcp", "tensors")
    complete(folder)
    return folder


WAYS = {"plain": [], "auto": ["--resume", "auto"], "overwrite": ["--overwrite"]}


@pytest.mark.parametrize(
    "run_yaml", [None, "a: b\n", "settings: {lr: 1}\n", "", "\0\0", "settings: {train_config: {ou"]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_holds_no_run_is_refused_by_the_names_of_what_it_holds(
    way: str, run_yaml: str | None, tmp_path: Path
) -> None:
    """However the run is begun; run.yaml is not there, or another program's, or damaged."""
    folder = tmp_path / "project"
    write(folder / "checkpoints/checkpoint-500/weights.bin")
    write(folder / "wandb/run-1/logs")
    if run_yaml is not None:
        write(folder / "run.yaml", run_yaml)
    line = refusal(folder, *WAYS[way], around=tmp_path)
    assert str(folder) in line
    assert "checkpoints" in line
    assert "wandb" in line
    assert "give another folder" in line
    if run_yaml is None:
        assert "--resume auto" not in line
        assert "--overwrite" not in line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("--output_dir", "link"),
        ("--output_dir", "link/in/it"),
        ("--dist_checkpoint_root_folder", "link"),
        ("--profiler_dir", "link"),
    ],
)
def test_a_link_to_what_is_not_there_is_named_with_its_flag(flag: str, place: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("scratch/runs")  # a disk that is not mounted
    run = None if flag == "--output_dir" else tmp_path / "run"
    profiles = ["--use_profiler"] if flag == "--profiler_dir" else []
    line = refusal(run, flag, str(tmp_path / place), *profiles, *WAYS[way], around=tmp_path)
    assert line == (
        f"{flag}: {tmp_path}/link is a symbolic link to {tmp_path}/scratch/runs, which is not there; make that folder, "
        "or give another one"
    )


def test_checkpoints_that_are_a_link_to_what_is_not_there_are_named(tmp_path: Path) -> None:
    """Or a run whose checkpoints lie on a disk that is not mounted would start afresh."""
    run = begin(tmp_path / "run")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    line = refusal(run, "--resume", "auto", around=tmp_path)
    assert line.startswith(
        f"--output_dir: {run}/checkpoints is a symbolic link to {tmp_path}/scratch, which is not there"
    )


def test_a_run_that_lost_its_run_yaml_goes_on_in_another_folder(tmp_path: Path) -> None:
    """What else lies in the first one may be anybody's."""
    run = begin(tmp_path / "run")
    checkpoint = save(run / "checkpoints/step-00000003")
    write(run / "model/m")
    (run / "run.yaml").unlink()
    line = refusal(run, "--resume", "auto", around=tmp_path)
    assert f"give another folder (with --resume {checkpoint} to go on from there), or move that away" in line
    new = begin(tmp_path / "new", "--resume", str(checkpoint))
    assert read_run_yaml(new)["resumed"][0]["from"] == str(checkpoint)


def test_the_refusal_is_one_line_and_status_2_and_other_files_are_no_matter(bench: Bench) -> None:
    write(bench.output / "checkpoints/checkpoint-500/weights.bin")
    write(bench.output / "wandb/run-1/logs")
    line = bench.refused("--resume", "auto", world_size=2)
    assert f"--output_dir: {bench.output} holds checkpoints, wandb, but no run" in line
    write(bench.folder / "other/notes.md")
    (bench.folder / "other/tensorboard").mkdir()  # empty: as a job script may make it
    assert begin(bench.folder / "other") == bench.folder / "other"
    assert (bench.folder / "other/notes.md").read_text() == "mine"


def test_what_is_replaced_is_what_the_run_there_wrote_in_any_of_its_sessions(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "--use_peft", "--use_tensorboard")
    for name in ("adapter/a", "tensorboard/events", "traces/stack", "metrics.jsonl"):
        write(run / name)
    save(run / "checkpoints/step-00000003")
    begin(run, "--use_peft", "--save_metrics", "--resume", "auto")
    write(run / "metrics_data.json")
    kept = [
        write(run / name) for name in ("model/merged", "wandb/run-1", "profiler/mine", "checkpoints/notes.md", "a.md")
    ]
    (run / "checkpoints/step-00000009.incomplete").mkdir()
    begin(run, "--use_peft", "--overwrite")
    assert {path for path in run.rglob("*") if path.is_file()} == {*kept, run / "run.yaml"}
    assert read_run_yaml(run)["entries"] == [
        "run.yaml",
        "plan.json",
        "metrics.jsonl",
        "adapter",
        "oom.json",
        "checkpoints",
        "traces",
    ]
    line = refusal(run, "--overwrite", "--use_wandb", around=tmp_path)
    assert "holds model, wandb, which the run there did not write" in line
    line = refusal(run, "--resume", "auto", "--use_wandb", "--use_peft", around=tmp_path)
    assert "holds wandb, which" in line


def test_a_report_is_replaced_whoever_made_it_and_no_other_page(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    page = write(run / "report.html")
    line = refusal(run, "--overwrite", "--report", around=tmp_path)
    assert "holds report.html, which the run there did not write" in line
    begin(run, "--overwrite")
    assert page.exists()
    page.unlink()
    write_report([run], page)
    begin(run, "--resume", "auto", "--report")
    begin(run, "--overwrite")
    assert not page.exists()


def test_a_run_yaml_of_an_earlier_version_tells_by_its_settings_what_the_run_wrote(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "--use_wandb")
    values = read_run_yaml(run)
    del values["entries"]
    (run / "run.yaml").write_text(yaml.safe_dump(values))
    for name in ("wandb/run-1", "model/m", "adapter/mine"):
        write(run / name)
    begin(run, "--overwrite")
    assert sorted(path.name for path in run.iterdir()) == ["adapter", "run.yaml"]


def test_a_run_that_auto_begins_afresh_keeps_the_weights_until_it_has_new_ones(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    write(run / "model/m")
    write(run / "metrics.jsonl", '{"event": "train"}\n')
    begin(run, "--resume", "auto")
    assert sorted(path.name for path in run.iterdir()) == ["model", "run.yaml"]
    assert "model" in read_run_yaml(run)["entries"]


# The folder of checkpoints


def test_files_of_others_stay_beside_the_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "shared/llama-model"
    given = ["--dist_checkpoint_root_folder", str(root.parent), "--dist_checkpoint_folder", "llama"]
    kept = [
        write(root / name) for name in ("step-1000/weights", "step-by-step/notes.md", "step-1.incomplete/x", "best.md")
    ]
    run = begin(tmp_path / "run", *given)
    save(root / "step-00000003")
    save(root / "step-00000006.given-up")
    save(root / "step-00000009.incomplete")
    write(root / "latest", "step-00000003\n")
    line = refusal(tmp_path / "new", *given, around=tmp_path)
    assert f"--dist_checkpoint_folder: {root} already holds a checkpoint; give another folder, or --overwrite" in line
    line = refusal(None, *given, "--resume", "auto", around=tmp_path)
    assert f"--resume {root}/step-00000003 with the --output_dir of its run" in line
    begin(run, *given, "--overwrite")
    assert {path for path in root.rglob("*") if path.is_file()} == set(kept)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("latest", "checkpoint-500\n"),
        ("best", "mine"),
        ("step-00000020/weights.bin", "mine"),
        ("step-00000020/COMPLETE", ""),
        ("step-00000020/state.json", "{}"),
        ("state.safetensors", "mine"),
        ("rank-00000.safetensors", "mine"),
        ("state.pt", "mine"),
        (".metadata", "mine"),
        ("__0_0.distcp", "mine"),
        ("COMPLETE", "done"),
        ("huggingface/config.json", "{}"),
    ],
)
def test_what_a_run_would_replace_among_the_checkpoints_is_refused(
    name: str, text: str, way: str, tmp_path: Path
) -> None:
    root = tmp_path / "shared/llama-model"
    write(root / name, text)
    given = ["--dist_checkpoint_root_folder", str(root.parent), "--dist_checkpoint_folder", "llama"]
    line = refusal(tmp_path / "run", *given, *WAYS[way], around=tmp_path)
    assert f"--dist_checkpoint_folder: {root} holds {name.split('/')[0]}, which this program did not write" in line


def test_deleting_old_checkpoints_and_leftovers_knows_its_own(tmp_path: Path) -> None:
    """By COMPLETE or state.json, one of which may be damaged; and never through a link."""
    archived = save(tmp_path / "archive/step-00000001")
    root = tmp_path / "root"
    for step in (2, 3, 4):
        save(root / f"step-0000000{step}")
    (root / "step-00000001").symlink_to(archived)
    (root / "step-00000002/COMPLETE").write_text("")
    (root / "step-00000003/state.json").write_text("\0\0")
    kept = {write(root / "step-00000000/COMPLETE"), write(root / "step-00000007/weights"), write(root / "step-x/y")}
    kept |= set((root / "step-00000004").iterdir())
    save(root / "step-00000008.incomplete")
    (save(root / "step-00000006") / "COMPLETE").unlink()
    archive = contents(archived)
    keep_only(root, 1)
    remove_leftovers(root)
    assert (root / "step-00000006.given-up/__0_0.distcp").read_text() == "tensors"
    keep_only(root, 1)
    assert {path for path in root.rglob("*") if path.is_file()} == kept
    assert contents(archived) == archive
    assert (root / "step-00000001/COMPLETE").exists(), "through the link"

    write(temporary_folder(root / "step-00000007") / "state.json")
    with pytest.raises(OSError, match="step-00000007 is there, and this program did not write it"):
        publish(root / "step-00000007", {})
    assert (root / "step-00000007/weights").read_text() == "mine"


# What the run reads


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("flag", "place", "dataset"),
    [
        ("--model_name", "model", None),
        ("--tokenizer_name", "checkpoints/step-00000003/huggingface", None),
        ("--from_peft_checkpoint", "adapter/inner", None),
        ("--samsum_dataset.data_path", "model/data.jsonl", None),
        ("--samsum_dataset.data_path", "metrics.jsonl", None),
        ("--samsum_dataset.data_path", "model/*.jsonl", None),
        ("--text_dataset.data_path", "model/texts", "samsum_dataset,text_dataset"),
        ("--custom_dataset.file", "tensorboard/recipe.py", "custom_dataset"),
        ("--chat_dataset.chat_template", "model/chat.jinja", "chat_dataset"),
        ("--config", "model/recipe.yaml", None),
    ],
)
@pytest.mark.parametrize("way", ["auto", "overwrite"])
def test_what_the_run_reads_and_would_replace_is_refused(
    way: str, flag: str, place: str, dataset: str | None, linked: bool, tmp_path: Path
) -> None:
    """Before anything is deleted, with a checkpoint to go on from and without; through symbolic links, too."""
    run = begin(tmp_path / "run", "--use_tensorboard")
    add_to_run_yaml(run, entries=[*read_run_yaml(run)["entries"], "adapter"])
    files = ("inner/a", "data.jsonl", "texts/a.txt", "chat.jinja", "recipe.py")
    for name in [f"{entry}/{file}" for entry in ("model", "adapter", "tensorboard") for file in files]:
        write(run / name)
    write(run / "metrics.jsonl", "{}")
    write(run / "model/recipe.yaml", "lr: 1e-4\n")
    save(run / "checkpoints/step-00000003")
    write(run / "checkpoints/step-00000003/huggingface/tokenizer.json")
    path = run / place
    if linked:
        link = tmp_path / "links" / f"to{path.suffix if '*' not in place else ''}"
        link.parent.mkdir()
        link.symlink_to(path.parent if "*" in place else path)
        # A folder of links is like a model whose files are links.
        path = link.parent if path.is_dir() else link / "*.jsonl" if "*" in place else link
    given = ["--dataset", dataset] if dataset else []
    given += ["--use_peft"] if flag == "--from_peft_checkpoint" else []
    given += [flag, str(path)] if flag != "--model_name" else []
    model = path if flag == "--model_name" else "org/model"
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"^{flag}: .* lies in {run}/.*, which this run replaces or deletes; copy it"):
        begin(run, *given, *WAYS[way], model=model)
    assert contents(tmp_path) == before


def test_what_stays_as_it_is_may_be_read(tmp_path: Path) -> None:
    """Data beside the run's entries, and a model in `model/` that only gets an adapter."""
    run = begin(tmp_path / "run")
    write(run / "model/config.json")
    write(run / "data/train.jsonl")
    add_to_run_yaml(run, entries=["run.yaml", "adapter", "checkpoints"])
    given = ["--samsum_dataset.data_path", str(run / "data"), "--use_peft", "--overwrite"]
    begin(run, *given, model=run / "model")
    assert (run / "model/config.json").read_text() == "mine"


def test_a_linked_folder_of_checkpoints_is_used_and_other_links_are_refused_first(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    elsewhere = tmp_path / "large disk"
    save(elsewhere / "step-00000003")
    write(elsewhere / "notes.md")
    (run / "checkpoints").symlink_to(elsewhere)
    write(tmp_path / "kept/config.json")
    (run / "model").symlink_to(tmp_path / "kept")
    for way in ("auto", "overwrite"):
        line = refusal(run, *WAYS[way], around=tmp_path)
        assert f"model in {run} is a symbolic link" in line
    (run / "model").unlink()
    begin(run, "--overwrite")
    assert [path.name for path in elsewhere.iterdir()] == ["notes.md"]
    assert (run / "checkpoints").is_symlink()


def test_a_run_within_what_another_run_writes_is_refused(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    line = refusal(run / "model/second", around=tmp_path)
    assert f"--output_dir: {run}/model/second lies in {run}/model, which is the run's in {run}" in line
    elsewhere = ["--dist_checkpoint_root_folder", str(run), "--dist_checkpoint_folder"]
    assert "--dist_checkpoint_folder: " in refusal(tmp_path / "new", *elsewhere, "checkpoints/x", around=tmp_path)
    assert "--dist_checkpoint_folder: " in refusal(run, *elsewhere, "model/x", "--overwrite", around=tmp_path)
    begin(run, *elsewhere, "checkpoints/x", "--overwrite")
    begin(run / "sweep/second")


def test_a_folder_that_another_run_began_and_left_in_the_meantime_is_refused(bench: Bench) -> None:
    """Both saw an empty folder. Else the second run would delete what the first one trained."""
    rows = "return [{'input_ids': [5, 6, 7], 'labels': [5, 6, 7]}] * 8"
    few = ["--max_train_step", "2", "--run_validation", "False", "--resume", "auto"]
    whole = bench.folder / "whole"
    bench.group.train(bench.flags(*bench.dataset_function(rows, "inner.py"), *few, "--output_dir", str(whole)), 1)
    body = f"import shutil\nshutil.copytree({str(whole)!r}, {str(bench.output)!r}, dirs_exist_ok=True)\n{rows}"
    outcome = bench.group.run(bench.flags(*bench.dataset_function(body), *few), 1)[0]
    assert outcome.status == 2, outcome.stderr
    (line,) = error_lines(outcome.stderr)
    assert f"another run wrote into {bench.output} while this one was loading" in line
    assert len(train_events(bench.output)) == 2
    assert checkpoints(bench.output / "checkpoints")[0].name == "step-00000002"


# Paths


RECIPE = """
import os, tempfile

def get_rows(dataset_config, tokenizer, split):
    assert os.path.isabs(dataset_config.data_path) and os.path.exists(dataset_config.data_path)
    os.chdir(tempfile.mkdtemp())
    return [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
"""


@pytest.mark.parametrize("output_is_given", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recipe_that_changes_the_working_directory_moves_nothing(
    output_is_given: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """And the settings in run.yaml start the same run, wherever it is started."""
    write(tmp_path / "rows/recipe.py", RECIPE)
    (tmp_path / "model").symlink_to(tiny_model)
    given = {
        "--model_name": "model",
        "--dataset": "rows/recipe.py:get_rows",
        "--custom_dataset.data_path": "rows",
        "--dist_checkpoint_root_folder": "copies",
        "--profiler_dir": "traces",
        "--max_train_step": "7",
        "--num_epochs": "9",
        "--num_workers_dataloader": "1",
        "--batch_size_training": "1",
        "--run_validation": "False",
    }
    given |= {"--output_dir": "runs/first"} if output_is_given else {}
    words = [word for item in given.items() for word in item]
    done = run_command(*words, "--use_profiler", cwd=tmp_path, TMPDIR=str(tmp_path.parent))
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / ("runs" if output_is_given else "outputs")).iterdir()
    assert f"finished: {run}" in done.stdout
    places = sorted(path.name for path in tmp_path.iterdir())
    assert places == sorted(["copies", "model", "rows", "traces", run.parent.name])
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "model", "plan.json", "run.yaml"]
    assert (tmp_path / "copies/fine-tuned-model/COMPLETE").exists()
    if not output_is_given:
        return
    notes = read_run_yaml(run)
    settings: dict[str, Any] = {
        name: notes["settings"][name.split(".")[0]][name.split(".")[1]] for name in notes["given"]
    }
    settings |= {"output_dir": str(tmp_path / "again"), "dist_checkpoint_folder": "again"}
    del settings["train_config.output_dir"]
    write(tmp_path / "again.yaml", yaml.safe_dump(settings))
    done = run_command("--config", str(tmp_path / "again.yaml"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [e["loss"] for e in train_events(tmp_path / "again")] == [e["loss"] for e in train_events(run)]


def test_only_what_is_a_path_becomes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "home/data.jsonl")
    (tmp_path / "auto").mkdir()
    flags = ["--model_name", "org/model", "--resume", "auto", "--samsum_dataset.data_path", "~/data.jsonl"]
    flags += [
        "--custom_dataset.file",
        "no/rows.py:rows",
        "--output_dir",
        "runs/a",
        "--text_dataset.data_path",
        "texts/**/*.txt",
    ]
    config = make_paths_absolute(
        parse_flags([*flags, "--dataset", "samsum_dataset,text_dataset,custom_dataset"]), tmp_path
    )
    train = config.train_config
    assert (train.model_name, train.resume) == ("org/model", "auto")
    assert train.output_dir == str(tmp_path / "runs/a")
    assert config.datasets["samsum_dataset"].data_path == str(tmp_path / "home/data.jsonl")
    assert config.datasets["text_dataset"].data_path == str(tmp_path / "texts/**/*.txt")
    assert config.custom_dataset.file == "no/rows.py:rows", "not there: named as it was given"


def test_a_deeply_nested_run_yaml_is_a_damaged_one(tmp_path: Path) -> None:
    write(tmp_path / "run.yaml", "[" * 1500)
    assert read_run_yaml(tmp_path) == {}
    assert is_damaged(tmp_path)


def test_so_is_one_that_was_cut_anywhere_and_its_run_goes_on(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", "--use_tensorboard")
    save(run / "checkpoints/step-00000003")
    write(run / "tensorboard/events")
    lines = (run / "run.yaml").read_text().splitlines(keepends=True)
    (last,) = [number for number, line in enumerate(lines) if line.startswith("started:")]
    for end in range(2, last):  # shorter, it may be anybody's
        write(run / "run.yaml", "".join(lines[: end + 1]))
        assert is_damaged(run), lines[end]
        assert "is damaged" in refusal(run, "--overwrite", around=tmp_path)
    begin(run, "--use_tensorboard", "--resume", "auto")
    assert read_run_yaml(run)["started"]


def test_a_run_yaml_that_the_disk_refuses_is_named_and_the_earlier_one_stays(tmp_path: Path) -> None:
    with files_limited_to(1000), pytest.raises(ConfigError) as refused:  # the lock takes less
        begin(tmp_path / "run")
    line = f"--output_dir: {tmp_path}/run/run.yaml cannot be written (File too large); give a folder that can"
    assert str(refused.value) == line
    assert not (tmp_path / "run").exists()

    run = begin(tmp_path / "run")
    before = (run / "run.yaml").read_text()
    weights = SavedWeights(ENV, run)
    with files_limited_to(1000):
        weights.note_saved(3, run / "model")
        assert weights.write() == "File too large"
    assert {file.name: file.read_text() for file in run.iterdir()} == {"run.yaml": before}
    assert weights.write() == ""
    assert read_run_yaml(run)["saved"] == {"step": 3, "folder": "model"}
