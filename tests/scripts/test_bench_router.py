"""The bench of the router in its smallest form: what its modelled engines hit is what was sent to them."""

from scripts.benches import router
from serve.router.choice import RouterRules


def test_router_bench_gives_its_keys(tables):
    got = router.run(None, tokens=3000, turns=2, count=4)
    assert got["place_us_855k_new"] > 0 and got["step_us_256"] > 0
    columns, rows = tables["policies"]
    assert [row[0] for row in rows][:2] == ["affinity, sessions named", "affinity, sessions unnamed"]
    assert len(columns) == len(rows[0]) and all(0 <= row[1] <= got["hit_endless"] for row in rows)


def test_one_endless_engine_hits_all_that_can_be_hit():
    asks = router.sessions(3, 4, 0)
    caches = router.Caches(RouterRules(), 1, 1 << 20)
    caches.play(asks, 2)
    tokens = sum(len(ask.tokens) for ask in asks)
    assert sum(caches.hits.values()) / tokens == router.endless(asks) > 0.5
    assert caches.router.open == 0 and caches.hits.total() + caches.computed.total() == tokens
