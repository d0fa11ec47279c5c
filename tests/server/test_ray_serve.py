"""The same application on Ray Serve: two replicas, one of which is killed while clients ask."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import pytest

from arcaligner.server.app import ServerSettings, serve_on_ray

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
PORT = 8765


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


def replica_pids() -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if b"ServeReplica:arcaligner" in read_command(pid)]


def read_command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_replica_that_dies_takes_no_more_than_its_own_requests(checkpoint_dir, cluster):
    def make_engine():
        from arcaligner.cli.shared import load_pipeline
        from arcaligner.server.engine import Engine

        return Engine(load_pipeline(str(checkpoint_dir)))

    serve_on_ray(make_engine, ServerSettings(model="tiny", port=PORT, api_key="k"), replicas=2)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "documents": ["Ada."], "max_tokens": 8}
    headers = {"Authorization": "Bearer k"}

    def ask(number: int) -> int:
        if number == 12:
            os.kill(replica_pids()[0], signal.SIGKILL)
        url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120).status_code

    assert len(replica_pids()) == 2
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(ask, range(40)))
    assert statuses.count(200) >= 40 - 4, statuses  # those that the replica had: each thread asks one at a time
    assert statuses[-8:] == [200] * 8
    assert httpx.post(f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body).status_code == 401
