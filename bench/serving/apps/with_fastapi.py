"""FastAPI over the model, one request a call, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI, Request, Response

from .common import answers, imported, options


def main() -> None:
    given = options()
    target = imported(given.target, given.device, given.threads)
    # One thread: several at once would only fight over PyTorch's.
    pool = ThreadPoolExecutor(1)
    app = FastAPI()

    async def infer(request: Request) -> Response:
        body = await request.body()
        loop = asyncio.get_running_loop()
        [answer] = await loop.run_in_executor(pool, answers, target, given.device, [body])
        return Response(answer, media_type="application/octet-stream")

    app.post("/infer")(infer)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
