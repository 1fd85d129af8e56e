"""tools.export --push_to_hub uploads a folder to a hub on this machine, privately; nothing shows the token."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from tests.helpers.checkpoints import with_lora
from tests.helpers.hub_server import TOKEN, Hub, Repo
from tests.helpers.processes import ROOT, process_variables
from tools.export import main

Capture = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, as the variables HF_ENDPOINT, HF_HUB_DISABLE_XET and HF_TOKEN would name it to a new process."""
    with Hub() as hub:
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = template.replace(huggingface_hub.constants.ENDPOINT, hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path / "folder")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# mine\n")
    (folder / ".secret").write_text("password")
    return folder


def uploaded(folder: Path, *flags: str) -> int:
    return main([str(folder), "--push_to_hub", "me/it", *flags])


def test_a_folder_arrives_whole_and_private(hub: Hub, folder: Path, capsys: Capture) -> None:
    assert uploaded(folder) == 0
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".secret"}
    assert hub.repos == {"me/it": Repo(private=True, files=files)}
    first, *others = shown.out.splitlines()
    assert first.startswith(f"to {hub.url}/me/it (private, new): {len(files)} files, ")
    assert others[-1] == f"uploaded: {hub.url}/me/it"
    assert any(line.startswith(f"  {WEIGHTS} ") for line in others), "each file with its size"
    assert any(line.startswith("  not uploaded: .secret") for line in others)
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_name_without_an_owner_is_the_users_own(hub: Hub, folder: Path) -> None:
    assert main([str(folder), "--push_to_hub", "it", "--public"]) == 0
    assert list(hub.repos) == ["me/it"]
    assert not hub.repos["me/it"].private


def test_an_upload_that_broke_off_goes_on_where_it_stopped(hub: Hub, folder: Path, capsys: Capture) -> None:
    hub.refuse_after = 1
    assert uploaded(folder) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"what has arrived is not sent again by: python -m tools.export {folder} --push_to_hub me/it" in line
    assert TOKEN not in line
    assert hub.repos["me/it"].files == {}, "half a model is nobody's"
    hub.refuse_after = None
    assert uploaded(folder) == 0
    assert len(hub.sent) == len(set(hub.sent)) == 2, "weights and tokenizer, each once"
    assert hub.repos["me/it"].files[WEIGHTS] == (folder / WEIGHTS).read_bytes()


def test_a_public_repository_takes_nothing_unless_asked(hub: Hub, folder: Path, capsys: Capture) -> None:
    hub.repos["me/it"] = Repo(private=False, files={"pytorch_model.bin": b"old"})
    assert uploaded(folder) == 2
    assert "me/it is there and public; give --public" in capsys.readouterr().err
    assert uploaded(folder, "--public") == 0
    assert "there and not in this folder: pytorch_model.bin" in capsys.readouterr().out
    assert hub.repos["me/it"].files["pytorch_model.bin"] == b"old", "nothing is deleted there"


def test_what_somebody_wrote_into_the_card_there_stays(hub: Hub, folder: Path) -> None:
    assert uploaded(folder) == 0
    hub.repos["me/it"].files["README.md"] = b"# written on the hub\n"
    assert uploaded(folder) == 0
    assert hub.repos["me/it"].files["README.md"] == b"# written on the hub\n"


def test_a_card_that_cannot_be_read_there_is_not_written_over(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    hub.repos["me/it"] = Repo(private=True, files={"README.md": b"# written on the hub\n"})
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/gone/{{repo_id}}")
    assert uploaded(folder) == 1
    assert "--push_to_hub: " in capsys.readouterr().err
    assert hub.repos["me/it"].files == {"README.md": b"# written on the hub\n"}


def test_refusals_come_before_an_export_in_one_line(
    hub: Hub, folder: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    adapter = tmp_path / "adapter"
    with_lora(tiny_model).save_pretrained(str(adapter))
    capsys.readouterr()
    for path, flags, reason in (
        (folder, ["--push_to_hub", "a/b/c"], "'a/b/c' is no name on the hub"),
        (adapter, ["--push_to_hub", "it"], f"names its base model by a path of this machine ({tiny_model})"),
        (adapter, ["--to", str(tmp_path / "new"), "--push_to_hub", "it"], "names its base model by a path"),
        (folder, ["--public"], "--public: it belongs to --push_to_hub"),
        (folder, ["--push_to_hub", "it", "--merge"], "--merge: it is for a new folder; give --to DIR"),
        (tmp_path, ["--push_to_hub", "it"], "is no folder in Hugging Face format; give --to DIR"),
        (folder, [], "there is nothing to do; give --to DIR"),
    ):
        assert main([str(path), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
    for token, reason in (
        ("hf_other", "does not take the token"),
        ("", "there is no token for the hub; `hf auth login`"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        assert main([str(folder), "--to", str(tmp_path / "new"), "--push_to_hub", "it"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
        assert not token or token not in line
    assert not (tmp_path / "new").exists()
    assert hub.repos == {}


def test_the_documented_commands_run_as_written(
    hub: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "outputs/run/model")
    (tmp_path / "outputs/run/run.yaml").touch()
    with_lora(tiny_model).save_pretrained(str(tmp_path / "outputs/lora/adapter"))
    (tmp_path / "outputs/lora/run.yaml").touch()
    page = (ROOT / "docs/export.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("python -m tools.export") and "--push" in line]
    assert len(lines) == 2
    for line in lines:
        assert main(shlex.split(line, comments=True)[3:]) == 0, line
    assert {name: repo.private for name, repo in hub.repos.items()} == {"me/my-model": True, "my-org/my-model": False}


@pytest.mark.slow
def test_the_variables_name_the_hub_and_the_token(folder: Path) -> None:
    with Hub() as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        argv = [sys.executable, "-m", "tools.export", str(folder), "--push_to_hub", "it"]
        done = subprocess.run(
            argv, cwd=ROOT, env=process_variables(variables), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert json.loads(hub.repos["me/it"].files["config.json"])["model_type"] == "llama"
