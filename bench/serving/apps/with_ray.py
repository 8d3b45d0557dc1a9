"""Ray Serve with @serve.batch."""

from __future__ import annotations

import logging
import signal

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from .common import Options, answers, imported, options


def deployment(given: Options) -> serve.Application:
    """One replica that joins requests to batches."""

    class Server:
        def __init__(self) -> None:
            self.target = imported(given.target, given.device, given.threads)

        @serve.batch(max_batch_size=given.batch, batch_wait_timeout_s=given.wait_s)
        async def batch(self, bodies: list[bytes]) -> list[bytes]:
            return answers(self.target, given.device, bodies)

        async def __call__(self, request: Request) -> Response:
            answer = await self.batch(await request.body())
            return Response(answer, media_type="application/octet-stream")

    Server.__call__.__annotations__.clear()  # names of this file, which the replica looks up
    wanted = {"num_cpus": 1, "num_gpus": int(given.device == "cuda")}
    made = serve.deployment(
        Server, ray_actor_options=wanted, max_ongoing_requests=10_000, num_replicas=1
    )
    return made.bind()


def main() -> None:
    given = options()
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(deployment(given), route_prefix="/infer")
    # SIGTERM ends it through Ray, which has processes in sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: ray.shutdown())
    signal.pause()


if __name__ == "__main__":
    main()
