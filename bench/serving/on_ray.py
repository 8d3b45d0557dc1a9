"""graphwright on Ray Serve: so many replicas of the heavy model."""

from __future__ import annotations

import argparse
import functools
import logging
import signal

import ray
from ray import serve

from graphwright.serving.ray import application

from .heavy import served
from .traffic import MODEL


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--device", required=True)
    given = parser.parse_args()
    ray.init(
        "local",
        num_cpus=given.replicas,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    model = functools.partial(served, given.width, given.repeats, given.rows, given.device)
    gpus = int(given.device == "cuda")
    serve.run(application({MODEL: model}, replicas=given.replicas, gpus=gpus))
    # SIGTERM ends it through Ray, which has processes in sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: ray.shutdown())
    signal.pause()


if __name__ == "__main__":
    main()
