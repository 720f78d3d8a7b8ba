"""From a workload's settings to what is played: session trees, or requests with their times."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.workloads import AgentX, Poisson, Trace
from serve.load import synthetic, traces
from serve.load.client import LoadRequest
from serve.load.filler import Filler, Scale
from serve.load.records import Arrival
from serve.load.trees import Tree, tree

READERS: dict[str, Callable[..., list[Arrival]]] = {
    "azure": traces.read_azure,
    "mooncake": traces.read_mooncake,
    "tracelab": traces.read_tracelab,
}


@dataclass(frozen=True)
class Planned:
    """Requests and when they are due, and how many were left out."""

    requests: list[tuple[float, LoadRequest]]
    left_out: int = 0


def trees(w: AgentX) -> list[Tree]:
    """The sessions of ``path``, or synthetic ones."""
    if w.path is None:
        made = synthetic.sessions(np.random.default_rng([w.seed, 2]), w.limit)
    else:
        made = traces.read_weka(w.path, w.limit)
    for session in made:
        if session.block_size != w.scale.block:
            raise ValueError(
                f"workload.path={w.path}, session {session.name}: blocks of {session.block_size} tokens; "
                f"lanes play blocks of {w.scale.block}"
            )
    return [tree(session, w.scale, w.max_request_tokens) for session in made]


def arrivals(w: Trace | Poisson) -> list[Arrival]:
    """The rows of ``path``, or made ones. Raises ValueError where neither can be had."""
    rng = np.random.default_rng([w.seed, 2])
    if isinstance(w, Poisson):
        prompt, output = (w.prompt_median, w.prompt_sigma, 10**7), (w.output_median, w.output_sigma, 10**6)
        return synthetic.flat(rng, w.limit, w.rate, w.shape, prompt, output)
    if w.path is not None:
        return READERS[w.kind](w.path, w.limit)
    if w.kind == "azure":
        return synthetic.flat(rng, w.limit, 5.0, 0.7, (1_000, 1.0, 8_000), (110, 1.0, 1_000))
    if w.kind == "mooncake":
        return synthetic.sharing(rng, w.limit, 3.0, groups=8)
    raise ValueError("workload.path is null: give the file of the trace")


def flat(w: Trace | Poisson, vocab: np.ndarray) -> Planned:
    """Requests of filler, as long as the rows say; what rows share, their prompts share."""
    scale, out, left_out = w.scale, [], 0
    filler = Filler(w.seed, w.kind, vocab, scale.width)
    for i, row in enumerate(arrivals(w)):
        request = LoadRequest(prompt(filler, scale, row, i), scale.output(row.output_tokens), session=w.kind, turn=i)
        if w.max_request_tokens and len(request.tokens) + request.max_tokens > w.max_request_tokens:
            left_out += 1
        else:
            out.append((row.at_s * scale.time, request))
    if not out:
        raise ValueError(f"workload.max_request_tokens={w.max_request_tokens} leaves no request")
    return Planned(out, left_out)


def prompt(filler: Filler, scale: Scale, row: Arrival, label: int) -> np.ndarray:
    ids = np.zeros(0, np.int64)
    if row.runs is not None:
        ids = np.concatenate([np.arange(s, s + n) for s, n in row.runs.tolist()])
    return filler.prompt(ids, max(1, scale.prompt(row.input_tokens)), label)


def texts(prompts: list[str], encode: Callable[[str], list[int]], max_tokens: int) -> Planned:
    """A request for each text, all due at once."""
    made = [np.array(encode(p), np.int32) for p in prompts]
    requests = [LoadRequest(t, max_tokens, session="prompts", turn=i) for i, t in enumerate(made)]
    return Planned([(0.0, r) for r in requests])
