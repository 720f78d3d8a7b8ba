"""Measure something: `python -m scripts.bench bench=decode`. Every figure is a ratio within one run.

decode      a decode step, reference bodies in eager against compiled, batch 1-64
replay      rows and time of a prefill by layer, whole against bounded replay
engine      the engine against the plain loop: decode steps by batch, prefill by length
scheduler   host work of a step with 256 running requests, prompts of 1k and 855k, with drafts
router      host work of the router; hits and balance of its policies, over engines with a modelled cache
admission   a prompt of 855,000 tokens admitted, cold and cached, against a scheduler of lists
eplb        placement of experts on streams of routing: fitted on earlier steps, judged on later ones
migrate     steps while experts move against steps while none do, four ranks
dispatch    rows of a layer to their experts, allgather against alltoall: bytes sent and time, 2 and 4 ranks
agree       step agreement: gloo against shared memory at 2-32 ranks, pinned; a rank that dies is named
hosttable   random rows of a table in host memory, 4 KB against 2 MB pages
transfer    KV read from another process by NIXL: a descriptor a row, merged, a page; beside memcpy
"""

from scripts.benches import (
    admission,
    agree,
    decode,
    dispatch,
    engine,
    eplb,
    hosttable,
    migrate,
    replay,
    router,
    scheduler,
    transfer,
)
from scripts.build import Settings
from scripts.entry import entry

BENCHES = {
    "decode": decode.run,
    "replay": replay.run,
    "engine": engine.run,
    "scheduler": scheduler.run,
    "router": router.run,
    "admission": admission.run,
    "eplb": eplb.run,
    "migrate": migrate.run,
    "dispatch": dispatch.run,
    "agree": agree.run,
    "hosttable": hosttable.run,
    "transfer": transfer.run,
}


def run(s: Settings) -> dict:
    if s.bench not in BENCHES:
        raise ValueError(f"bench must be one of {sorted(BENCHES)}, got {s.bench!r}")
    return {"bench": s.bench, **BENCHES[s.bench](s)}


if __name__ == "__main__":
    entry(run)
