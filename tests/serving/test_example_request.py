"""The line that a server prints for a shell: it is answered, whatever the model takes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import config
from torch import nn

from graphwright.serving.example_request import curl
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.options import ServerOptions
from graphwright.serving.protocol import Strings, TensorMetadata, Value
from graphwright.serving.server import Server


class Counted(nn.Module):
    def forward(self, on: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return on * number


def lengths(inputs: Mapping[str, Value]) -> Mapping[str, torch.Tensor]:
    text = inputs["text"]
    assert isinstance(text, Strings)
    return {"input": torch.tensor([[float(len(each))] for each in text.values])}


def texts() -> ModelConfig:
    model = ModelConfig(nn.Linear(1, 2).eval(), (torch.ones(2, 1),))
    return replace(model, preprocess=lengths, inputs=(TensorMetadata("text", "BYTES", (-1,)),))


MODELS: dict[str, Any] = {
    "small": ModelConfig(nn.Linear(4, 2).eval(), (torch.randn(2, 4),)),
    "it's a name": ModelConfig(nn.Linear(4, 2).eval(), (torch.randn(2, 4),)),
    "image": ModelConfig(nn.Conv2d(3, 2, 3).eval(), (torch.randn(1, 3, 64, 64),)),
    "flags": ModelConfig(Counted(), (torch.ones(2, dtype=torch.bool), torch.arange(2))),
    "encoder": config(),
    "text": texts(),
    "half": ModelConfig(nn.Linear(4, 2).eval().bfloat16(), (torch.randn(2, 4).bfloat16(),)),
}


def answered(line: str, token: str = "") -> dict[str, Any]:
    done = subprocess.run(
        ["sh", "-c", line],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TOKEN": token, "no_proxy": "*"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("token", [None, "sesame"])
def test_the_line_is_answered(token: str | None) -> None:
    async def test() -> None:
        server = Server(MODELS, ServerOptions(http_port=0, grpc_port=None, token=token))
        await server.start()
        try:
            [address] = server.addresses()
            for name, model in server.repository.prepared().items():
                own = model.inputs, model.outputs, model.sample
                line = curl(address, name, *own, token=token is not None)
                assert len(line) < 1000
                answer = await asyncio.to_thread(answered, line, token or "")
                assert ("inputs" if name == "half" else "outputs") in answer, (line, answer)
            said = server.describe().splitlines()[-1]
            assert said.startswith("Try it:  curl -s ")
            small = await asyncio.to_thread(answered, said.removeprefix("Try it:  "), token or "")
            assert small["outputs"][0]["shape"] == [2, 2]
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_certificate_of_the_server_s_own_is_let_pass() -> None:
    inputs = (TensorMetadata("x", "FP32", (-1,)),)
    line = curl("https://127.0.0.1:1", "net", inputs, (), {}, token=False)
    assert line.startswith("curl -s -k https://127.0.0.1:1/v2/models/net/infer -d ")
