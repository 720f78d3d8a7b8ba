"""Whole runs against the file and against each other: chunks, decode, company, drafts, replay, storage."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels import choose
from kernels.registry import recording
from scripts.verification.case import SequenceSet
from scripts.verification.player import Player
from scripts.verification.table import FP32_LIMIT, Results
from scripts.verification.taps import ring


def check_chunks(player: Player, st: SequenceSet, results: Results) -> Tensor:
    """Prefill whole, then in chunks of several sizes: right against the file, equal bit for bit to the whole."""
    total, window = st.prompt.shape[1], player.runner.model.cfg.sliding_window
    whole = player.prefill(st.prompt, total)
    want, qat = st.get("prefill.logits_all"), player.runner.model.rt.qat
    last = st.get("prefill.logits_last")
    if last is not None:
        results.logits("prefill logits", whole[:, -1], last, st.name, None if qat else 1e-3)
    for chunk in sorted({c for c in (1, 3, 7, window + 1) if c < total}):
        got = player.prefill(st.prompt, chunk)
        where = f"{st.name} chunk {chunk}"
        if want is not None:
            results.logits("chunked logits", got, want, where, None if qat else 1e-3)
        results.same("chunked = whole", torch.equal(got, whole), where)
    results.same("among others = alone", torch.equal(player.among_others(st.prompt, 4), whole), st.name)
    return whole


def check_decode(player: Player, st: SequenceSet, results: Results) -> None:
    """Teacher-forced decode after a prefill: logits and ids of the file; each step equal to a longer prefill's row."""
    b, total = st.prompt.shape
    steps = st.decode.shape[1]
    longer = torch.tensor([[*p, *d] for p, d in zip(st.prompt.tolist(), st.decode.tolist(), strict=True)])
    rows = player.prefill(longer.numpy(), longer.shape[1])
    player.prefill(st.prompt, total)
    drafting, qat = bool(player.runner.block), player.runner.model.rt.qat
    for j in range(steps):
        where, pre = f"{st.name} step {j}", f"decode.{j}."
        got, log = _recorded(player, lambda j=j: player.decode(st.decode[:, j], total + j))
        results.same("decode = longer prefill", torch.equal(got, rows[:, total + j]), where)
        want = st.get(pre + "logits")
        if want is not None:
            results.logits("decode logits", got, want, where, None if qat else 1e-3)
        anchor = st.get(pre + "spec.input_id")
        if anchor is not None:
            results.ids("draft input_id", got.argmax(-1), anchor, where, None if qat else 0)
        if not qat:
            _decode_ids(st, pre, log, b, where, results)
        if drafting and st.get(pre + "spec.output_ids") is not None:
            _drafts(player, st, pre, total + j + 1, where, results)


def _recorded(player: Player, run: Callable[[], Tensor]) -> tuple[Tensor, list]:
    """Run with every op noted, where ops can be seen."""
    if not player.recordable:
        return run(), []
    model = player.runner.model
    with recording(model.rt.kernels.names()) as log:
        player.runner.model = replace(model, rt=replace(model.rt, kernels=choose("recorded")))
        out = run()
        player.runner.model = model
    return out, list(log)


def _decode_ids(st: SequenceSet, pre: str, log: list, b: int, where: str, results: Results) -> None:
    """Ids of a decode step, layer by layer: each MoE ends a layer."""
    cfg_layer = 0
    for name, _, out in log:
        key = f"{pre}layers.{cfg_layer}."
        if name == "engram_hash":
            _ids("engram_hash_ids", out[:b], st.get(key + "engram_hash_ids"), where, results)
        elif name == "select_topk":
            want = st.get(key + "topk_positions")
            _ids("topk_positions", out[:b] if want is None else out[:b, : want.shape[-1]], want, where, results)
        elif name == "route":
            want = st.get(key + "gate_ids")
            _ids("gate_ids", out[0][:b].sort(-1).values, want if want is None else want.sort(-1).values, where, results)
            cfg_layer += 1


def _ids(tap: str, got: Tensor, want: Tensor | None, where: str, results: Results) -> None:
    if want is not None and want.numel():
        results.ids(f"decode {tap}", got, want, where, 0)


def _drafts(player: Player, st: SequenceSet, pre: str, position: int, where: str, results: Results) -> None:
    """DSpark after a decode step: ids, logits and confidence of the block; gate ids and stream of its stages."""
    anchors = st.get(pre + "spec.output_ids")[:, 0]
    qat = player.runner.model.rt.qat
    draft, log = _recorded(player, lambda: player.draft(anchors, position))
    ids = torch.cat((anchors.long().unsqueeze(-1), draft.tokens), 1)
    results.ids("draft ids", ids, st.get(pre + "spec.output_ids"), where, None if qat else 0)
    results.logits("draft confidence", draft.confidence, st.get(pre + "spec.confidence"), where, None if qat else 1e-3)
    want = st.get(pre + "spec.logits")
    if want is not None:
        results.logits("draft logits", draft.logits, want, where)
    rows = draft.tokens.numel()
    gates = [out[0][:rows] for name, _, out in log if name == "route"]
    streams = [out[:rows] for name, _, out in log if name == "mhc_post"]
    for s, got in enumerate(gates):
        want = st.get(f"{pre}spec.mtp.{s}.gate_ids")
        if want is not None:
            results.ids("draft gate_ids", got.sort(-1).values, want.sort(-1).values, where, 0)
    want = st.get(pre + "spec.mtp.0.out_stream")
    if want is not None and streams:
        results.close("draft out_stream", streams[1], want, where, FP32_LIMIT)


def check_replay(player: Player, st: SequenceSet, results: Results) -> None:
    """Decoder bounded replay, both forms of spec section 13: logits, decode after it, rings."""
    model = player.runner.model
    total = st.prompt.shape[1]
    for name, layer in (
        ("replay_after_source", model.cfg.last_source + 1),
        ("replay_from_source", model.cfg.last_source),
    ):
        want = st.get(f"{name}.logits_last")
        if want is None:
            continue
        results.logits(f"{name} logits", player.replay(st.prompt, layer), want, st.name)
        for i in range(model.cfg.num_hidden_layers):
            held = st.get(f"{name}.layers.{i}.window_kv_ring")
            if held is not None:
                _, batch = player.start(st)
                got = ring(model, player.runner.cache, batch, i)
                results.close(f"{name} rings", got, held, f"{st.name}.{i}", FP32_LIMIT)
        for j in range(st.decode.shape[1]):
            got, want = player.decode(st.decode[:, j], total + j), st.get(f"{name}.decode.{j}.logits")
            if want is not None:
                results.logits(f"{name} decode", got, want, f"{st.name} step {j}")


def check_storage(plain: Player, packed: Player, st: SequenceSet, results: Results) -> None:
    """Packed storage gives the same bits as plain: prefill and decode."""
    total = st.prompt.shape[1]
    same = torch.equal(plain.prefill(st.prompt, total), packed.prefill(st.prompt, total))
    results.same("packed = plain", same, st.name)
    for j in range(st.decode.shape[1]):
        got = [p.decode(st.decode[:, j], total + j) for p in (plain, packed)]
        results.same("packed = plain", torch.equal(*got), f"{st.name} step {j}")
