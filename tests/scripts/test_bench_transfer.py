"""bench=transfer in its smallest form: two processes over NIXL, equal bytes in every form, every key."""

import numpy as np
import pytest

from scripts.benches import transfer
from scripts.benches.transfer import BYTES, Sizes


def test_a_page_has_the_bytes_of_the_model():
    assert BYTES == 64 * 890


def test_every_form_covers_the_same_bytes():
    here, there = (transfer.churned(seed, 64, 8) for seed in (1, 2))
    assert len({*here.tolist()}) == 8 and (here != there).any()
    for form in transfer.FORMS.values():
        pair = form(here, there, 64)
        assert [side[:, 2].sum() for side in pair] == [8 * BYTES] * 2
    pools = transfer.pools(64, 0)
    assert transfer.checksum(pools, transfer.rows(here, 64)) == transfer.checksum(pools, transfer.whole(here))


@pytest.mark.medium
def test_the_bench_gives_its_keys(tables):
    got = transfer.run(None, Sizes(pages=64, small=4, large=16, turns=2))
    assert got["checksums_equal"] and got["descriptors_rows"] == 4 * int(transfer.PLANES[:, 0].sum())
    assert got["descriptors_pages"] <= 4 and got["descriptors_merged"] < got["descriptors_rows"]
    for key in ("ratio", "memcpy_share", "post_ms_thread", "step_ms_inline", "tok_per_s_pages"):
        assert np.isfinite(got[key]) and got[key] > 0
    columns, rows = tables["transfer"]
    assert [row[0] for row in rows] == list(transfer.FORMS) and len(columns) == len(rows[0])
