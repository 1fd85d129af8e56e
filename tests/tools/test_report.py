"""tools.report as a command: where it writes, and what it refuses."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT
from tests.helpers.report_pages import Page, long_run
from tools.report import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    long_run(tmp_path / "run", num_steps=4, num_ranks=1, spike=2)
    return tmp_path / "run"


def test_one_run_gets_its_page_in_its_folder_and_several_where_they_are_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run)]) == 0
    assert Page((run / "report.html").read_text()).texts["h1"] == ["run"]
    assert capsys.readouterr().out.startswith(f"{run}/report.html: 1 run, ")
    long_run(tmp_path / "other", num_steps=3, num_ranks=1, spike=2)
    assert main(["run", "other"]) == 0
    assert Page((tmp_path / "report.html").read_text()).texts["h1"] == ["2 runs"]
    assert main(["run", "other", "--out", "b.html", "--price_per_hour", "3"]) == 0
    assert Page((tmp_path / "b.html").read_text()).figures()["price of a machine per hour"] == ["3.00", "3.00"]


def test_the_documented_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lora", "qlora", "full"):
        long_run(tmp_path / "outputs" / name, num_steps=3, num_ranks=1, spike=2)
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^python -m tools.report (.*)$", (ROOT / "docs/report.md").read_text(), flags=re.MULTILINE)
    written = [line for line in lines if "--watch" not in line]
    assert len(written) == 2
    assert [main(shlex.split(line)) for line in written] == [0, 0]
    assert {path.parent for path in tmp_path.rglob("report.html")} == {tmp_path, tmp_path / "outputs/lora"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["EMPTY"], "RUN: EMPTY holds no run (neither run.yaml nor metrics.jsonl); give the folder of a run, or"),
        (["RUN", "RUN"], "RUN: a run is given twice; give each once"),
        (["RUN", "--port", "80"], "--port: is for --watch; give both, or neither"),
        (["RUN", "--port", "-1", "--watch"], "--port: -1 is not a port; give 1 to 65535, or leave it out"),
        (["RUN", "--out", "x.html", "--watch"], "--out: --watch writes no file; leave one of them out"),
        (["RUN", "--price_per_hour", "-1"], "--price_per_hour: -1.0 is not a price; give a number from 0 on"),
        (["RUN", "--price_per_hour", "nan"], "--price_per_hour: nan is not a price; give a number from 0 on"),
        (["RUN", "--out", "RUN/run.yaml"], "--out: RUN/run.yaml is there and is no report of runs; give another file"),
    ],
)
def test_refused_in_one_line(
    flags: list[str], line: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_place(text: str) -> str:
        return text.replace("RUN/", f"{run}/").replace("EMPTY", str(tmp_path / "empty"))

    assert main([str(run) if flag == "RUN" else in_place(flag) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {in_place(line)}")
    assert error.count("\n") == 1


def test_what_cannot_be_written_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--out", str(run / "no/such/folder.html")]) == 2
    line = f"error: --out: there is no folder {run / 'no/such'}; make it, or give another file\n"
    assert capsys.readouterr().err == line


def test_a_page_that_the_disk_takes_in_part_is_named_and_deleted(run: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: both are found out when the file is open."""
    page = tmp_path / "page.html"
    command = ["prlimit", "--fsize=5000", sys.executable, "-m", "tools.report", str(run), "--out", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {page} cannot be written (File too large)\n")
    assert list(tmp_path.glob("page*")) == []
