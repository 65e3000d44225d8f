"""What every service of one port shares: the model, the front end, and whether requests are taken."""

import time
from enum import Enum

from cluster.call import Call, StreamError
from cluster.frontend import FrontEnd
from cluster.served_model import ServedModel
from cluster.text import Tokenizer
from cluster.validate import ClientRequest, checked

RETRY_AFTER_MS = 1000


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Serving:
    """One model served through one front end."""

    def __init__(self, *, front_end: FrontEnd, model: ServedModel, tokenizer: Tokenizer | None) -> None:
        self.front_end = front_end
        self.model = model
        self.tokenizer = tokenizer
        self.state = State.STARTING
        self.started_s = time.monotonic()
        self.last_request_s = 0.0  # wall clock; 0: none yet

    async def open(self, client: ClientRequest) -> Call:
        """Checks and submits. Raises ValueError for a bad request, StreamError when it is not taken."""
        self.last_request_s = time.time()
        if self.state is not State.SERVING:
            raise StreamError("UNAVAILABLE", f"the server is {self.state.value}", RETRY_AFTER_MS)
        return self.front_end.open(await checked(client, self.model, self.tokenizer))
