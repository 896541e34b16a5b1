"""`paceline fetch` as an init container or a Job runs it, with a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.hub import Hub
from tests.support.models import make_tiny_llama

NAME = "someone/tiny"


def fetch(home: Path, model: str, endpoint: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    """Run the command; by default with a hub that nobody listens at."""
    env = os.environ | {"PACELINE_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "huggingface")}
    env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", "from services.cli.main import main; main()", "fetch", model]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_fetched_once_and_without_what_a_worker_does_not_read(tmp_path: Path) -> None:
    repository = make_tiny_llama(tmp_path / "repository")
    for other in ("pytorch_model.bin", "original/consolidated.safetensors"):
        (repository / other).parent.mkdir(exist_ok=True)
        (repository / other).write_bytes(b"the weights once more")
    home = tmp_path / "home"
    with Hub(NAME, repository) as hub:
        first = fetch(home, NAME, hub.endpoint)
        assert first.returncode == 0, first.stderr
        folder = Path(first.stdout.strip())
        assert folder == home / "models" / "tiny"
        files = {path.name for path in folder.iterdir() if path.is_file()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
        assert set(hub.fetched) == files
        assert all((folder / file).read_bytes() == (repository / file).read_bytes() for file in files)
        hub.fetched.clear()
        again = fetch(home, f"{NAME}@main", hub.endpoint)
        assert (again.returncode, hub.fetched) == (0, [])


def test_what_cannot_be_fetched_is_said_in_a_line(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "notes.txt").write_text("no model")
    with Hub(NAME, repository) as hub:
        refusals = {
            "tiny": fetch(tmp_path / "home", "tiny"),
            "unreachable": fetch(tmp_path / "home", NAME),
            "unknown": fetch(tmp_path / "home", "someone/else", hub.endpoint),
            "no model": fetch(tmp_path / "home", NAME, hub.endpoint),
        }
    assert {done.returncode for done in refusals.values()} == {1}
    last = {what: done.stderr.strip().splitlines()[-1] for what, done in refusals.items()}
    assert last["tiny"].startswith("Error: MODEL is 'tiny': must be `default`, ORG/NAME")
    assert last["unreachable"].startswith(f"Error: {NAME} could not be fetched into ")
    assert last["unknown"].startswith("Error: someone/else could not be fetched into ")
    assert last["no model"] == f"Error: {NAME} has no config.json: a model for transformers has"


def test_a_folder_holds_one_model(tmp_path: Path) -> None:
    repository = make_tiny_llama(tmp_path / "repository")
    home = tmp_path / "home"
    with Hub(NAME, repository) as hub:
        assert fetch(home, NAME, hub.endpoint).returncode == 0
        refusals = [
            fetch(home, model, hub.endpoint)
            for model in (f"{NAME}@{'1' * 40}", "another/tiny", "someone/SmolLM2-135M-Instruct")
        ]
    assert {done.returncode for done in refusals} == {1}
    assert [f"it holds {NAME}@main" in done.stderr for done in refusals] == [True, True, False]
    assert "fetch `default`" in refusals[2].stderr
    assert not (home / "models" / "SmolLM2-135M-Instruct").exists()


def test_a_part_of_a_model_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    repository = make_tiny_llama(tmp_path / "repository")
    whole, index = repository / "model.safetensors", repository / "model.safetensors.index.json"
    weights = whole.read_bytes()
    whole.unlink()
    with Hub(NAME, repository) as hub:
        done = fetch(tmp_path / "none", NAME, hub.endpoint)
    assert done.returncode == 1
    assert "there is no *.safetensors" in done.stderr
    (repository / "model-00001-of-00002.safetensors").write_bytes(weights)
    index.write_text(json.dumps({"weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}))
    with Hub(NAME, repository) as hub:
        done = fetch(tmp_path / "one", NAME, hub.endpoint)
    assert done.returncode == 1
    assert "there is no model-00002-of-00002.safetensors" in done.stderr


def test_what_is_lost_of_a_model_is_missed_without_the_hub(tmp_path: Path) -> None:
    with Hub(NAME, make_tiny_llama(tmp_path / "repository")) as hub:
        folder = Path(fetch(tmp_path / "home", NAME, hub.endpoint).stdout.strip())
    (folder / "model.safetensors").unlink()
    done = fetch(tmp_path / "home", NAME)
    assert done.returncode == 1
    assert f"Error: {NAME} could not be fetched into {folder}" in done.stderr


def test_a_default_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    done = fetch(tmp_path, "default")
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))
