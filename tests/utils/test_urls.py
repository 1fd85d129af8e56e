"""URLs are no folders to write into, and what is printed of them holds no secret."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from configs.flags import parse_flags
from ranks.environment import launch_command, lone_process
from ranks.job_store import _loopback_listener
from tools import export, report
from utils.errors import ConfigError
from utils.printing import print_line
from utils.urls import is_url, without_secrets

URL = "sftp://user:secret@host/runs"


@pytest.mark.parametrize(
    "flags",
    [
        ["--output_dir", URL],
        ["--output_dir", "s3:/bucket/run"],
        ["--dist_checkpoint_root_folder", URL],
        ["--dist_checkpoint_root_folder", "there", "--dist_checkpoint_folder", URL],
        ["--use_profiler", "--profiler_dir", URL],
    ],
)
def test_a_url_as_a_folder_that_is_written_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{flags[-2]}: .* is a URL, and only folders"):
        parse_flags(["--model_name", "m", "--samsum_dataset.data_path", "d", *flags])


def test_tools_write_to_no_url_and_print_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("settings: {}\n")
    assert export.main([str(tmp_path), "--to", URL]) == 2
    assert report.main([str(tmp_path), "--out", URL]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in lines] == ["--to", "--out"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'sftp://user:se@cret@host/x' and", "'sftp://user:***@host/x' and"),
        ("https://ghp_token@github.com/x", "https://***@github.com/x"),
        ("http://h/a?X-Amz-Signature=abc&x=1", "http://h/a?X-Amz-Signature=***&x=1"),
        ("postgresql+psycopg://u:p@h", "postgresql+psycopg://u:***@h"),
        *((text, text) for text in ("ssh://git@host/x", "https://host:8080/pkg@1.0", "hf://datasets/x@rev", "a@b:c")),
    ],
)
def test_secrets_of_urls_are_masked_and_nothing_else(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert without_secrets(text) == shown
    print_line(text)
    assert capsys.readouterr().out == f"{shown}\n"


def test_no_file_of_a_run_holds_a_url_with_its_password() -> None:
    config = parse_flags(["--model_name", "m", "--dataset", "f.py:g", "--custom_dataset.data_path", URL])
    assert config.custom_dataset.data_path == URL, "the dataset function needs it"
    assert config.to_dict()["custom_dataset"]["data_path"] == "sftp://user:***@host/runs"
    assert "secret" not in launch_command(lone_process(), ["--custom_dataset.data_path", URL])


def test_paths_are_no_urls() -> None:
    assert not any(map(is_url, ("/a/b", "out/a:b/c", "C:/x", "a:b", "./s3:/x", "")))


def test_a_store_of_one_machine_listens_on_the_loopback_alone() -> None:
    """torch's own listens on all interfaces, whatever address it is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    descriptor = _loopback_listener("localhost", port)
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            _loopback_listener("localhost", port)
    assert _loopback_listener("192.0.2.1", port) is None
