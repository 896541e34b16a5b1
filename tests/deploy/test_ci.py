"""`.ci/run` runs its verbs whatever happens, and fails when one does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.dockerfile import ROOT

VERBS = ("prometheus", "lint", "test-all")


@pytest.mark.parametrize("failing", [(), ("prometheus",), ("lint",), ("test-all",), ("lint", "test-all")])
def test_all_verbs_run_and_either_failure_fails(tmp_path: Path, failing: tuple[str, ...]) -> None:
    make = tmp_path / "make"
    cases = "".join(f"[ $1 != {verb} ] || exit 2\n" for verb in failing)
    make.write_text(f'#!/bin/sh\necho "made $1"\n{cases}')
    make.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("made")] == [f"made {verb}" for verb in VERBS]
    assert done.returncode == (1 if failing else 0)
    assert all(f"make {verb} FAILED" in done.stdout for verb in failing)
