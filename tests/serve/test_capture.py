"""Recorded decode steps. On a CPU a trace of ATen calls stands in for a CUDA graph: recorded from padding alone, and as
a graph it repeats the same calls on the same memory, whatever Python would do another time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernels import choose
from model import transformer
from model.moe import DENSE_ROWS
from model.pack import Rows
from scripts.serving.engine import runner_of
from serve import capture
from serve.request import Sampling
from serve.runner import Runner
from serve.settings import Capture
from tests import small
from tests.serve.harness import SERVE, Bench

CFG = small.config()
ASKS = [(small.tokens(n, seed=n), Sampling(12, (i % 2) * 0.9, seed=i)) for i, n in enumerate((1, 5, 30, 64, 65, 100))]


class NoSync(TorchFunctionMode):
    """Fails where Python waits for the device or takes numbers from it: what a stream being captured cannot do."""

    NAMES = ("tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal", "allclose",
             "__bool__", "__int__", "__float__", "__index__", "__contains__")  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        assert name not in self.NAMES, f"{name} asks the device"
        if name in ("__getitem__", "__setitem__", "index", "index_put_"):
            mask = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype is torch.bool]
            assert not mask, f"{name} by a mask asks the device"
        assert name != "repeat_interleave" or isinstance(args[1], int), "its size is on the device"
        return func(*args, **kwargs)


class NoCopy(TorchDispatchMode):
    """The same below Python: values read, or moved from one device to another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, str(func).split(".")[1]
        assert name not in ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "equal"), f"{name} asks"
        assert name != "_to_copy" or not kwargs.get("device"), "copied between devices"
        return func(*args, **kwargs)


class Trace:
    """A `capture.Recorder`. ``replays`` counts; ``before`` is called in front of each."""

    def __init__(self, before: Callable[[], None] = lambda: None):
        self.graphs, self.replays, self.before = [], 0, before

    def record(self, run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with NoSync(), NoCopy():
            out = run(*leaves).clone()
        graph = make_fx(run)(*leaves)
        self.graphs.append(graph)

        def replay() -> None:
            self.before()
            self.replays += 1
            out.copy_(graph(*leaves))

        return out, replay


def dense(**how):
    """The small model with experts that need no numbers on the host."""
    made = small.model(CFG)
    return replace(made, rt=replace(made.rt, kernels=choose("reference", grouped_mlp="dense")), **how)


def bench(buckets: tuple[int, ...] = (), recorder: Trace | None = None, **how) -> Bench:
    b = Bench(dense(), **how)
    if buckets:
        b.engine.device.runner.record(recorder or Trace(), buckets)
    return b


@pytest.mark.medium
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"speculate": True}, marks=pytest.mark.slow),
        {"speculate": True, "overlap": 1, "window": "halo"},
    ],
    ids=str,
)
def test_tokens_are_those_of_steps_that_run(how):
    recorder = Trace()
    assert bench((16, 32), recorder, **how).run(*ASKS) == bench(**how).run(*ASKS)
    assert recorder.replays > 5 and len(recorder.graphs) < recorder.replays / 2


def decode(starts: Sequence[int], counts: Sequence[int], seed: int = 0) -> Rows:
    """Sequence i is in slot i + 1."""
    starts, counts = np.array(starts), np.array(counts)
    zeros = np.zeros(len(starts), np.int64)
    return Rows(small.tokens(counts.sum(), seed), starts, counts, 1 + np.arange(len(starts)), zeros, zeros)


def filled(model, recorder: Trace | None = None) -> Runner:
    """A runner whose pools hold what tells them apart, with pages 1, 2 in slot 1, 3, 4 in slot 2, and so on."""
    r, draw = Runner(model, 13, 7), torch.Generator().manual_seed(0)
    for pool in tree_leaves(r.cache):
        values = torch.randint(0, 80, pool.shape, generator=draw)
        pool.copy_(values if pool.dtype is torch.int64 else values / 40 - 1)
    r.table.rows[1:, :2] = 1 + torch.arange(12).view(6, 2)
    if recorder is not None:
        r.record(recorder, (16, 24))
    return r


STEPS = [
    ([5, 70, 3, 100], [1, 1, 1, 1]),
    ([6, 71], [1, 1]),
    ([20, 63, 0, 90, 77, 11], [3, 1, 4, 4, 2, 3]),
    ([7], [1]),
]


def test_a_replay_is_the_step_bit_by_bit_and_padding_writes_scratch_alone():
    model, recorder = dense(), Trace()
    recorded, plain = filled(model, recorder), filled(model)
    layout = model.layout
    for i, (starts, counts) in enumerate(STEPS):
        rows, wanted = decode(starts, counts, i), np.arange(sum(counts))
        got, want = (r.run(rows, 128, wanted).clone() for r in (recorded, plain))
        assert torch.equal(got, want), i
        for name, scratch in (("pages", layout.stride), ("rings", layout.slot_rings), ("tails", layout.slot_tails)):
            mine, its = (getattr(r.cache, name)[scratch:] for r in (recorded, plain))
            assert torch.equal(mine, its), (i, name)
        assert torch.equal(recorded.cache.tokens[layout.token_depth :], plain.cache.tokens[layout.token_depth :])
        assert torch.equal(recorded.cache.load[:, :-1], plain.cache.load[:, :-1])
    assert recorder.replays == len(STEPS) and len(recorder.graphs) == 2, "1 row each in 16, up to 4 in 24"


def test_a_replay_reads_nothing_but_its_buffers_and_the_cache():
    """Whatever else the step was made of is spoilt before the replay."""
    model, given = dense(), []
    recorder = Trace(lambda: [t.fill_(2**40) for batch in given for t in tree_leaves(batch)])
    recorded, plain = filled(model, recorder), filled(model)
    pack = recorded._pack
    recorded._pack = lambda *how: given.append(pack(*how)) or given[-1]
    for i, (starts, counts) in enumerate(STEPS):
        rows, wanted = decode(starts, counts, i), np.arange(sum(counts))
        got = recorded.run(rows, 128, wanted)
        assert torch.equal(got, plain.run(rows, 128, wanted)) and len(given) == i + 1
    assert not any((t == 2**40).any() for one in recorded.capture.recorded.values() for t in one.inputs)


def test_a_bucket_is_recorded_once_for_each_width_of_tables():
    recorder = Trace()
    r = filled(dense(), recorder)
    r.table.rows = torch.nn.functional.pad(r.table.rows, (0, 2))
    for reach in (64, 128, 129, 192, 100, 190):
        r.run(decode([60, 61], [1, 1]), reach, np.arange(2))
    assert len(recorder.graphs) == 2 and recorder.replays == 6


@pytest.mark.parametrize(
    ("counts", "late"), [([1] * 25, False), ([5], False), ([1, 9], False), ([1, 1], True)], ids=str
)
def test_everything_else_runs_as_before(counts, late):
    recorder = Trace()
    r = Runner(dense(), 13, 30, prefill="layer20_replay")
    r.record(recorder, (16, 24))
    rows = decode([3] * len(counts), counts)
    more = (np.arange(2), decode([3, 3], [1, 1])) if late else ()
    r.run(rows, 128, np.arange(2), *more)
    assert not recorder.replays


def test_the_loop_over_experts_is_seen_to_ask():
    made = small.runner(CFG)
    with pytest.raises(AssertionError, match="asks the device"), NoSync():
        made.run(decode([5], [1]), 64, np.arange(1))


@pytest.mark.parametrize(
    ("kernels", "rows", "message"),
    [("reference", 16, "grouped_mlp=reference"), ("compile", DENSE_ROWS + 8, "at most 64 rows"), ("compile", 64, None)],
)
def test_buckets_that_cannot_be_recorded_are_refused_by_name(kernels, rows, message):
    model = small.model(CFG, kernels=kernels)
    if message is None:
        return capture.check(model, rows)
    with pytest.raises(ValueError, match=rf"serve\.capture\.buckets: a step of {rows} rows .*{message}"):
        capture.check(model, rows)


def test_a_cpu_records_nothing():
    serve = replace(SERVE, capture=Capture((16,)))
    with pytest.raises(ValueError, match=r"serve\.capture\.buckets records graphs of a GPU, and device=cpu: leave it"):
        runner_of(dense(), serve, "cpu")
    with pytest.raises(ValueError, match=r"serve\.capture\.buckets must be numbers of rows"):
        Capture((0,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs: needs a GPU")
@pytest.mark.parametrize("kernels", ["reference", "compile"])
def test_on_a_gpu_replayed_tokens_are_those_of_steps_that_run(kernels):
    """`reference` with the experts in one product, `compile` as it is."""
    experts = {"grouped_mlp": "dense"} if kernels == "reference" else {}
    made = small.model(CFG)
    rt = replace(made.rt, kernels=choose(kernels, **experts))
    there = lambda node: tree_map(lambda leaf: leaf if leaf is None else leaf.to("cuda"), node)  # noqa: E731
    model = transformer.assemble(CFG, rt, made.layout, there(made.params), there(made.consts), "cuda")
    tokens = []
    for buckets in (None, (16, 32)):
        b = Bench(model, device="cuda", capture=Capture(buckets))
        tokens.append(b.run(*ASKS))
        recorded = b.engine.device.runner.capture
        assert bool(recorded and recorded.recorded) == bool(buckets)
    assert tokens[0] == tokens[1]
