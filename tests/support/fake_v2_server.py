"""A server of the Open Inference Protocol that answers at once, or badly: PORT MODE."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graphwright.serving.metrics import Metrics

HEADER = "Inference-Header-Content-Length"
SLOW_S = 0.04
# What it says of its stages.
QUEUE_S, REQUEST_S = 0.25, 0.5


def answer(ids: np.ndarray) -> np.ndarray:
    """What tells one request from another."""
    return np.array([ids.sum() % 1009, len(ids), ids[1] % 997], np.float32)


async def infer(request: Request) -> Response:
    mode, state = sys.argv[2], request.app.state
    body = await request.body()
    size = int(request.headers[HEADER])
    described = json.loads(body[:size])["inputs"]
    length = described[0]["shape"][1]
    ids, mask = np.frombuffer(body[size:], np.int64).reshape(2, length)
    assert [one["name"] for one in described] == ["input_ids", "attention_mask"]
    assert mask.all()
    state.count += 1
    state.of_model.stage("queue", QUEUE_S)
    state.of_model.answered(REQUEST_S)
    if mode == "slow":
        time.sleep(SLOW_S)  # one request at a time
    elif mode == "stuck" and state.count > 3:
        await asyncio.sleep(60)
    elif mode == "full" and state.count % 2:
        return Response(status_code=503)
    output = answer(ids)
    if mode == "swaps" and state.count % 4 == 0:
        output = state.earlier
    elif mode == "lies" and state.count % 4 == 0:
        output = output + 1
    state.earlier = answer(ids)
    header = json.dumps({"outputs": [{"name": "output", "shape": [1, 3]}]}).encode()
    return Response(header + output.tobytes(), headers={HEADER: str(len(header))})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text()[0])


if __name__ == "__main__":
    if sys.argv[2] == "ends":
        sys.exit("no model today")
    app = Starlette(
        routes=[
            Route("/v2/models/minilm/infer", infer, methods=["POST"]),
            Route("/metrics", metrics),
        ]
    )
    app.state.count, app.state.earlier = 0, None
    app.state.metrics = Metrics(dict)
    app.state.of_model = app.state.metrics.of_model("minilm", "1")
    server = uvicorn.Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="warning"))
    if sys.argv[2] == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        asyncio.run(server._serve())
    server.run()
