"""Steps as arrays: by hand, and the way that most steps go against the way that any step can go."""

from dataclasses import fields

import numpy as np
import pytest
import toy

from trtforge.runtime.batch import Batcher, RotationTable
from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import Limits, Rope
from trtforge.runtime.request import Request, Rows, SamplingParams, Step


def request(prompt: list[int], output: list[int], *tables: list[int]) -> Request:
    r = Request("r", prompt, SamplingParams(), seed=0, max_tokens=8)
    r.output_ids, r.block_tables = output, list(tables)
    return r


def test_rows_become_the_graphs_inputs() -> None:
    """A decode row, the second chunk of a prompt that goes on, and a resumed one that ends with its output."""
    decode = request([1, 2, 3], [4, 5], [7, 3], [0, 1])
    chunk = request(list(range(10, 20)), [], [5, 2, 4], [2, 3, 9])
    resumed = request([30], [31, 32], [6], [8])
    step = Step((Rows(decode, 4, 1, 1), Rows(chunk, 4, 5, 0), Rows(resumed, 0, 3, 2)))
    arrays = Batcher(toy.manifest(4, (None, 6))).arrays(step)
    assert arrays.token_ids.tolist() == [5, 14, 15, 16, 17, 18, 30, 31, 32]
    assert arrays.positions.tolist() == [4, 4, 5, 6, 7, 8, 0, 1, 2]
    assert arrays.query_start.tolist() == [0, 1, 6, 9]
    assert arrays.kv_lengths.tolist() == [5, 9, 3]
    assert arrays.logit_rows.tolist() == [0, 7, 8]
    assert arrays.block_tables[0].tolist() == [[7, 3, 0], [5, 2, 4], [6, 0, 0]]
    assert arrays.block_tables[1].tolist() == [[0, 1, 0], [2, 3, 9], [8, 0, 0]]
    assert arrays.slot_mapping[0].tolist() == [12, 8, 9, 10, 11, 16, 24, 25, 26]
    assert arrays.slot_mapping[1].tolist() == [4, 12, 13, 14, 15, 36, 32, 33, 34]
    dtypes = {
        name: getattr(arrays, name).dtype for name in ("token_ids", "positions", "query_start", "kv_lengths")
    }
    assert set(dtypes.values()) == {np.dtype(np.int32)}
    assert arrays.slot_mapping[0].dtype == np.int64
    assert arrays.block_tables[0].dtype == arrays.logit_rows.dtype == np.int32


def test_a_step_of_prompts_only_wants_no_logits() -> None:
    arrays = Batcher(toy.manifest(4)).arrays(Step((Rows(request([1, 2, 3], [], [0]), 0, 2, 0),)))
    assert arrays.logit_rows.shape == (0,)
    assert arrays.logit_rows.dtype == np.int32


def test_offsets_past_two_to_the_31_do_not_wrap() -> None:
    big = 2**31 // 16 + 5
    arrays = Batcher(toy.manifest(16)).arrays(Step((Rows(request([1], [], [big]), 0, 1, 1),)))
    assert arrays.slot_mapping[0].tolist() == [big * 16]


@pytest.mark.parametrize("factor", [1.0, 1.2071])
def test_rotation_rows_are_cos_and_sin_of_position_times_frequency(factor: float) -> None:
    """In FP32, as Hugging Face's rotary embedding computes them."""
    inv_freq = (1.0 / 10000 ** (np.arange(0, 64, 2, dtype=np.float32) / 64)).astype(np.float32)
    table = RotationTable(Rope(tuple(map(float, inv_freq)), factor))
    for positions in ([3, 0, 255], [300, 5], [70_000]):  # grows on demand
        rows = table.rows(np.array(positions, np.int32), max(positions))
        angles = np.array(positions, np.float32)[:, None] * inv_freq
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows[:, :32], np.cos(angles) * np.float32(factor))
        np.testing.assert_array_equal(rows[:, 32:], np.sin(angles) * np.float32(factor))


def test_each_kind_of_rotation_has_its_own_rows() -> None:
    ropes = (Rope((1.0, 0.5)), Rope((1.0, 0.1, 0.01), 2.0))
    arrays = Batcher(toy.manifest(4, ropes=ropes)).arrays(Step((Rows(request([1, 2], [], [0]), 0, 2, 1),)))
    assert [rows.shape for rows in arrays.cos_sin] == [(2, 4), (2, 6)]
    assert arrays.cos_sin[1][0].tolist() == [2, 2, 2, 0, 0, 0]


# -- steps of one token each, whose arrays are those of the step before
# --------------------------------------------------------------------


def expect_same(step: Step, got: StepArrays, expected: StepArrays) -> None:
    """All arrays alike, but that block tables may be wider: only what a request holds is read."""
    for field in fields(StepArrays):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        pairs = list(zip(one, other, strict=True)) if isinstance(one, tuple) else [(one, other)]
        for g, (a, b) in enumerate(pairs):
            assert a.dtype == b.dtype, field.name
            assert a.flags.c_contiguous, field.name
            if field.name == "block_tables":
                lengths = [len(row.request.block_tables[g]) for row in step.rows]
                assert all((x[:n] == y[:n]).all() for x, y, n in zip(a, b, lengths, strict=True)), step
            else:
                np.testing.assert_array_equal(a, b, field.name)


class Checked(Batcher):
    """Compares each step's arrays with those that are made anew."""

    reused = 0
    last: StepArrays | None = None

    def arrays(self, step: Step) -> StepArrays:
        arrays = super().arrays(step)
        expect_same(step, arrays, self._of_any_rows(step))
        self.reused += arrays is self.last
        self.last = arrays
        return arrays


@pytest.mark.parametrize("seed", range(20))
def test_reused_arrays_are_those_made_anew(seed: int) -> None:
    """Requests join, leave, are preempted and rolled back, so that tables grow, and become others."""
    rng = np.random.default_rng(seed)
    ropes = (Rope((1.0, 0.5)), Rope((1.0, 0.1, 0.01), 2.0))
    m = toy.manifest(int(rng.choice([1, 2, 4])), (None, 6) if seed % 2 else (None,), ropes=ropes)
    loop = toy.Loop(m, 60 // m.kv.tokens_per_block, Limits(4, 24, 48))
    loop.batcher = checked = Checked(m)
    for _ in range(8):
        loop.add(toy.random_prompt(rng, 1, 20), SamplingParams(max_tokens=int(rng.integers(2, 24))))
        for _ in range(int(rng.integers(0, 12))):
            if loop.scheduler.has_work:
                loop.step(fail=rng.random() < 0.2)
    loop.run()
    assert checked.reused > 3
    assert all(r.output_ids == toy.alone(m, r) for r in loop.requests)


def test_a_table_that_became_another_one_is_read_again() -> None:
    a, b = request([1, 2, 3], [4], [7]), request([1, 2, 3], [4], [5])
    batcher = Batcher(toy.manifest(4, (None, 6)[:1]))
    step = Step((Rows(a, 3, 1, 1), Rows(b, 3, 1, 1)))
    first = batcher.arrays(step)
    assert first.slot_mapping[0].tolist() == [7 * 4 + 3, 5 * 4 + 3]
    a.block_tables = [[2]]
    second = batcher.arrays(step)
    assert second is first
    assert second.block_tables[0].tolist() == [[2], [5]]
    assert second.slot_mapping[0].tolist() == [2 * 4 + 3, 5 * 4 + 3]


def test_a_token_in_mid_prompt_is_that_token() -> None:
    """A step may be of one token with logits that is not the request's last one: `verify` asks for such."""
    r = request([10, 11, 12], [], [0])
    batcher = Batcher(toy.manifest(4))
    for start in range(3):
        arrays = batcher.arrays(Step((Rows(r, start, 1, 1),)))
        assert arrays.token_ids.tolist() == [10 + start]
        assert arrays.kv_lengths.tolist() == [start + 1]
    assert batcher.arrays(Step((Rows(r, 1, 1, 0),))).logit_rows.tolist() == []
