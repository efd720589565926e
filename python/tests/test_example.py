"""examples/train.py, as `./dev python` runs it: the losses with ebb and without are equal, or the program ends with 1."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train.py"


def run(*arguments: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--layers", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "the losses are equal" in done.stdout
    return done.stdout


def test_activations_are_offloaded() -> None:
    printed = run()
    assert "were managed" not in printed
    assert not re.search(r"\b0 B were offloaded", printed)


def test_activations_are_planned() -> None:
    printed = run("--device-budget", "20MB", "--steps", "6")
    assert re.search(r"MiB +offload +", printed), printed


@pytest.mark.parametrize("update_in", ["step", "backward", "next_use"])
def test_weights_gradients_and_states_are_managed(update_in: str) -> None:
    printed = run("--manage", "2MB", "--update-in", update_in)
    tensors, managed, on_device = re.search(
        r"(\d+) tensors of ([\d.]+) MB were managed, of which at most ([\d.]+) MB", printed
    ).groups()
    assert int(tensors) > 0
    assert float(on_device) < 2.3 < float(managed)  # 2 MB, and a gradient of 0.26 MB that has just been made
