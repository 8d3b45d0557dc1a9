"""application(): replicas in clusters of Ray that tests start on 127.0.0.1, and stop again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import pytest
import torch
from chosen import choosing
from open_inference.grpc import protocol as messages
from open_inference.grpc.service import GRPCInferenceServiceStub
from served import FATAL, config, in_a_process, made, sample
from test_server import binary, outputs_of, request_of, swarm

import graphwright as gw
from graphwright.serving import repository
from graphwright.serving.node_files import NodeFile
from graphwright.serving.ray import application

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'graphwright[ray]'",
)
CLIENTS = 32
WAIT_S = 90.0


@contextlib.contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """A cluster of Ray, and the addresses of its proxy for HTTP and gRPC."""
    import ray
    from ray import serve

    with contextlib.ExitStack() as listeners:
        found = [listeners.enter_context(socket.socket()) for _ in range(2)]
        for listener in found:
            listener.bind(("127.0.0.1", 0))
        port, grpc_port = (listener.getsockname()[1] for listener in found)
    # Short: it holds sockets.
    folder = tempfile.mkdtemp(prefix="ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # A proxy imports for longer than five seconds where other tests run beside it.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(WAIT_S))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        try:
            ray.init(
                "local",
                num_cpus=2,
                num_gpus=0,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            serve.start(
                http_options={"host": "127.0.0.1", "port": port},
                grpc_options={
                    "port": grpc_port,
                    "grpc_servicer_functions": ["graphwright.serving.grpc.add_to_proxy"],
                },
            )
            yield f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def replicas() -> dict[str, int]:
    """How many replicas are in which state."""
    from ray import serve

    [found] = serve.status().applications.values()
    return dict(found.deployments["graphwright"].replica_states)


class Asking:
    """Clients of the model "net": who answered, which answers failed; a wrong one raises."""

    def __init__(self, address: str, model: torch.nn.Module) -> None:
        self.address, self.model = address, model
        self.answered: Counter[int] = Counter()
        self.failed: list[tuple[int, str]] = []

    def ask(self, count: int, at: Callable[[int], None] = lambda number: None) -> None:
        """So many requests from 32 clients; `at` is called before each."""

        async def one(session: aiohttp.ClientSession, number: int) -> None:
            at(number)
            asked = request_of(number, most=12)
            path, body, headers = binary("net", asked)
            async with session.post(path, data=body, headers=headers) as answer:
                content = await answer.read()
            if answer.status != 200:
                self.failed.append((answer.status, content.decode()))
                return
            found = outputs_of(content, answer.headers)
            self.answered[int(found.pop("pid"))] += 1
            with torch.no_grad():
                expected = self.model(asked["ids"], asked["mask"])
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)

        asyncio.run(asyncio.wait_for(swarm(self.address, count, CLIENTS, one), 120))


@pytest.mark.long
@needs_ray
@pytest.mark.slow
def test_answers_are_right_while_replicas_are_lost_and_replaced() -> None:
    from ray import serve

    with cluster() as (address, grpc_address):
        often = {"health_check_period_s": 0.3}
        serve.run(application({"net": in_a_process}, replicas=2, gpus=0, deployment=often))
        before = Asking(address, made())
        before.ask(200)
        assert not before.failed
        assert len(before.answered) == 2
        killed = min(before.answered)

        def kill(number: int) -> None:
            if number == 200:
                os.kill(killed, signal.SIGKILL)

        during = Asking(address, made())
        during.ask(800, kill)
        # Only what was in the replica, and says so.
        assert len(during.failed) < CLIENTS, during.failed
        assert {status for status, _ in during.failed} <= {500, 503}, during.failed
        assert sum(during.answered.values()) == 800 - len(during.failed)
        print(f"{len(during.failed)} of 800 failed: {Counter(during.failed)}")

        until(lambda: replicas() == {"RUNNING": 2})
        after = Asking(address, made())
        after.ask(200)
        assert not after.failed
        assert killed not in after.answered

        broken = lose_gpu(address)

        def replaced() -> bool:
            found = Asking(address, made())
            found.ask(50)
            assert not found.failed
            return len(found.answered) == 2 and broken not in found.answered

        until(replaced)
        refused = httpx.post(f"{address}/v2/repository/models/net/load", json={})
        assert refused.status_code == 501
        assert "Deploy the application again" in refused.json()["error"]
        assert httpx.post(f"{address}/v2/models/net/infer", content=b"{").status_code == 400
        ask_over_grpc(grpc_address)


def lose_gpu(address: str) -> int:
    """Let a replica find that its GPU has failed; its process number."""
    ids, mask = sample(1, FATAL)
    path, body, headers = binary("net", {"ids": ids, "mask": mask})
    answer = httpx.post(address + path, content=body, headers=headers)
    return int(outputs_of(answer.content, answer.headers)["pid"])


def ask_over_grpc(address: str) -> None:
    def asked(model: str) -> messages.ModelInferRequest:
        found = messages.ModelInferRequest(model_name=model)
        for name, value in request_of(3).items():
            found.inputs.add(name=name, datatype="INT64", shape=value.shape)
            found.raw_input_contents.append(value.numpy().tobytes())
        return found

    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(asked("net"), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="no model 'other'") as refused:
            stub.ModelInfer(asked("other"), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with torch.no_grad():
        expected = made()(*request_of(3).values())
    for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        found = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(*tensor.shape)
        if tensor.name != "pid":
            torch.testing.assert_close(found, expected[tensor.name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@needs_ray
@pytest.mark.slow
def test_a_file_is_served_and_fetched_once_by_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    model = made()
    with choosing("torchscript"):
        tuned = gw.tune(
            model,
            sample(4),
            strategies=["torchscript"],
            remember=False,
            progress=False,
            isolate=False,
        )
    file = tmp_path / "net.gw"
    gw.save(tuned, file)
    with pytest.raises(gw.OptionError, match="give the path of the file"):
        application({"net": tuned})
    with cluster() as (address, _):
        serve.run(application({"net": file}, gpus=0, trust=True))
        names = [each["name"] for each in httpx.get(f"{address}/v2/models/net").json()["inputs"]]
        path, body, headers = binary("net", dict(zip(names, sample(2), strict=True)))
        answer = httpx.post(address + path, content=body, headers=headers)
        with torch.no_grad():
            expected = model(*sample(2))
        for name, value in outputs_of(answer.content, answer.headers).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)

        here = NodeFile.at(file)
        assert here.on_this_node() == file
        with monkeypatch.context() as elsewhere:
            # As another node sees it, which has another file at this path, or none.
            elsewhere.setattr(NodeFile, "is_here", lambda self: False)
            elsewhere.setattr("graphwright.serving.node_files._node", lambda: "another")
            elsewhere.setenv("GRAPHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
            copy = here.on_this_node()
            assert copy.is_relative_to(tmp_path / "cache")
            assert copy.read_bytes() == file.read_bytes()
            written = copy.stat().st_mtime_ns
            assert here.on_this_node() == copy
            assert copy.stat().st_mtime_ns == written
            later = replace(here, changed_ns=here.changed_ns + 1)
            with pytest.raises(gw.ArtifactError, match="not the file that it was"):
                later.on_this_node()
        file.write_bytes(b"something else")
        with pytest.raises(gw.ArtifactError, match="not the file that it was"):
            here.on_this_node()


def test_a_replica_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphwright.serving.options import ServerOptions
    from graphwright.serving.replica import Replica

    async def test() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__({"net": config}, ServerOptions())  # type: ignore[misc]
        await replica.check_health()
        monkeypatch.setattr(repository, "devices_answer", lambda: False)
        with pytest.raises(RuntimeError, match="no longer answers"):
            await replica.check_health()
        await replica._repository.close()

    asyncio.run(test())


@pytest.mark.gpu
def test_a_gpu_that_has_failed_does_not_answer() -> None:
    code = """if True:
        import torch
        from graphwright.serving.runner import devices_answer
        values = torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        assert devices_answer()
        try:
            values[torch.tensor([9], device="cuda")].cpu()
        except RuntimeError:
            pass
        assert not devices_answer()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_ray
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": (3, 2)}, "replicas is a tuple"),
        ({"gpus": -1}, "gpus is -1"),
        ({"target_requests": 0}, "target_requests is 0"),
        ({"http_port": 8000}, "http_port is said to Ray"),
        ({"max_queue": 0}, "max_queue"),
        ({"replica": 2}, "there is no replica"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(gw.OptionError, match=said):
        application({"net": config}, **given)


@needs_ray
def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(gw.ArtifactError, match=r"no file .*net\.gw"):
        application({"net": tmp_path / "net.gw"})


@needs_ray
def test_replicas_scale_with_their_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    asked: dict[str, Any] = {}
    real = serve.deployment

    def deployment(ingress: Any, **given: Any) -> Any:
        asked.update(given)
        return real(ingress, **given)

    monkeypatch.setattr(serve, "deployment", deployment)
    application({"net": config}, replicas=(1, 4), gpus=0.5, target_requests=16, drain_s=7.0)
    assert asked["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": 16,
    }
    assert asked["ray_actor_options"]["num_gpus"] == 0.5
    assert asked["graceful_shutdown_timeout_s"] == 7.0
    assert "num_replicas" not in asked


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(gw.OptionError, match=r'pip install "graphwright\[ray\]"'):
        application({"net": config})
