"""Two deployments behind one smg router, which sends a prompt where it learns from KV events that its prefix is."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cluster.client import Client
from tests import tiny_tokenizer
from tests.serve_process import serve_process
from tests.served import TINY
from tests.smg_process import Router, smg_router
from tests.tiny_model import save_tiny_model
from tests.whole_stack import whole_stack

DOG, FOX = "the lazy dog jumps over the quick fox. " * 4, "hello world, the quick brown fox and more. " * 4
# Nothing but the index decides: no slice of the requests for workers with thin caches, and a busy machine is no stall.
FLAGS = (
    *("--policy", "cache_aware", "--worker-stall-secs", "60"),
    *("--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0"),
)
ASKED_AGAIN = 4
LEARNT_S = 60.0


def cache(address: str, prefix: str) -> None:
    """A request of somebody else's, past the router."""
    with Client(address) as client:
        client.generate(TINY.encode(prefix).tolist(), max_tokens=2, ignore_eos=True).result()


def forget(address: str) -> None:
    with Client(address) as client:
        client.reset_prefix_cache()


def stats(address: str) -> dict[str, int]:
    """Of its front end."""
    with Client(address) as client:
        return dict(client.stats()["front_end"])


def is_followed(address: str) -> bool:
    return stats(address)["num_cache_subscribers"] > 0


@contextmanager
def heard(router: Router) -> Iterator[None]:
    """Returns once the router has heard of what happens to one deployment's cache in the block."""
    before = num_heard(router)
    yield
    wait_until(lambda: num_heard(router) > before, "smg heard of no change")


def num_heard(router: Router) -> float:
    return router.metric("smg_kv_event_batches_total", disposition="applied")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + LEARNT_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.05)


def served_by(router: Router, addresses: Sequence[str], model: str, prefix: str) -> list[int]:
    """How many of some requests with this prefix each deployment got."""
    before = [stats(address)["num_requests"] for address in addresses]
    for index in range(ASKED_AGAIN):
        router.client.completions.create(model=model, prompt=f"{prefix}{index}", max_tokens=2, temperature=0)
    return [stats(address)["num_requests"] - count for address, count in zip(addresses, before, strict=True)]


def check_routing(router: Router, addresses: Sequence[str], model: str) -> None:
    """Prefixes that are cached behind the router's back, then the other way round."""
    one, other = addresses
    for address in addresses:
        wait_until(partial(is_followed, address), "smg does not subscribe")
    for address, prefix in ((one, DOG), (other, FOX)):
        with heard(router):
            cache(address, prefix)
    assert served_by(router, addresses, model, DOG) == [ASKED_AGAIN, 0]
    assert served_by(router, addresses, model, FOX) == [0, ASKED_AGAIN]
    # What the router itself remembers says the opposite from now on: only the events tell.
    for address in addresses:
        with heard(router):
            forget(address)
    for address, prefix in ((one, FOX), (other, DOG)):
        with heard(router):
            cache(address, prefix)
    assert served_by(router, addresses, model, DOG) == [0, ASKED_AGAIN]
    assert served_by(router, addresses, model, FOX) == [ASKED_AGAIN, 0]


async def test_a_prefix_goes_where_it_is_cached_and_elsewhere_when_it_moves(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")

    def route(addresses: Sequence[str]) -> None:
        with smg_router(addresses, tmp_path / "model", tmp_path, *FLAGS, model="tiny") as router:
            check_routing(router, addresses, "tiny")

    async with whole_stack() as one, whole_stack() as other:
        await asyncio.to_thread(route, [one.server.address, other.server.address])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_served_clusters_share_their_caches_through_one_router(tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "1", "--metrics-port", "0", "--served-model-name", "tiny")
    with serve_process(tmp_path / "a", *flags) as one, serve_process(tmp_path / "b", *flags) as other:
        addresses = [one.address, other.address]
        with smg_router(addresses, tmp_path / "a" / "model", tmp_path, *FLAGS, model="tiny") as router:
            check_routing(router, addresses, "tiny")
