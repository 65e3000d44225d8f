"""Several drafters behind one `propose`."""

from collections.abc import Sequence

from tests.test_worker_drafter import row_of
from worker.drafter import Drafter, NgramDrafter
from worker.mixture import LOOKUP, MODEL, MixedDrafter, PreferLookup
from worker.rows import RowState


class Sevens(Drafter):
    """Drafts sevens, and remembers for how many rows it was asked."""

    max_drafts = 2
    state_layers = (1,)
    drop_last_hit_block = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, rows: Sequence[RowState], num_propose: Sequence[int]) -> list[list[int]]:
        self.asked.append(len(rows))
        return [[7] * min(wanted, self.max_drafts) for wanted in num_propose]


COPY, NEW = (1, 2, 3, 4, 1, 2), (1, 2, 3, 4, 5, 6)


def test_lookup_drafts_where_it_finds_a_copy_and_the_model_elsewhere() -> None:
    model = Sevens()
    drafter = MixedDrafter(NgramDrafter(max_drafts=4), model, PreferLookup())
    rows = [row_of(*NEW), row_of(*COPY), row_of(*NEW)]
    assert drafter.propose(rows, [4, 4, 1]) == [[7, 7], [3, 4, 1, 2], [7]]
    assert model.asked == [2]


def test_the_model_is_asked_in_every_step_since_it_may_have_kv_to_write() -> None:
    model = Sevens()
    drafter = MixedDrafter(NgramDrafter(max_drafts=4), model, PreferLookup())
    assert drafter.propose([row_of(*COPY)], [2]) == [[3, 4]]
    assert drafter.propose([], []) == []
    assert model.asked == [0, 0]


def test_a_mixture_wants_what_its_model_wants() -> None:
    drafter = MixedDrafter(NgramDrafter(max_drafts=4), Sevens(), PreferLookup())
    assert (drafter.max_drafts, drafter.state_layers, drafter.drop_last_hit_block) == (4, (1,), True)
    drafter = MixedDrafter(NgramDrafter(max_drafts=4), None, PreferLookup())
    assert (drafter.max_drafts, drafter.state_layers, drafter.drop_last_hit_block) == (4, (), False)
    assert drafter.propose([row_of(*NEW), row_of(*COPY)], [2, 2]) == [[], [3, 4]]


def test_the_policy_chooses_source_and_number() -> None:
    class Stubborn(PreferLookup):
        def choose(
            self, rows: Sequence[RowState], available: Sequence[tuple[int, int]], match_lengths: Sequence[int]
        ) -> list[tuple[int, int]]:
            assert available == [(4, 2), (4, 2), (0, 2)]
            assert match_lengths == [2, 2, 0]
            return [(LOOKUP, 1), (MODEL, 2), (MODEL, 0)]

    drafter = MixedDrafter(NgramDrafter(max_drafts=4), Sevens(), Stubborn())
    assert drafter.propose([row_of(*COPY), row_of(*COPY), row_of(*NEW)], [4, 4, 4]) == [[3], [7, 7], []]
