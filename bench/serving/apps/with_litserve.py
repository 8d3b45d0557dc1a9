"""LitServe with its batching."""

from __future__ import annotations

from typing import Annotated, Any

import litserve
from fastapi import Depends, Request, Response

from .common import Options, answers, imported, options


async def _body(request: Request) -> bytes:
    return await request.body()


class Api(litserve.LitAPI):
    """Raw bodies to raw answers."""

    def __init__(self, given: Options) -> None:
        super().__init__(max_batch_size=given.batch, batch_timeout=given.wait_s, api_path="/infer")
        self.given = given

    def setup(self, device: str) -> None:
        self.target = imported(self.given.target, self.given.device, self.given.threads)

    def decode_request(self, request: Any) -> bytes:
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return list(inputs)

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        return answers(self.target, self.given.device, bodies)

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes):  # LitServe takes an annotation for a schema
        return Response(output, media_type="application/octet-stream")


# FastAPI asks for this to be a type, which a string in an annotation is not.
Api.decode_request.__annotations__["request"] = Annotated[bytes, Depends(_body)]


def main() -> None:
    given = options()
    server = litserve.LitServer(
        Api(given), accelerator=given.device, devices=1, workers_per_device=1
    )
    server.run(
        host="127.0.0.1",
        port=given.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
