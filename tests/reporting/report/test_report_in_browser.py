"""The page in a real browser: it renders without an error, its curves have their points, and it works by keyboard."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reporting.report.live import LivePage, ReportServer
from reporting.report.page import write_report
from tests.helpers.browser import Visit, chromium, visit
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.report_pages import long_run

CURVES = ["loss", "eval_loss", "tokens_per_second", "wait_percent", "grad_norm", "lr", "model_tflops_per_device"]
MEMORY = [f"memory-{phase}" for phase in range(4)]

INK = """id => {
  const canvas = document.querySelector(`#${id} canvas`);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [red, green, blue, alpha] = pixels.slice(i, i + 4);
    if (alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) count += 1;
  }
  return count;
}"""
"""How many pixels of a chart have a colour: its grid and its labels are grey."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, samples: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two real runs, the second resumed, and a longer one made up."""
    root = tmp_path_factory.mktemp("runs")
    flags = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(samples)]
    flags += ["--num_workers_dataloader", "0", "--batch_size_training", "2", "--batching_strategy", "padding"]
    flags += ["--save_model", "False"]
    process_group.train([*flags, "--enable_fsdp", "--eval_before_training", "--output_dir", str(root / "full")], 2)
    for steps in ("5", "12"):
        more = ["--lr", "1e-3", "--max_train_step", steps, "--output_dir", str(root / "resumed"), "--resume", "auto"]
        process_group.train([*flags, *more], 1)
    long_run(root / "long", num_steps=6000, num_ranks=2, spike=1234)
    return [root / "full", root / "resumed", root / "long"]


@pytest.fixture(scope="module")
def files(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name: of one run, and of three."""
    folder = tmp_path_factory.mktemp("pages")
    write_report(runs[:1], folder / "one.html")
    write_report(runs, folder / "three.html", price_per_hour=3.5)
    return {name: folder / f"{name}.html" for name in ("one", "three")}


def points(visited: Visit, chart: str) -> list[list[Any]]:
    """The x values and each curve's values that a chart draws."""
    found = visited.page.evaluate("id => charts.get(id).data.map(values => Array.from(values, v => v ?? null))", chart)
    return list(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["one", "three"])
def test_it_renders_without_an_error_at_any_width(
    name: str, width: int, scheme: str, browser: Any, files: dict[str, Path]
) -> None:
    context = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "offline": True}
    with visit(browser, files[name].as_uri(), **context) as visited:
        assert visited.page.evaluate("[...charts.keys()]") == CURVES + MEMORY
        for chart in CURVES + MEMORY:
            assert visited.page.evaluate(INK, chart) > 50, chart
        assert visited.page.evaluate("document.documentElement.scrollWidth") == width
        ground = visited.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(246, 246, 244)", "dark": "rgb(18, 20, 24)"}[scheme]
        assert visited.errors == []
        assert visited.requests == [files[name].as_uri()]


@pytest.mark.parametrize("num_runs", [3, 10])
def test_printed_tables_are_not_cut_off(num_runs: int, browser: Any, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report((runs * 4)[:num_runs], page)
    with visit(browser, page.as_uri(), viewport={"width": 718, "height": 1000}) as visited:  # A4 without its margins
        visited.page.emulate_media(media="print")
        overflow = "[...document.querySelectorAll('.scroll')].map(table => table.scrollWidth - table.clientWidth)"
        assert set(visited.page.evaluate(overflow)) == {0}


def test_curves_have_their_points(browser: Any, files: dict[str, Path], runs: list[Path]) -> None:
    events = read_metrics(runs[0])
    train, evals = ([event for event in events if event["event"] == name] for name in ("train", "eval"))
    with visit(browser, files["one"].as_uri()) as visited:
        steps, losses = points(visited, "loss")
        assert steps == [event["step"] for event in train]
        assert losses == pytest.approx([event["loss"] for event in train], rel=1e-4)
        steps, losses = points(visited, "eval_loss")
        assert steps == [event["step"] for event in evals]
        assert losses == pytest.approx([event["loss"] for event in evals], rel=1e-4)
        for place, phase in enumerate(["before_forward", "after_forward", "after_backward", "after_optimizer_step"]):
            rank = visited.page.evaluate("data.runs[0].memory.ranks[0]")
            held = [e for e in events if e["event"] == "memory" and (e["phase"], e["rank"]) == (phase, rank)]
            steps, *heights, peaks = points(visited, f"memory-{place}")
            assert steps == [event["step"] for event in held]
            assert heights[-1] == pytest.approx([event["allocated_gib"] for event in held], rel=1e-2)
            assert heights[0] == pytest.approx([event["params_gib"] for event in held], rel=1e-3)
            assert peaks == pytest.approx([event["peak_allocated_gib"] for event in held], rel=1e-3)


def test_runs_are_shown_over_tokens_time_and_price_and_left_out_by_keyboard(
    browser: Any, files: dict[str, Path], runs: list[Path]
) -> None:
    with visit(browser, files["three"].as_uri()) as visited:
        page = visited.page
        steps = points(visited, "loss")[0]
        page.focus("input[name=axis]:checked")
        for axis in ("tokens", "seconds", "price"):
            page.keyboard.press("ArrowRight")
            assert page.evaluate("view.axis") == axis
            xs = points(visited, "loss")[0]
            ends = page.evaluate("axis => data.runs.map(run => places(run, run.train, axis).at(-1))", axis)
            assert (xs[-1], xs != steps) == (max(ends), True)
        seconds = sum(event["step_seconds"] for event in read_metrics(runs[2]) if event["event"] == "train")
        assert points(visited, "loss")[0][-1] == pytest.approx(seconds * 3.5 / 3600, rel=1e-4)
        curves = len(points(visited, "grad_norm"))
        page.focus("[data-show='0']")
        page.keyboard.press("Space")
        assert len(points(visited, "grad_norm")) == curves - 1
        page.focus("#log")
        page.keyboard.press("Space")
        assert page.evaluate("charts.get('loss').scales.y.distr") == 3
        assert visited.errors == []


def test_values_are_read_and_zoomed_by_keyboard(browser: Any, files: dict[str, Path], runs: list[Path]) -> None:
    train = [event for event in read_metrics(runs[0]) if event["event"] == "train"]
    with visit(browser, files["one"].as_uri()) as visited:
        page = visited.page
        page.focus("#loss .plot")
        for step in (1, 2, 3):
            page.keyboard.press("ArrowRight")
            said = page.inner_text("#loss output")
            assert said.startswith(f"step {step}, full ")
            assert float(said.split()[-1]) == pytest.approx(train[step - 1]["loss"], rel=1e-3)
        page.keyboard.press("+")
        low, high = page.evaluate("[charts.get('grad_norm').scales.x.min, charts.get('grad_norm').scales.x.max]")
        assert 1 < low < 3 < high < len(train), "all charts zoom around the cursor"
        page.keyboard.press("0")
        assert page.evaluate("charts.get('grad_norm').scales.x.max") == len(train)
        page.keyboard.press("End")
        assert page.inner_text("#loss output").startswith(f"step {len(train)},")
        assert visited.errors == []


def pasted(page: Any) -> str:
    """What the clipboard holds, pasted by keyboard into a field of its own."""
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), {id: 'pasted'}))")
    page.focus("#pasted")
    page.keyboard.press("Control+V")
    text = str(page.input_value("#pasted"))
    page.evaluate("document.getElementById('pasted').remove()")
    return text


def test_the_table_is_copied_and_files_are_downloaded(browser: Any, files: dict[str, Path], runs: list[Path]) -> None:
    with visit(browser, files["three"].as_uri(), accept_downloads=True) as visited:
        page = visited.page
        page.click("[data-copy=markdown]")
        assert page.inner_text("#said") == "Copied."
        lines = pasted(page).splitlines()
        assert lines[0] == "| figure | full | resumed | long |"
        assert "| status | finished | finished | finished |" in lines
        page.click("[data-copy=text]")
        assert pasted(page).splitlines()[0] == "figure\tfull\tresumed\tlong"
        rows = {}
        for kind in ("figures", "curves", "memory"):
            with page.expect_download() as started:
                page.click(f"[data-csv={kind}]")
            assert started.value.suggested_filename == f"{kind}.csv"
            text = Path(started.value.path()).read_text()
            rows[kind] = list(csv.DictReader(io.StringIO(text)))
        events = read_metrics(runs[0])
        of_first = [row for row in rows["curves"] if (row["run"], row["event"]) == ("full", "train")]
        losses = [event["loss"] for event in events if event["event"] == "train"]
        assert [float(row["loss"]) for row in of_first] == pytest.approx(losses, rel=1e-4)
        held = [row for row in rows["memory"] if row["run"] == "full"]
        assert len(held) == len([event for event in events if event["event"] == "memory"])
        peak = next(row for row in rows["figures"] if row["figure"] == "peak measured, fullest rank (GiB)")
        assert float(peak["full"]) == pytest.approx(events[-1]["peak_allocated_gib"])
        assert visited.errors == []


def test_no_two_of_ten_runs_look_alike_without_colour(browser: Any, files: dict[str, Path]) -> None:
    with visit(browser, files["one"].as_uri()) as visited:
        styles = visited.page.evaluate("[...Array(10).keys()].map(i => [runStyle(i).dash, runStyle(i).mark])")
        assert len({json.dumps(style) for style in styles}) == 10
        grey = "i => [...partSwatch(i).getContext('2d').getImageData(3, 3, 16, 8).data].join()"
        assert len({visited.page.evaluate(grey, part) for part in range(5)}) == 5


def test_a_long_run_says_that_it_is_thinned_out_and_keeps_its_spike(browser: Any, files: dict[str, Path]) -> None:
    with visit(browser, files["three"].as_uri()) as visited:
        assert "long: " in visited.page.inner_text("#thinned")
        assert "of 6000 steps" in visited.page.inner_text("#thinned")
        assert max(value or 0 for values in points(visited, "loss")[1:] for value in values) == 77.25


def test_a_hostile_run_runs_nothing(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"`${alert(3)}"
    folder = tmp_path / evil.replace("/", "\u2215")
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes((runs[0] / "metrics.jsonl").read_bytes())
    (folder / "run.yaml").write_text(json.dumps({"settings": {"train_config": {evil: evil}}, "command": evil}))
    write_report([folder, runs[1]], tmp_path / "page.html")
    with visit(browser, (tmp_path / "page.html").as_uri()) as visited:
        visited.page.wait_for_timeout(300)
        assert visited.errors == []
        assert visited.requests == [(tmp_path / "page.html").as_uri()]
        assert visited.page.evaluate("document.images.length") == 0


def test_a_served_page_follows_the_run_and_keeps_what_is_chosen(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (folder / "run.yaml").write_bytes((runs[0] / "run.yaml").read_bytes())
    (folder / "metrics.jsonl").write_text("".join(lines[:half]) + lines[half][:30])
    with ReportServer(LivePage([folder], price_per_hour=None, say=print), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with visit(browser, server.url) as visited:
            page = visited.page
            page.check("input[value=tokens]")
            before = len(points(visited, "loss")[0])
            (folder / "metrics.jsonl").write_text("".join(lines))
            total = len([line for line in lines if '"event": "train"' in line])
            page.wait_for_function("n => charts.get('loss').data[0].length === n", arg=total)
            assert before < total
            assert page.evaluate("view.axis") == "tokens"
            assert "finished" in page.inner_text("#table")
            assert page.inner_text("#live") == "live"
            assert visited.errors == []
            assert {request.split("?")[0] for request in visited.requests} == {server.url}
            server.shutdown()
