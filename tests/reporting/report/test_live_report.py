"""tools.report --watch: the page is served on this machine alone, and follows a run that goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from functools import partial
from pathlib import Path

import pytest

from reporting.report.live import LivePage, ReportServer
from tests.helpers.processes import ROOT, free_port
from tests.helpers.report_pages import Page

RUN_YAML = "settings: {train_config: {lr: 0.1}}\n"


def line(step: int) -> str:
    return json.dumps({"event": "train", "step": step, "loss": 1 / step, "step_seconds": 0.5, "num_tokens": 9}) + "\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ReportServer]:
    said: list[str] = []
    with ReportServer(LivePage([tmp_path / "run"], price_per_hour=None, say=said.append), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(url: str, **headers: str) -> tuple[int, str, Message]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def steps_of(page: str) -> list[int]:
    return Page(page).data["runs"][0]["train"]["step"]


def test_a_run_that_is_not_there_yet_is_waited_for_and_then_followed(served: ReportServer, tmp_path: Path) -> None:
    said: list[str] = []
    served.page.say = said.append
    served.page.say_changes()
    status, page, _ = get(served.url)
    assert (status, Page(page).notices) == (200, ["run has written nothing yet"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN_YAML)
    served.page.say_changes()
    served.page.say_changes()
    assert said == [f"waiting for {folder}: no run is there yet", f"{folder} is there"]
    with open(folder / "metrics.jsonl", "w") as file:
        file.write(line(1) + line(2)[:20])
    assert steps_of(fresh(served)) == [1], "the second line is being written"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line(2)[20:] + line(3))
    assert steps_of(fresh(served)) == [1, 2, 3]


def fresh(served: ReportServer) -> str:
    served.page._not_before = 0.0  # a page is not made anew at once
    status, page, _ = get(served.url)
    assert status == 200
    return page


def test_a_page_that_has_not_changed_is_not_sent_again(served: ReportServer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text(RUN_YAML)
    _, page, headers = get(served.url)
    tag = str(headers["ETag"])
    assert get(served.url, **{"If-None-Match": tag})[:2] == (304, "")
    (tmp_path / "run/metrics.jsonl").write_text(line(1))
    served.page._not_before = 0.0
    status, newer, headers = get(served.url, **{"If-None-Match": tag})
    assert (status, newer != page, headers["ETag"] != tag) == (200, True, True)


def test_only_this_machine_is_answered_and_only_the_page(served: ReportServer) -> None:
    assert served.server_address[0] == "127.0.0.1"
    assert get(served.url, Host="attacker.example")[0] == 403
    assert get(served.url, Host=f"localhost:{served.server_address[1]}")[0] == 200
    assert get(f"{served.url}run.yaml")[0] == 404
    assert get(f"{served.url}../etc/passwd")[0] == 404
    (policy,) = [a["content"] or "" for _, a in Page(get(served.url)[1]).elements if "http-equiv" in a]
    assert "connect-src 'self'" in policy


def test_ctrl_c_ends_the_command_well_and_a_taken_port_is_refused(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tools.report", str(tmp_path / "run"), "--watch", "--port", str(port)]
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell that starts in the background ignores it
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"serving http://127.0.0.1:{port}/ until Ctrl-C")
        assert process.stdout.readline() == f"waiting for {tmp_path / 'run'}: no run is there yet\n"
        assert get(f"http://127.0.0.1:{port}/")[0] == 200
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert second.returncode == 2
        assert second.stderr.startswith(f"error: --port: {port} cannot be used (Address already in use); give another")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
