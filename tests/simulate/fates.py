"""What an operator, a client or bad luck may do to a running world. Each returns whether it could."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler.events import CacheReset, PreemptRequested, SwapRequested
from tests.simulate.weather import MS

if TYPE_CHECKING:
    from tests.simulate.world import World


def burst(world: "World") -> bool:
    """Some submissions at once."""
    fronts = world.fronts
    room = world.weather.max_open - len(fronts.open)
    if room <= 0:
        return False
    for _ in range(min(room, world.weather.max_burst // world.rng.choice((8, 8, 4, 2, 1)))):
        fronts.begin(fronts.authors.write(world.clock.now_ns), fronts.any())
    return True


def cancel(world: "World") -> bool:
    """A client leaves, at whatever point of its request's life."""
    if not world.fronts.open:
        return False
    world.fronts.cancel(world.rng.choice(world.fronts.open))
    return True


def reset(world: "World") -> bool:
    """The prefix cache alone."""
    world.handle(CacheReset(reset_running=False))
    return True


def reset_running(world: "World") -> bool:
    """With running requests, often more than once in a row."""
    for _ in range(world.rng.choice((1, 1, 2, 2, 3))):
        world.handle(CacheReset(reset_running=True))
    return True


def preempt(world: "World") -> bool:
    """An operator's choice."""
    if not world.fronts.open:
        return False
    for _ in range(world.rng.choice((1, 1, 2))):
        world.handle(PreemptRequested(request_id=world.rng.choice(world.fronts.open).prompt.request_id))
    return True


def swap(world: "World") -> bool:
    """Other weights."""
    world.version += 1
    world.handle(SwapRequested(weights=str(world.version)))
    return True


def drain(world: "World") -> bool:
    """One worker."""
    host = world.hosts.any()
    if host.draining or host.down:
        return False
    world.hosts.drain(host)
    return True


def crash(world: "World") -> bool:
    """One worker."""
    host = world.hosts.any()
    if host.down:
        return False
    world.hosts.crash(host)
    return True


def partition(world: "World") -> bool:
    """Between the scheduler and one worker."""
    host = world.hosts.any()
    if host.down or host.partitioned:
        return False
    world.hosts.cut_off(host)
    return True


def slow(world: "World") -> bool:
    """One worker, until told otherwise."""
    host = world.hosts.any()
    host.slowness = world.rng.choice((1, 4, 12))
    return host.slowness > 1


def reconnect(world: "World") -> bool:
    """A worker registers anew although nothing was wrong."""
    world.hosts.reconnect(world.hosts.any())
    return True


def resubmit(world: "World") -> bool:
    """A higher attempt of a live id."""
    if not world.fronts.open:
        return False
    world.fronts.resubmit(world.rng.choice(world.fronts.open), "a higher attempt")
    return True


def restart_scheduler(world: "World") -> bool:
    """It forgets everything; the front ends feed it again."""
    world.begin_life()
    world.fronts.resubmit_all("scheduler restarted", within_ns=12 * MS)
    return True


def lose_front_end(world: "World") -> bool:
    """One of them."""
    world.fronts.lose_one()
    return True


FATES: dict[str, Callable[["World"], bool]] = {
    fate.__name__: fate
    for fate in (
        burst,
        cancel,
        reset,
        reset_running,
        preempt,
        swap,
        drain,
        crash,
        partition,
        slow,
        reconnect,
        resubmit,
        restart_scheduler,
        lose_front_end,
    )
}
