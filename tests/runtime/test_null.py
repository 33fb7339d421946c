"""The toy model notices every wrong block, slot, position and length: else the tests over it would prove nothing."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import toy

from trtforge.runtime.batch import Batcher
from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.executors.null import NullBehaviour, NullExecutor
from trtforge.runtime.request import Request, Rows, SamplingParams, Step

TPB = 4
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90]


def prompt_step(table: list[int], tokens: list[int] = PROMPT, groups: int = 1) -> Step:
    request = Request("r", list(tokens), SamplingParams(), seed=0, max_tokens=8)
    request.block_tables = [list(table) for _ in range(groups)]
    return Step((Rows(request, 0, len(tokens), 1),))


def hashed(arrays: StepArrays, windows: tuple[int | None, ...] = (None,)) -> int:
    executor = NullExecutor(toy.manifest(TPB, windows), NullBehaviour())
    executor.allocate([16] * len(windows))
    executor.run(arrays)
    return int(executor._hashes(arrays)[0])


def arrays_of(step: Step, windows: tuple[int | None, ...] = (None,)) -> StepArrays:
    return Batcher(toy.manifest(TPB, windows)).arrays(step)


def test_the_place_of_blocks_does_not_matter() -> None:
    assert hashed(arrays_of(prompt_step([0, 1, 2]))) == hashed(arrays_of(prompt_step([9, 3, 7])))


@pytest.mark.parametrize("at", range(9))
def test_every_token_matters(at: int) -> None:
    other = [t + (i == at) for i, t in enumerate(PROMPT)]
    assert hashed(arrays_of(prompt_step([0, 1, 2]))) != hashed(arrays_of(prompt_step([0, 1, 2], other)))


FAULTS: dict[str, Callable[[StepArrays], StepArrays]] = {
    "two blocks swapped": lambda a: replace(a, block_tables=(a.block_tables[0][:, [1, 0, 2]],)),
    "a foreign block": lambda a: replace(a, block_tables=(np.array([[0, 5, 2]], np.int32),)),
    "a slot off by one": lambda a: replace(a, slot_mapping=(a.slot_mapping[0] + (np.arange(9) == 4),)),
    "a position too few": lambda a: replace(a, positions=a.positions - 1),
    "a length too short": lambda a: replace(a, kv_lengths=a.kv_lengths - 1),
    "another token": lambda a: replace(a, token_ids=a.token_ids[::-1].copy()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_shows(fault: str) -> None:
    right = arrays_of(prompt_step([0, 1, 2]))
    assert hashed(FAULTS[fault](right)) != hashed(right)


def test_a_window_hides_what_lies_before_it() -> None:
    inside, outside = ([t + (i == at) for i, t in enumerate(PROMPT)] for at in (4, 3))
    right = hashed(arrays_of(prompt_step([0, 1, 2]), (5,)), (5,))
    assert hashed(arrays_of(prompt_step([0, 1, 2], outside), (5,)), (5,)) == right
    assert hashed(arrays_of(prompt_step([0, 1, 2], inside), (5,)), (5,)) != right


def test_every_group_matters() -> None:
    windows = (None, None)
    right = arrays_of(prompt_step([0, 1, 2], groups=2), windows)
    wrong = replace(right, block_tables=(right.block_tables[0], right.block_tables[1][:, ::-1]))
    assert hashed(wrong, windows) != hashed(right, windows)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    a, b = prompt_step([0, 1, 2]).rows[0], prompt_step([3, 4, 5], [7] * 12).rows[0]
    executor = NullExecutor(toy.manifest(TPB), NullBehaviour())
    executor.allocate([16])
    both = executor.run(Batcher(executor.manifest).arrays(Step((b, a)))).copy()
    alone = executor.run(Batcher(executor.manifest).arrays(Step((a,))))
    np.testing.assert_array_equal(both[1], alone[0])
