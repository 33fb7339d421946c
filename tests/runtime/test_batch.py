import numpy as np
import pytest
import toy

from trtforge.runtime.batch import Batcher, RotationTable
from trtforge.runtime.manifest import Rope
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
        rows = table.rows(np.array(positions, np.int32))
        angles = np.array(positions, np.float32)[:, None] * inv_freq
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows[:, :32], np.cos(angles) * np.float32(factor))
        np.testing.assert_array_equal(rows[:, 32:], np.sin(angles) * np.float32(factor))


def test_each_kind_of_rotation_has_its_own_rows() -> None:
    ropes = (Rope((1.0, 0.5)), Rope((1.0, 0.1, 0.01), 2.0))
    arrays = Batcher(toy.manifest(4, ropes=ropes)).arrays(Step((Rows(request([1, 2], [], [0]), 0, 2, 1),)))
    assert [rows.shape for rows in arrays.cos_sin] == [(2, 4), (2, 6)]
    assert arrays.cos_sin[1][0].tolist() == [2, 2, 2, 0, 0, 0]
