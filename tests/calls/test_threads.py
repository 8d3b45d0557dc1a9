"""Which threads may run code of the user's: those of libraries that compile or draw bars do not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch._inductor.async_compile import AsyncCompile
from tqdm import tqdm
from tqdm._monitor import TMonitor

from graphwright.calls.threads import others_run, own_thread


def test_threads_that_run_no_code_of_the_user_s_do_not_count() -> None:
    assert not others_run()
    end = threading.Event()
    monitor = TMonitor(tqdm, 10.0)
    reads = threading.Thread(target=end.wait, name="InductorSubproc", daemon=True)
    reads.start()
    try:
        own = own_thread(end.wait, "test")
        AsyncCompile.pool().submit(int).result()  # It compiles kernels for torch.compile.
        assert not others_run()
    finally:
        end.set()
        monitor.exit()
        own.join()
        reads.join()


def test_a_thread_of_the_user_s_counts() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert others_run()
    assert not others_run()
