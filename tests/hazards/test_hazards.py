"""Each hazard's check passes on both recorders, and fails with its protection switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hazards_of_breaks  # noqa: F401  # adds its checks to the list
import hazards_of_callables  # noqa: F401  # likewise
import hazards_of_host_arguments  # noqa: F401  # likewise
import hazards_of_objects  # noqa: F401  # likewise
import hazards_of_padding  # noqa: F401  # likewise
import hazards_of_steps  # noqa: F401  # likewise
import pytest
import torch
from hazards import HAZARDS, Hazard

NAMED = [pytest.param(hazard, id=hazard.name) for hazard in HAZARDS]


def applies(hazard: Hazard, device: torch.device) -> bool:
    return hazard.only in (None, device.type)


@pytest.mark.parametrize("hazard", NAMED)
def test_hazard(hazard: Hazard, device: torch.device) -> None:
    if applies(hazard, device):
        hazard.check(device)


@pytest.mark.parametrize("hazard", NAMED)
def test_hazard_shows_without_its_protection(
    hazard: Hazard, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not applies(hazard, device):
        return
    if hazard.isolated and device.type == "cuda":
        command = [sys.executable, str(Path(__file__).parent / "hazards.py"), hazard.name, "cuda"]
        given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=given, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode != 0, "the check passes without its protection"
        return
    hazard.off(monkeypatch)
    try:
        hazard.check(device)
    except Exception as error:  # a wrong number, a wrong state, or a crash over it
        print(f"{hazard.name}: {error!r}"[:300])
    else:
        pytest.fail("the check passes without its protection")


def test_every_hazard_is_here() -> None:
    assert {hazard.number for hazard in HAZARDS} == set(range(1, 23))
