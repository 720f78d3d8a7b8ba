"""Training: the corpus and its held-out part, rows, the fast functions, the optimiser, and resuming bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model import checkpoint, dense, dense_index, dense_ops, release, transformer, tree
from model.config import ModelConfig, RopeScaling
from model.engram_tables import primes, table_rows
from scripts.training import backbone, corpus, drafter, fast, init, optim, quantise, run, state
from scripts.training.backbone import Setup
from scripts.training.data import Rows, Tokens
from scripts.training.export import export, release_names
from scripts.training.run import PhaseSettings, Settings
from serve.text import train_bpe

CFG = ModelConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=32, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=32, sliding_window=8, compress_ratios=(0, 2, 1, 1, 0),
    kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3), index_n_heads=2, index_head_dim=32, index_topk=4,
    candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=2, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, routed_scaling_factor=1.5, swiglu_limit=10.0,
    engram_layer_ids=(1,), engram_num_embeddings=tuple(table_rows(t) for t in primes(1, 30, 3, 2)),
    engram_max_ngram_size=3, engram_n_heads=2, engram_head_dim=32,
    engram_vocab_size=30, engram_pad_token_id=2, engram_compressed_vocab_size=300,
    num_nextn_predict_layers=1, dspark_block_size=3, dspark_noise_token_id=3, dspark_target_layer_ids=(2, 3),
    dspark_markov_rank=8, dspark_n_routed_experts=2, dspark_num_experts_per_tok=1, max_position_embeddings=512,
    rope_scaling=RopeScaling(original_max_position_embeddings=64),
)  # fmt: skip
SETUP = Setup(CFG, dense.hash_tables(CFG, list(range(300))), dense.Ops(), backbone.head_loss)
PHASE = PhaseSettings(steps=2, length=24, rows=2)
SETTINGS = Settings(0, PHASE, PHASE, PHASE, PHASE, 4, 1, 0.5, (1e-2, 1e-3), 0.5, 1, 100, optim.Rates())


@pytest.fixture
def tokens() -> Tokens:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, n).astype(np.uint16) for n in (40, 90, 200, 300)]
    return Tokens(tuple(documents), tuple(documents))


def advance(now: state.State, tokens: Tokens, folder, **how) -> list[run.Progress]:
    return list(run.train(SETTINGS, SETUP, tokens, now, folder, **how))


# --- corpus ---


def write(root, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def source(seed: int, lines: int = 200) -> str:
    """Lines of their own for each seed, few digits."""
    names = (f"{i:b}".replace("0", "o").replace("1", "l") for i in range(lines))
    return "".join(f"value_{chr(97 + seed)}_{name} = compute_something(other)\n" for name in names)


@pytest.fixture
def library(tmp_path):
    for i in range(8):
        write(tmp_path, f"mod{i}.py", source(i))
    write(tmp_path, "copy_of_0.py", source(0))
    write(tmp_path, "test/test_mod1.py", source(1))
    write(tmp_path, "site-packages/x.py", source(9))
    write(tmp_path, "encodings/cp1.py", source(10))
    return tmp_path


def test_heldout_files_share_no_lines_with_training(library):
    found = corpus.collect(library, heldout_bytes=15_000)
    assert len(found.heldout) >= 2 and not set(found.heldout) & set(found.code)
    assert not set(found.heldout) & {"mod0.py", "copy_of_0.py", "mod1.py"}  # others hold the same lines
    assert found.tests == ("test/test_mod1.py",)
    assert not any(p.startswith(("site-packages", "encodings")) for p in found.code + found.heldout)
    assert corpus.collect(library, heldout_bytes=15_000) == found


def test_too_small_a_library_is_refused(library):
    with pytest.raises(ValueError, match="held-out bytes"):
        corpus.collect(library, heldout_bytes=10**6)


def test_pieces_come_back_or_name_the_file(library):
    found = corpus.collect(library, heldout_bytes=15_000)
    listing = corpus.manifest(found) | {"piece_bytes": 5_000, "pieces": 3}
    pieces = corpus.heldout_pieces(listing, library)
    assert [len(p) for p in pieces] == [5_000] * 3
    assert b"".join(pieces).startswith((library / found.heldout[0]).read_bytes()[:5_000])
    (library / found.heldout[1]).write_text("changed")
    with pytest.raises(ValueError, match=found.heldout[1]):
        corpus.heldout_pieces(listing, library)
    (library / found.heldout[0]).unlink()
    with pytest.raises(ValueError, match=f"{found.heldout[0]} is missing"):
        corpus.heldout_pieces(listing, library)


def test_the_running_interpreter_has_three_pieces():
    found = corpus.collect(corpus.library())
    assert [len(p) for p in corpus.heldout_pieces(corpus.manifest(found))] == [corpus.PIECE_BYTES] * 3


def test_rows_are_a_function_of_the_step(tokens):
    rows, again = Rows(tokens, 3, 16, 4), Rows(tokens, 3, 16, 4)
    late = again.batch(30)  # another epoch first
    assert all(torch.equal(rows.batch(s), again.batch(s)) for s in range(12))
    assert torch.equal(rows.batch(30), late)
    starts = {tuple(d[:17].tolist()) for d in tokens.code}
    assert all(tuple(rows.batch(s)[0].tolist()) in starts for s in range(12))


# --- functions ---


def test_fast_attention_is_attention():
    torch.manual_seed(0)
    q, k, latent, sink = torch.randn(2, 37, 2, 16), torch.randn(2, 37, 16), torch.randn(2, 18, 16), torch.randn(2)
    selection = dense_index.reachable(37, 18, 2) & (torch.rand(2, 37, 18) > 0.3)
    for far, chosen in ((None, None), (latent, selection)):
        want = dense_ops.attend(q, k, far, chosen, sink, 8)
        assert torch.allclose(fast.attend_in_blocks(q, k, far, chosen, sink, 8), want, atol=1e-5)
    q, k, selection = torch.randn(2, 64, 2, 16), torch.randn(2, 64, 16), dense_index.reachable(64, 32, 2)[None]
    latent = torch.randn(2, 32, 16)
    want = dense_ops.attend(q, k, latent, selection, sink, 8)
    assert torch.allclose(fast.attend_in_blocks(q, k, latent, selection, sink, 8), want, atol=1e-5)  # in four parts


def test_fast_sinkhorn_has_the_exact_gradient():
    torch.manual_seed(0)
    z = (torch.randn(4, 4, 9) * 2).requires_grad_()
    c = (z.permute(2, 0, 1)).softmax(-1) + 1e-6
    c = c / (c.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + 1e-6)
        c = c / (c.sum(1, keepdim=True) + 1e-6)
    grad = torch.randn_like(c)
    (want,) = torch.autograd.grad(c, z, grad)
    got = fast.fused_sinkhorn(lambda f: f)(z, 20, 1e-6)
    assert torch.allclose(got, c, atol=1e-6)
    (mine,) = torch.autograd.grad(got, z, grad)
    assert torch.allclose(mine, want, atol=1e-5)


def test_fast_experts_are_experts():
    torch.manual_seed(0)
    x, weights = torch.randn(50, 32), torch.rand(50, 2)
    ids = torch.randint(0, 4, (50, 1)) + torch.tensor([[0, 1]])
    stacks = [torch.randn(5, 48, 32), torch.randn(5, 48, 32), torch.randn(5, 32, 48)]
    want = dense_ops.experts(x, ids, weights, stacks, 10.0, lambda v: v)
    assert torch.allclose(fast.experts_as_batch(x, ids, weights, stacks, 10.0, lambda v: v), want, atol=1e-3, rtol=1e-4)


def test_orthogonal_levels_singular_values():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(optim.orthogonal(torch.randn(3, 24, 64)))
    assert values.min() > 0.5 and values.max() < 1.5


def test_index_users_end_at_the_next_selection():
    assert [backbone.users(CFG, i) for i in (1, 2, 3)] == [[1], [2], [3]]
    assert backbone.users(replace(CFG, index_source_layer_ids=(1, 2)), 2) == [2, 3]


def test_bias_moves_towards_the_idle_expert():
    params = {"layers.0.ffn.gate.bias": torch.zeros(2)}
    backbone.balance(params, {0: torch.tensor([9, 1])}, 0.01)
    assert torch.equal(params["layers.0.ffn.gate.bias"], torch.tensor([-0.01, 0.01]))


def test_names_and_shapes_are_the_release_s():
    named = release_names(init.initial(CFG, 0))
    specs = dict(tree.walk(transformer.specs(CFG)))
    want = {e.name: release.one(specs[e.path]).shape for e in release.schema(CFG).values() if e.part == "weight"}
    assert {n: tuple(v.shape) for n, v in named.items()} == want


def test_straight_through_rounds_forward_only():
    rounded = quantise.weights(CFG)
    for name in ("layers.0.attn.wq_a.weight", "layers.1.ffn.experts.w1", "layers.1.engram.embed.weight", "norm.weight"):
        value = init.initial(CFG, 0)[name].mul_(1.003).requires_grad_()
        out = rounded(name, value)
        assert 0 < (out - value).abs().max() < 0.3
        (grad,) = torch.autograd.grad(out.sum(), value)
        assert torch.equal(grad, torch.ones_like(value))


# --- runs ---


def test_resumed_is_uninterrupted(tokens, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    straight = run.fresh(CFG, 0)
    seen = advance(straight, tokens, whole)
    assert [p.phase for p in seen] == [n for n in run.PHASES for _ in range(2)]
    now = run.fresh(CFG, 0)
    for _ in range(3):
        advance(now, tokens, parts, stop_after=3)
        now = state.load(parts)
    assert now.done == straight.done
    for name, value in straight.params.items():
        assert torch.equal(value, now.params[name]), name
    trained = init.initial(CFG, 0)
    still = {n for n, v in trained.items() if torch.equal(v, now.params[n])}
    assert still <= {n for n in trained if n.endswith(("attn_sink", "gate.bias"))}  # all else has moved


def test_the_loss_falls(tokens, tmp_path):
    one = replace(SETTINGS, short=replace(PHASE, steps=12), index=replace(PHASE, steps=0), long=replace(PHASE, steps=0))
    now = run.fresh(CFG, 0)
    losses = [p.metrics["loss"] for p in run.train(one, SETUP, tokens, now, tmp_path, only="short")]
    assert losses[-1] < losses[0] - 0.3


def test_training_in_released_numerics(tokens):
    setup = replace(SETUP, numerics=quantise.straight_through(), weights=quantise.weights(CFG))
    batch = Rows(tokens, 0, 24, 2).batch(0)
    params = init.initial(CFG, 0)
    metrics, grads, _ = backbone.step_backbone(setup, params, batch, True, True)
    plain, _, _ = backbone.step_backbone(SETUP, params, batch, True, True)
    assert abs(metrics["loss"] - plain["loss"]) < 0.1 and metrics["loss"] != plain["loss"]
    assert all(g.isfinite().all() for g in grads.values())


def test_anchors_leave_room_for_their_answers():
    last = drafter.pick((3, 24), 4, 20, (0, 1))
    assert last.max() < 20 and all(len(set(row.tolist())) == 20 for row in last)
    with pytest.raises(ValueError, match="anchors"):
        drafter.pick((3, 24), 4, 21, (0, 1))


def test_nothing_to_resume_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        state.load(tmp_path)
    (tmp_path / state.FILE).write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot resume"):
        state.load(tmp_path)


def test_exported_reads_back(tmp_path):
    params = init.initial(CFG, 0)
    text = train_bpe(["def f(n):\n    return n\n"] * 4 + ["".join(map(chr, range(32, 127)))], 270)
    size = export(tmp_path / "out", CFG, params, text, {"files": []})
    assert size > 0 and checkpoint.read_config(tmp_path / "out") == CFG
    read = checkpoint.load(tmp_path / "out", CFG, numerics="fp32")
    assert torch.allclose(read.embed, params["embed.weight"], atol=2e-2)


@pytest.mark.parametrize(
    ("phase", "change", "message"),
    [
        ("index", {"steps": -1}, "index.steps must be >= 0, got -1"),
        ("long", {"length": 0}, "long.length must be >= 1, got 0"),
        ("drafter", {"rows": 0}, "drafter.rows must be >= 1, got 0"),
    ],
)
def test_a_phase_that_cannot_be_is_named(phase, change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **{phase: replace(PHASE, **change)})
