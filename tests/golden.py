"""Golden cases of any shape, made by the dense forward: an implementation that shares no cache, page or op with the
one that `scripts.verify` checks. fp32 only.

B sequences of S prompt tokens and n decode tokens; C compressed entries.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import checkpoint, dense, dense_dspark, release, transformer, tree
from model.config import ModelConfig
from tests import small


def read_weights(path: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """A golden weights file as the dense forward takes it: fp32 values, a layer's experts stacked."""
    raw, specs = load_file(path), dict(tree.walk(transformer.specs(cfg)))
    out, stacks = {}, {}
    for entry in release.schema(cfg).values():
        if entry.part == "weight":
            scale = raw.get(entry.name.removesuffix("weight") + "scale")
            value = release.decode(release.one(specs[entry.path]), raw[entry.name], scale, torch.float32)
            if entry.expert is None:
                out[entry.name] = value
            else:
                stem, last = entry.name.removesuffix(".weight").rsplit(f".{entry.expert}.", 1)
                stacks.setdefault(f"{stem}.{last}", []).append(value)
    return out | {name: torch.stack(values) for name, values in stacks.items()}


class Maker:
    """Expected values of one model, by the keys of the golden format without their ``seqI.``."""

    def __init__(self, cfg: ModelConfig, weights: Path, token_map: list[int]):
        self.cfg, self.params = cfg, read_weights(weights, cfg)
        self.tables = dense.hash_tables(cfg, token_map) if cfg.engram_layer_ids else None

    def expected(self, prompt: Tensor, fed: Tensor) -> dict[str, Tensor]:
        """Of prompts [B, S] and what is decoded after them [B, n]."""
        out = {f"prefill.{key}": value for key, value in self.prefill(prompt).items()}
        whole = torch.cat([prompt, fed], 1)
        rows = self.hash_rows(whole)
        run, logits = self.forward(whole, rows)
        for j in range(fed.shape[1]):
            at = prompt.shape[1] + j
            out[f"decode.{j}.logits"] = logits[:, at]
            for layer, ids in zip(self.cfg.engram_layer_ids, rows):
                out[f"decode.{j}.layers.{layer}.engram_hash_ids"] = ids[:, at : at + 1].int()
            if self.cfg.num_nextn_predict_layers:
                drafted = self.draft(run, logits[:, at].argmax(-1), at)
                out |= {f"decode.{j}.spec.{key}": value for key, value in drafted.items()}
        return out

    def hash_rows(self, ids: Tensor) -> Tensor | list:
        return dense.hash_rows(self.cfg, self.tables, ids) if self.tables else []

    def start(self, ids: Tensor) -> dense.Pass:
        return dense.Pass(self.cfg, self.params, ids.shape[0], trace=dense.Trace())

    def forward(self, ids: Tensor, rows: Tensor | list) -> tuple[dense.Pass, Tensor]:
        run = self.start(ids)
        return run, F.linear(dense.forward(run, ids, rows), self.params["head.weight"])

    def prefill(self, ids: Tensor) -> dict[str, Tensor]:
        """The taps of every layer, and logits."""
        cfg, rows, out = self.cfg, self.hash_rows(ids), {}
        run, shared = self.start(ids), dense.Shared()
        x, a = dense.streams(run, ids)
        fold = lambda t: t.unflatten(0, ids.shape)  # noqa: E731
        for i in range(cfg.num_hidden_layers):
            pre, kind = f"layers.{i}.", cfg.kind(i)
            if i in cfg.engram_layer_ids:
                own = rows[cfg.engram_layer_ids.index(i)]
                x = dense.engram(run, f"layers.{i}.engram", x, own.flatten(0, 1))
                out |= {f"{pre}engram_out": fold(x), f"{pre}engram_hash_ids": own.int()}
            x, a = dense.block(run, i, x, a, shared)
            out |= {f"{pre}out_stream": fold(x), f"{pre}out_pre_mix": fold(a)}
            if kind.index and shared.selection.shape[-1]:
                out[f"{pre}topk_positions"] = positions(shared.selection, cfg.index_topk).expand(*ids.shape, -1)
            if kind.publishes and shared.candidates.shape[-1]:
                out[f"{pre}candidate_mask"] = shared.candidates.to(torch.uint8)
        run, logits = self.forward(ids, rows)
        if run.trace.taps:
            out["main_hidden"] = torch.cat(run.trace.taps, -1)
        if ids.shape[1] > 1:
            out["logits_all"] = logits
        return out | {"logits_last": logits[:, -1]}

    def draft(self, run: dense.Pass, anchors: Tensor, last: int) -> dict[str, Tensor]:
        """A greedy block after ``anchors`` [B], which follow position ``last``."""
        size = self.cfg.dspark_block_size
        features = dense_dspark.context(run, run.trace.taps)
        y, _ = dense_dspark.draft(run, features, anchors[:, None], torch.full((len(anchors), 1), last))
        ids = anchors[:, None].expand(-1, size + 1).clone()
        for k in range(size):
            ids[:, k + 1] = dense_dspark.logits(run, y[:, 0], ids[:, :-1])[:, k].argmax(-1)
        return {
            "input_id": anchors.int(),
            "output_ids": ids.int(),
            "logits": dense_dspark.logits(run, y[:, 0], ids[:, :-1]),
            "confidence": dense_dspark.confidence(run, y[:, 0], ids[:, :-1]),
        }


def positions(selection: Tensor, most: int) -> Tensor:
    """bool [B, S, C] -> the chosen entries [B, S, min(most, C)] int32, ascending, then -1."""
    entries = selection.shape[-1]
    places = torch.where(selection, torch.arange(entries), entries).sort(-1).values[..., : min(most, entries)]
    return torch.where(places == entries, -1, places).int()


def write_case(folder: Path, cfg: ModelConfig, sets: Sequence[tuple[int, int, int]]) -> Path:
    """A case of random weights and tokens; ``sets`` has a (B, S, n) for each set."""
    checkpoint.save(folder, cfg, small.params(cfg, "qat", "packed"))
    weights = (folder / "model.safetensors").rename(folder / "weights.safetensors")
    token_map = [i % cfg.engram_compressed_vocab_size for i in range(cfg.vocab_size)]
    (folder / "engram_tables.json").write_text(json.dumps({"token_map": token_map}))
    maker, inputs, expected = Maker(cfg, weights, token_map), {}, {}
    for i, (b, s, n) in enumerate(sets):
        ids = torch.from_numpy(small.tokens(b * (s + n), seed=i)).view(b, s + n)
        prompt, fed = ids[:, :s], ids[:, s:]
        inputs |= {f"seq{i}.prompt": prompt.int(), f"seq{i}.decode_inputs": fed.int()}
        expected |= {f"seq{i}.{key}": value for key, value in maker.expected(prompt, fed).items()}
    for name, tensors in (("inputs", inputs), ("expected_fp32", expected)):
        save_file(
            {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()},
            folder / f"{name}.safetensors",
        )
    return folder
