"""How good the model is, by the runner that serves it, on text held out from its training.

    python -m scripts.evaluate eval=loss         # bits per byte of each held-out piece, beside xz -9e
    python -m scripts.evaluate eval=needle       # what a first copy far back is worth, by prompt length and depth
    python -m scripts.evaluate eval=agreement    # KL and top-1 against replay forms, numerics, storage, kernels
    python -m scripts.evaluate eval=acceptance   # drafts: length, by position, calibration; drafted equals undrafted
    python -m scripts.evaluate eval=routing      # who chooses which expert, also as a trace: routing.npz
    python -m scripts.evaluate eval=all          # each of them at a small size, its keys led by its name

Tables go to stdout and as CSV with plots into the run's folder, progress to stderr, one JSON line ends stdout.
"""

import sys
from dataclasses import replace

from scripts.build import Settings, build_runner
from scripts.entry import entry
from scripts.evaluation import acceptance, agreement, loss, needle, routing
from scripts.evaluation.given import Given, pieces

EVALUATIONS = {
    "loss": loss.run,
    "needle": needle.run,
    "agreement": agreement.run,
    "acceptance": acceptance.run,
    "routing": routing.run,
}
ALL = "all"


def small(s: Settings) -> Settings:
    """Sizes of `eval=all`: these or, where it is smaller, what the settings say."""
    cap = lambda values, **most: replace(values, **{k: min(getattr(values, k), v) for k, v in most.items()})  # noqa: E731
    e = replace(s.evaluate, bytes=min(s.evaluate.bytes or 8_000, 8_000))
    short = tuple(n for n in s.needle.lengths if n <= 512) or (min(s.needle.lengths),)
    return replace(
        s,
        max_tokens=min(s.max_tokens, 32),
        evaluate=cap(e, context=1024, stride=768, prompts=16),
        needle=replace(cap(s.needle, samples=3), lengths=short),
        agreement=cap(s.agreement, samples=3),
        routing=cap(s.routing, prompts=4, max_tokens=16),
    )


def everything(g: Given) -> dict:
    """Every evaluation, one flat result. Mismatches keep their bare name too: they fail the run."""
    out, bad = {}, 0
    for name, evaluation in EVALUATIONS.items():
        print(f"{name}:", flush=True)
        found = evaluation(g)
        bad += found.get("mismatches", 0)
        out |= {f"{name}_{key}": value for key, value in found.items()}
    return out | {"mismatches": bad}


def run(s: Settings) -> dict:
    known = (*EVALUATIONS, ALL)
    if s.eval not in known:
        raise ValueError(f"eval must be one of {', '.join(known)}, got {s.eval!r}")
    print(f"evaluating {s.checkpoint} ({s.numerics}) ...", file=sys.stderr)
    s = small(s) if s.eval == ALL else s
    runner, text = build_runner(s)
    g = Given(s, runner, text, pieces(s))
    found = everything(g) if s.eval == ALL else EVALUATIONS[s.eval](g)
    return found | {"checkpoint": s.checkpoint, "numerics": s.numerics, "cache": s.cache}


if __name__ == "__main__":
    entry(run)
