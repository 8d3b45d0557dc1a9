"""How the interpreter of a server runs."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from served import config, made

from graphwright.serving import interpreter
from graphwright.serving.launch import serve
from graphwright.serving.model_config import ModelConfig
from graphwright.serving.options import ServerOptions
from graphwright.serving.replica import Replica
from graphwright.serving.repository import Repository


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_threads_take_short_turns_while_a_server_runs() -> None:
    before = sys.getswitchinterval()
    with serve({"net": config()}, block=False, http_port=0, grpc_port=0):
        assert sys.getswitchinterval() < before / 10
    assert sys.getswitchinterval() == before


def test_the_last_of_several_servers_restores_the_turns() -> None:
    before = sys.getswitchinterval()
    first, second = interpreter.short_turns(), interpreter.short_turns()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < before / 10
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_threads_take_short_turns_in_a_replica() -> None:
    async def test() -> None:
        before = sys.getswitchinterval()
        replica = Replica.__new__(Replica)
        await replica.__init__({"net": config}, ServerOptions())  # type: ignore[misc]
        assert sys.getswitchinterval() < before / 10
        await replica._repository.close()
        replica._settings.close()
        assert sys.getswitchinterval() == before

    asyncio.run(test())


def test_a_server_that_does_not_start_leaves_the_turns_as_they_were() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(Exception, match="not a ModelConfig"):
        serve(lambda: 3, block=False, http_port=0, grpc_port=0)
    assert sys.getswitchinterval() == before


def test_turns_that_are_shorter_already_stay() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with interpreter.short_turns():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("dropped", ["loaded again", "unloaded"])
def test_a_model_that_was_dropped_is_collected_all_the_same(dropped: str) -> None:
    living: list[weakref.ref[object]] = []

    def source() -> ModelConfig:
        model = made()
        model.__dict__["itself"] = model  # Only a collection finds that nobody refers to it.
        living.append(weakref.ref(model))
        return replace(config(), model=model)

    async def test() -> None:
        repository = Repository({"net": source}, max_queue=9, drain_s=None, owns_process=True)
        await repository.load_all()
        assert gc.get_freeze_count()
        await (
            repository.load("net", {}) if dropped == "loaded again" else repository.unload("net")
        )
        assert living[0]() is None
        await repository.close()

    asyncio.run(test())


def test_a_process_that_is_not_the_server_s_is_collected_as_it_was() -> None:
    async def test() -> None:
        repository = Repository({"net": config}, max_queue=9, drain_s=None)
        gc.unfreeze()
        await repository.load_all()
        assert not gc.get_freeze_count()
        await repository.close()

    asyncio.run(test())


SERVER = """
import gc, os, signal, sys, threading, time
from graphwright.serving.launch import serve
from served import config

def look():
    while not gc.get_freeze_count():
        time.sleep(0.01)
    print(gc.get_freeze_count() > 50_000, sys.getswitchinterval() < 1e-3, file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=look, daemon=True).start()
serve({"net": config()}, http_port=0, grpc_port=0)
"""


@pytest.mark.slow
def test_a_server_of_its_own_has_all_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "True True" in done.stderr, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_without_uvloop_asyncio_s_own_loop_is_taken(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    found: list[str] = []

    async def main() -> None:
        found.append(type(asyncio.get_running_loop()).__module__)

    interpreter.run(main())
    assert found[0].partition(".")[0] == loop
