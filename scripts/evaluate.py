"""How good the model is, by the runner that serves it, on text held out from its training.

    python -m scripts.evaluate eval=loss         # bits per byte of each held-out piece, beside xz -9e
    python -m scripts.evaluate eval=acceptance   # accepted tokens a step; drafted output equals undrafted

Tables go to stdout, progress to stderr, one JSON line ends stdout.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.build import Settings, build_runner
from scripts.entry import entry
from scripts.evaluation import acceptance, loss
from scripts.evaluation.acceptance import Tally
from scripts.progress import progress
from scripts.report import note_capped
from scripts.training import corpus
from serve.request import Sampling


def pieces(s: Settings) -> list[bytes]:
    """The held-out pieces that the checkpoint's ``heldout.json`` lists. Random weights take what training would hold
    out of this interpreter's library."""
    if s.random:
        return corpus.heldout_pieces(corpus.manifest(corpus.collect(corpus.library())))
    path = Path(s.checkpoint) / "heldout.json"
    if not path.is_file():
        raise ValueError(f"no {path}: training writes it beside the weights, and evaluation reads the files it lists")
    return corpus.heldout_pieces(json.loads(path.read_text(encoding="utf-8")))


def evaluate_loss(s: Settings) -> dict:
    """Bits per byte of model and xz on each piece, and their means."""
    held, e = pieces(s), s.evaluate
    runner, text = build_runner(s)
    loss.check(runner, e.context, e.batch)
    rows = sum(
        w.end - w.begin for p in held for w in loss.windows(len(loss.sequence(text, p)) - 1, e.context, e.stride)
    )
    with progress("bits per byte", rows, "tokens") as advance:
        model = [loss.bits_per_byte(runner, text, p, e.context, e.stride, e.batch, advance) for p in held]
    xz = [loss.xz_bits_per_byte(p) for p in held]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    table = Table("held-out piece", "bytes", "bits per byte", "xz -9e")
    for i, p in enumerate(held):
        table.add_row(str(i), f"{len(p):,}", f"{model[i]:.4f}", f"{xz[i]:.4f}")
    table.add_row("mean", "", f"{mean(model):.4f}", f"{mean(xz):.4f}", style="bold")
    Console().print(table)
    out = {"bits_per_byte": mean(model), "xz_bits_per_byte": mean(xz)}
    for i in range(len(held)):
        out |= {f"bits_per_byte_p{i}": model[i], f"xz_bits_per_byte_p{i}": xz[i]}
    return out | {"context": e.context, "stride": e.stride}


def evaluate_acceptance(s: Settings) -> dict:
    """Acceptance lengths and the number of prompts whose drafted output differs, greedy and sampled."""
    held, e = pieces(s), s.evaluate
    runner, text = build_runner(s)
    prompts = acceptance.passages(text, held, e.prompts, e.prompt_tokens)
    note_capped([len(p) for p in prompts], s.max_tokens, runner.context)
    modes = {"greedy": 0.0, "sampled": e.temperature}
    tallies, total = {}, Tally()
    with progress("drafted and undrafted", len(prompts) * len(modes), "prompts") as advance:
        for name, temperature in modes.items():
            how = Sampling(s.max_tokens, temperature, s.seed, (text.eos_id,))
            tallies[name] = acceptance.measure(runner, prompts, how, s.serve.max_batch, advance)
            total = total.plus(tallies[name])
    table = Table("", "tokens a step", "outside loops", "tokens in loops", "mismatches")
    show = lambda v: "-" if v is None else f"{v:.3f}"  # noqa: E731
    for name, tally in {**tallies, "both": total}.items():
        table.add_row(name, *map(show, tally.figures().values()), str(tally.mismatches))
    Console().print(table)
    out = total.figures() | {"mismatches": total.mismatches, "prompts": len(prompts), "tokens": total.tokens}
    for name, tally in tallies.items():
        out |= tally.figures(f"_{name}")
    return out | {"max_tokens": s.max_tokens, "temperature": e.temperature}


EVALUATIONS = {"loss": evaluate_loss, "acceptance": evaluate_acceptance}


def run(s: Settings) -> dict:
    if s.eval not in EVALUATIONS:
        raise ValueError(f"eval must be one of {', '.join(EVALUATIONS)}, got {s.eval!r}")
    print(f"evaluating {s.checkpoint} ({s.numerics}) ...", file=sys.stderr)
    about = {"checkpoint": s.checkpoint, "numerics": s.numerics, "cache": s.cache}
    return EVALUATIONS[s.eval](s) | about


if __name__ == "__main__":
    entry(run)
