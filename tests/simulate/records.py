"""What the ledger keeps: one record per attempt and one per session. Knows no rules."""

from scheduler.events import WorkerUp
from scheduler.request import Request
from scheduler.step import StepPlan, StepResult
from tests.simulate.toy import chain, stops


class Attempt:
    """One attempt of a request: what was submitted, what came out of the scheduler so far."""

    __slots__ = (
        "arrival", "closed", "ends", "epoch", "fingerprints", "last_epoch", "last_hash", "last_run", "num_accepted",
        "num_drafts", "num_first_hit", "num_holders", "num_lost", "overtaken", "request", "row_failed", "token_ids",
        "versions",
    )  # fmt: skip

    def __init__(self, request: Request, versions: list[int]) -> None:
        self.request = request
        self.token_ids: list[int] = request.resume_token_ids.tolist()  # all outputs, resumed ones first
        self.versions = versions.copy()  # weights that each output was sampled under
        self.last_run = 0  # tokens that came out last
        self.last_hash = chain(request.prompt_token_ids.tolist() + self.token_ids)[-1]
        self.ends = stops(request.sampling)
        self.closed: str | None = None  # how it ended, seen from the scheduler; None while it lives
        self.epoch: int | None = None  # where it runs
        self.last_epoch: int | None = None  # its latest, running or left
        self.arrival = 0
        self.num_lost = 0  # epochs whose worker was lost
        self.num_first_hit: int | None = None
        self.num_drafts = 0  # verified in frames that count
        self.num_accepted = 0
        self.overtaken = 0  # since it began to wait
        self.num_holders = 0  # workers that could run it meanwhile, at most
        self.row_failed = False
        self.fingerprints: set[str] = set()


class Session:
    """One registration of a worker, as the scheduler knows it."""

    __slots__ = (
        "drain_deadline_ns",
        "epochs",
        "in_flight",
        "next_step_seq",
        "plans",
        "received",
        "results",
        "up",
        "version",
    )

    def __init__(self, up: WorkerUp) -> None:
        self.up = up
        self.version: int | None = None  # None until a plan says otherwise: whatever the worker has
        self.next_step_seq = 0
        self.plans: dict[int, StepPlan] = {}  # not yet acknowledged
        self.in_flight: dict[int, dict[int, str]] = {}  # step_seq -> epoch -> kind of frame
        self.received: set[int] = set()
        self.results: dict[int, StepResult] = {}  # received and waiting for an earlier one
        self.epochs: dict[int, Attempt] = {}  # seated and not yet released
        self.drain_deadline_ns: int | None = None
