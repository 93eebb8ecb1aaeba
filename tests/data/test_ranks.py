"""On real ranks: streams that end at different times, and a sampler that knows its rank."""

from tests.data.rank_cases import all_cases
from tests.ranks import run_ranks


def test_streams_sharded_by_rank_end_together_and_samplers_know_their_rank():
    short, long = run_ranks(all_cases, 2)
    assert [(row[1], row[5][1:]) for row in short["rows"][:5]] == [
        (0, ([0, 1], True)), (0, ([2], True)), (0, ([2], False)), (0, ([2], False)), (0, ([2], False)),
    ]  # fmt: skip
    assert [row[5][1] for row in long["rows"][:5]] == [[100, 101], [102, 103], [104, 105], [106, 107], [108]]
    assert [row[:2] + (row[4],) for row in short["rows"]] == [row[:2] + (row[4],) for row in long["rows"]]  # noqa: RUF005
    assert len(short["rows"]) == 10
    assert "sharded by rank" in short["notice"]
    assert (short["places"], long["places"]) == ([0, 2, 4, 6], [1, 3, 5])
