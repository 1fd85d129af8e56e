"""The page about runs: made from real run folders, it holds their figures, and nothing of them is trusted."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from reporting.report.figures import gib_text
from reporting.report.page import report_page, write_report
from reporting.report.thinning import kept_points, trailing_means
from tests.helpers.contract import PHASES
from tests.helpers.made import Made
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics
from tests.helpers.refusals import write_lines
from tests.helpers.report_pages import Page, long_run
from tests.helpers.small_device import on_small_device

MOST_BYTES = 2 * 2**20
NONE = "\u2013"


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, samples: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """Real runs by name: `full` on two ranks, `lora` resumed after step 2, and two that failed.

    `failed` by a step that is not finite, `oom` on a device that is too small for its forward pass.
    """
    root = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Path:
        flags = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples), "--output_dir"]
        flags += [str(root / name), "--num_workers_dataloader", "0", "--batch_size_training", "2", "--report"]
        flags += ["--batching_strategy", "padding"]
        if name == "full":
            more = ["--enable_fsdp", "--num_epochs", "2", "--eval_before_training", "--price_per_hour", "7200"]
            process_group.train([*flags, *more], 2)
        if name == "lora":
            for steps, resume in (("2", []), ("4", ["--resume", "auto"])):
                more = ["--use_peft", "--lr", "3e-3", "--max_train_step", steps, *resume]
                process_group.train([*flags, *more], 1)
        if name == "failed":
            more = ["--optimizer", "SGD", "--lr", "1e6", "--gradient_clipping", "False"]
            (outcome,) = process_group.run([*flags, *more], 1)
            assert outcome.status == 1, outcome.stderr
        if name == "oom":
            process_group.train(on_small_device([*flags, "--max_train_step", "1"]), 1)
            before, in_forward = (e["peak_allocated_gib"] for e in read_metrics(root / name)[2:4])
            too_little = [*flags, "--overwrite", "--eval_every_steps", "9"]
            (outcome,) = process_group.run(on_small_device(too_little, (before + in_forward) / 2), 1)
            assert outcome.status == 1, outcome.stderr
        return root / name

    return Made(make)


def page_of(*folders: Path, **options: Any) -> Page:
    return Page(report_page(folders, **options))


# One run


def test_the_page_needs_nothing_but_itself(runs: Made) -> None:
    page = page_of(runs["full"])
    attributes = [attribute for _, of_element in page.elements for attribute in of_element.items()]
    targets = [value for name, value in attributes if name in ("src", "href")]
    assert sorted(targets) == ["#figures", "data:,", "https://github.com/leeoniya/uPlot"]
    assert not re.search(r"url\(|@import", "".join(page.texts["style"]))
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    for script in re.findall(r"<script>(.*?)</script>", page.html, flags=re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(page.html.encode()) < 300_000


def test_curves_hold_every_step_evaluation_and_rank(runs: Made) -> None:
    events = read_metrics(runs["full"])
    of = {name: [event for event in events if event["event"] == name] for name in ("train", "eval", "memory")}
    (run,) = page_of(runs["full"]).data["runs"]
    assert run["train"]["step"] == [event["step"] for event in of["train"]]
    assert run["train"]["loss"] == pytest.approx([event["loss"] for event in of["train"]], rel=1e-4)
    assert run["train"]["tokens"][-1] == sum(event["num_tokens"] for event in of["train"])
    assert run["train"]["seconds"][-1] == pytest.approx(sum(event["step_seconds"] for event in of["train"]), rel=1e-5)
    assert run["eval"]["step"] == [event["step"] for event in of["eval"]]
    assert run["eval"]["step"][0] == run["eval"]["tokens"][0] == 0
    assert run["eval"]["loss"] == pytest.approx([event["loss"] for event in of["eval"]], rel=1e-4)
    memory = run["memory"]
    assert sorted(memory["ranks"]) == [0, 1]
    for event in of["memory"]:
        place = memory["step"].index(event["step"])
        rank, phase = memory["ranks"].index(event["rank"]), PHASES.index(event["phase"])
        for part in ("params", "grads", "optimizer", "activations", "other", "peak_allocated"):
            held = memory["values"][part][phase][rank][place]
            assert held == pytest.approx(event[f"{part}_gib"], rel=1e-3)


def test_the_table_says_what_a_run_waited_for(tmp_path: Path) -> None:
    """The shares are medians over the steps that were measured: of 10 s, 1, 3 and 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"event": "train", "step": step, "step_seconds": 10.0} for step in range(1, 6)]
    lines += [
        {"event": "communication", "step": step, "exposed_seconds": exposed, "straggler_seconds": 0.5}
        for step, exposed in ((3, 1.0), (4, 3.0), (5, 4.0), (9, 9.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    figures = page_of(folder).figures()
    assert figures["wait for tensors of other ranks, share of a step %"] == ["30.0"]
    assert figures["wait for slower ranks, share of a step %"] == ["5.0"]


def test_the_table_says_what_the_run_came_to(runs: Made) -> None:
    events, figures = read_metrics(runs["full"]), page_of(runs["full"]).figures()
    end = events[-1]
    best = min((event for event in events if event["event"] == "eval"), key=lambda event: event["loss"])
    assert figures["status"] == ["finished"]
    assert figures["evaluation loss, best"] == [f"{best['loss']:.4f}"]
    assert figures["evaluation loss, best, at step"] == [str(best["step"])]
    assert figures["peak measured, fullest rank GiB"] == [f"{end['peak_allocated_gib']:.3f}"]
    assert float(figures["price"][0].replace(",", "")) == pytest.approx(2 * end["seconds"], abs=0.1), "run.yaml's price"
    figures = page_of(runs["full"], price_per_hour=36_000).figures()
    assert float(figures["price"][0].replace(",", "")) == pytest.approx(10 * end["seconds"], abs=0.1)


def test_planned_peak_stands_beside_the_measured_one(runs: Made, tmp_path: Path) -> None:
    """Where an allocator knows the peak; on a CPU it is that of the whole process."""
    folder = copy_of(runs["full"], tmp_path)
    events = [event for event in read_metrics(folder) if event["event"] == "memory"]
    measured = max(event["peak_allocated_gib"] for event in events)
    params = max(event["params_gib"] for event in events)
    plan = {"verdict": "fits", "peak_gib": measured / 2, "overhead_gib": 0.3 * measured, "params_gib": 1.5}
    (folder / "plan.json").write_text(json.dumps(plan | {"seconds_per_step": 0.5}))
    page = page_of(folder)
    assert page.figures()["peak planned GiB"] == [f"{0.8 * measured:.3f}"]
    assert page.figures()["seconds per step, planned"] == ["0.500"]
    assert page.figures()["measured against planned %"] == ["+25.0"]
    assert page.data["runs"][0]["planned_peak_gib"] == pytest.approx(0.8 * measured)
    (table,) = [table for table in page.tables if table[0][1] == "source"]
    assert [row[1:3] for row in table[1:]] == [["planned", "1.500"], ["measured", gib_text(params)]]
    assert [row[-1] for row in table[1:]] == [gib_text(0.8 * measured), gib_text(measured)]
    on_gpu = (folder / "metrics.jsonl").read_text().replace('"reserved_gib": null', '"reserved_gib": 9.5')
    (folder / "metrics.jsonl").write_text(on_gpu)
    page = page_of(folder)
    assert page.figures()["peak planned GiB"] == [f"{measured / 2:.3f}"]
    assert page.figures()["measured against planned %"] == ["+100.0"]
    assert page.data["runs"][0]["planned_peak_gib"] == pytest.approx(measured / 2)


def test_the_run_that_was_asked_wrote_its_own_page(runs: Made) -> None:
    page = Page((runs["full"] / "report.html").read_text())
    assert page.figures()["status"] == ["finished"]
    assert page.data["runs"][0]["train"]["step"] == page_of(runs["full"]).data["runs"][0]["train"]["step"]
    assert Page((runs["failed"] / "report.html").read_text()).figures()["status"] == ["failed"]
    assert "ran out of device memory on rank 0 in forward, step 1" in (runs["oom"] / "report.html").read_text()


# How a run ended


def test_a_run_that_failed_or_was_resumed_says_so_at_the_top(runs: Made) -> None:
    page = page_of(runs["failed"], runs["lora"])
    assert page.notices[0].startswith("failed failed after step ")
    assert page.notices[1] == "lora was resumed after step 2"
    assert page.html.index('class="notices"') < page.html.index("<table")
    (pieces,) = [table for table in page.tables if table[0][1] == "session"]
    assert [row[:4] for row in pieces[1:]] == [["lora", "1", "1 to 2", "1"], ["lora", "2", "3 to 4", "1"]]
    assert page.data["runs"][1]["resumed_after"] == [2]


def test_memory_that_ran_out_is_told_with_the_commands_that_need_less(runs: Made) -> None:
    page, account = page_of(runs["oom"]), json.loads((runs["oom"] / "oom.json").read_text())
    where = "oom ran out of device memory on rank 0 in forward, step 1"
    assert page.notices[:2] == ["oom failed after step 0 of 18", where]
    held = page.table("in")
    assert held["in"] == [account["module"]]
    assert held["asked for"] == [f"{account['asked_gib']:,.3f} GiB"]
    assert held["parameters"][0].startswith(f"{account['params_gib']:,.3f} GiB (largest: model.embed_tokens.weight ")
    assert page.texts["pre"][: len(account["changes"])] == [change["command"] for change in account["changes"]]


def copy_of(run: Path, folder: Path) -> Path:
    """What a report is made from."""
    target = folder / run.name
    target.mkdir(parents=True)
    for name in ("run.yaml", "metrics.jsonl"):
        (target / name).write_bytes((run / name).read_bytes())
    return target


@pytest.mark.parametrize(
    ("status", "notice"),
    [("stopped", "full stopped after step"), (None, "full has not ended: it was killed after step")],
)
def test_other_ends(status: str | None, notice: str, runs: Made, tmp_path: Path) -> None:
    folder = copy_of(runs["full"], tmp_path)
    text = (folder / "metrics.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(text.replace("finished", status) if status else "".join(lines[:-1]))
    assert page_of(folder).notices[0].startswith(notice)


def test_a_line_that_is_being_written_is_left_out_and_a_broken_one_is_counted(runs: Made, tmp_path: Path) -> None:
    folder = copy_of(runs["full"], tmp_path)
    whole = page_of(folder).data["runs"][0]["train"]
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if '"event": "train"' in line)
    (folder / "metrics.jsonl").write_text("".join(lines[:last]) + lines[last][: len(lines[last]) // 2])
    page = page_of(folder)
    assert page.data["runs"][0]["train"]["step"] == whole["step"][:-1]
    assert not [notice for notice in page.notices if "no events" in notice]
    (folder / "metrics.jsonl").write_text("".join([*lines[:last], lines[last][:40] + "\n", *lines[last + 1 :]]))
    page = page_of(folder)
    assert page.data["runs"][0]["train"]["step"] == whole["step"][:-1]
    assert "full left out: 1 line of metrics.jsonl without an event of a run" in page.notices


# Several runs


def test_settings_that_differ_stand_beside_each_other(runs: Made) -> None:
    page = page_of(runs["full"], runs["lora"])
    differing = page.table("setting")
    assert differing["setting"] == ["full", "lora"]
    assert differing["train_config.use_peft"] == ["False", "True"]
    assert differing["train_config.lr"] == ["0.0001", "0.003"]
    assert differing["world_size"] == ["2", "1"]
    assert "train_config.model_name" not in differing
    assert "train_config.output_dir" not in differing


def test_runs_of_one_name_are_told_apart(runs: Made, tmp_path: Path) -> None:
    copies = [copy_of(runs["full"], tmp_path / name) for name in ("a", "b")]
    assert [run["name"] for run in page_of(*copies).data["runs"]] == ["a/full", "b/full"]


@pytest.mark.slow
def test_ten_long_runs_stay_below_two_mebibytes_and_keep_their_extremes(tmp_path: Path) -> None:
    first = tmp_path / "run-0"
    long_run(first, num_steps=6_000, num_ranks=8, spike=1234)
    folders = [first] + [tmp_path / f"run-{number}" for number in range(1, 10)]
    for folder in folders[1:]:
        folder.symlink_to(first)
    page = page_of(*folders)
    assert len(page.html.encode()) < MOST_BYTES
    for run in page.data["runs"]:
        assert 600 < len(run["train"]["step"]) < run["num_steps"] == 6_000
        of = dict(zip(run["train"]["step"], run["train"]["loss"], strict=True))
        assert (of[1234], of[1235]) == (77.25, 0.125)
        assert {1, 6_000} <= set(of)
        assert run["train"]["tokens"][-1] == sum(4096 + step % 7 for step in range(1, 6_001))
        assert run["memory"]["step"][-1] == 6_000
        assert len(run["memory"]["ranks"]) == 8


def test_of_many_ranks_the_fullest_and_the_emptiest_are_shown(tmp_path: Path) -> None:
    long_run(tmp_path / "wide", num_steps=3, num_ranks=40, spike=1)
    page = page_of(tmp_path / "wide")
    assert page.notices == ["wide shows the memory of 16 of 40 ranks, the fullest and emptiest among them"]
    ranks = page.data["runs"][0]["memory"]["ranks"]
    assert ranks == [39, *range(15)]
    (peaks,) = [table for table in page.tables if table[0][1] == "rank"]
    assert [int(row[1]) for row in peaks[1:]] == sorted(ranks)


def test_thinning_keeps_the_lowest_and_highest_of_each_column() -> None:
    columns = [[float((7 * row) % 101) for row in range(1000)], [None] * 500 + [float(-row) for row in range(500)]]
    kept = kept_points(columns, 100)
    assert len(kept) <= 100
    for column in columns:
        values, left = ([column[row] for row in rows if column[row] is not None] for rows in (range(1000), kept))
        assert (min(values), max(values)) == (min(left), max(left))
    assert kept_points(columns, 1000) == list(range(1000))


# A folder of someone else's


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>"


def test_nothing_of_a_run_becomes_part_of_the_page(runs: Made, tmp_path: Path) -> None:
    folder = copy_of(runs["full"], tmp_path).rename(tmp_path / HOSTILE.replace("/", "\u2215"))
    notes = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(f"command: {json.dumps(HOSTILE)}\n" + notes.replace("command:", "other:"))
    settings = {"settings": {"train_config": {HOSTILE: HOSTILE, "lr": [[[[HOSTILE]]]]}}, "given": [HOSTILE, 3]}
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.yaml").write_text(json.dumps(settings | {"devices": HOSTILE, "resumed": 3, "command": HOSTILE}))
    sample = {"event": "sample", "step": 1, "row": HOSTILE, "reference": [1]}
    sample |= dict.fromkeys(("dataset", "prompt", "generated"), HOSTILE)
    write_lines(other / "samples.jsonl", [sample])
    (other / "oom.json").write_text(json.dumps({HOSTILE: {HOSTILE: [HOSTILE]}}))
    (other / "plan.json").write_text(json.dumps({"peak_gib": HOSTILE}))
    (other / "lock.json").write_text(json.dumps({"process": HOSTILE}))
    plain, page = page_of(runs["full"], runs["lora"]), page_of(folder, other)
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert len(page.texts["script"]) == len(plain.texts["script"])
    assert page.table("setting")[f"train_config.{HOSTILE}"] == [NONE, HOSTILE]


def test_events_of_any_content_are_read_past(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("settings: [1, 2]\ndata: x\nmodel: 3\nversions: [a]\n")
    good = {"event": "train", "step": 2, "loss": 1.5, "step_seconds": 1, "num_tokens": 7}
    bad: list[Any] = [
        [1], 3, None, {"event": 5}, {"event": "train"}, {"event": "train", "step": "1"}, {"event": "train", "step": -1},
        {"event": "train", "step": 10**400}, {"event": "memory", "step": 1, "rank": 0, "phase": "<b>"},
        {"event": "memory", "step": 1, "rank": [0], "phase": "after_forward"}, {"event": "end", "status": "<b>"},
    ]  # fmt: skip
    odd = [
        {"event": "start", "world_size": "x", "num_steps": 1e999},
        {"event": "train", "step": 1, "loss": float("nan"), "step_seconds": -1e300, "num_tokens": True, "lr": 10**400},
        {"event": "eval", "step": 3, "loss": [1], "rougeL": "9"},
        {"event": "checkpoint", "seconds": "long"},
        {"event": "later versions have this"},
        {"event": "end", "status": "failed", "seconds": 1e90},
    ]
    lines = [json.dumps(line) for line in [*bad, *odd, good]] + ["[" * 100_000, "\x00\ufffd"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(tmp_path, price_per_hour=1.0)
    assert page.data["runs"][0]["train"]["loss"] == [None, 1.5]
    assert page.figures()["status"] == ["failed"]
    assert any(f"{len(bad) + 2} lines of metrics.jsonl" in notice for notice in page.notices)


def test_a_file_that_is_no_report_is_not_replaced(runs: Made, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("<h1>My notes</h1>")
    with pytest.raises(Exception, match="is there and is no report of runs; give another file"):
        write_report([runs["full"]], target)
    assert target.read_text() == "<h1>My notes</h1>"
    target.unlink()
    size = write_report([runs["full"]], target)
    assert write_report([runs["full"]], target) == pytest.approx(size, abs=9), "a report is replaced"


# The flag

LIMITED = """
import resource
from tests.helpers.random_documents import get_custom_dataset as documents

def get_custom_dataset(dataset_config, tokenizer, split):
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # metrics.jsonl and run.yaml are smaller, the page not
    return documents(dataset_config, tokenizer, split)
"""


def test_a_page_that_cannot_be_written_is_said_and_the_run_has_finished(
    tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.py"
    recipe.write_text(LIMITED)
    flags = ["--model_name", str(tiny_model), "--dataset", str(recipe), "--output_dir", str(run), "--report"]
    flags += ["--num_workers_dataloader", "0", "--max_train_step", "1", "--save_model", "False"]
    (done,) = process_group.train([*flags, "--save_every_steps", "0"], 1)
    assert f"--report: the page could not be written (File too large); python -m tools.report {run} may" in done.stdout
    assert read_metrics(run)[-1]["status"] == "finished"
    assert [file.name for file in run.glob("report.html*")] == []


# What is bundled


def test_the_bundled_library_is_what_its_page_says() -> None:
    folder = ROOT / "reporting/report/assets/uplot"
    stated = dict(re.findall(r"\| `(\S+)` \| `(\w{64})` \|", (folder / "SOURCE.md").read_text()))
    assert set(stated) == {"uPlot.iife.js", "uPlot.min.css"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in stated} == stated
    assert "The MIT License" in (folder / "LICENSE").read_text()


def test_running_means_are_means_of_what_is_there_and_are_made_in_a_moment() -> None:
    column = [None, 1.0, 3.0, None, math.inf, 5.0, 7.0, None, None, None]
    assert trailing_means(column, 3) == [None, 1.0, 2.0, 2.0, math.inf, math.inf, math.inf, 6.0, 7.0, None]
    assert trailing_means([float(step) for step in range(100_000)], 2_000)[-1] == pytest.approx(98_999.5)
