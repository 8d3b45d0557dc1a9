"""Calls of a target without any server: `python -m bench.serving.bare REQUESTS JSON …`.

One after the other, and again with pauses, as under a low load: after a pause, caches are cold and
cores asleep, and a call takes up to one and a half times as long.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from ..common.record import write
from .apps.common import answers, imported
from .traffic import load

# Calls before all others, and with pauses.
WARMUPS, PAUSED = 5, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=Path)
    parser.add_argument("where", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pause-s", type=float, required=True, help="of a low load")
    parser.add_argument("--answers", type=Path, help="keep the answers in this file")
    given = parser.parse_args()
    target = imported(given.target, given.device, given.threads)
    bodies = [ids.tobytes() for ids in load(given.requests)]
    for body in bodies[:WARMUPS]:
        answers(target, given.device, [body])
    seconds, found = [], []
    for body in bodies:
        began = time.perf_counter()
        found += answers(target, given.device, [body])
        seconds.append(time.perf_counter() - began)
    if given.answers is not None:
        np.save(given.answers, np.stack([np.frombuffer(one, np.float32) for one in found]))
    paused = []
    for body in bodies[:PAUSED]:
        time.sleep(given.pause_s)
        began = time.perf_counter()
        answers(target, given.device, [body])
        paused.append(time.perf_counter() - began)
    figures = {"p50_s": float(np.median(seconds)), "samples": seconds}
    low = {"p50_s": float(np.median(paused)), "samples": paused}
    write(given.where, figures | {"low": low})


if __name__ == "__main__":
    main()
