"""Does the drafter know when it is right? Acceptance by position of a block, and confidence against what came true.

The confidence of a draft is the sigmoid of its head: the chance that it is kept if all before it are. So a block counts
its kept drafts and the first that was not; drafts after that one were never judged.
"""

from collections.abc import Sequence

import numpy as np

from scripts import report
from serve.offline import Verdict

BINS = 10


def judged(verdicts: Sequence[Verdict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position in its block, confidence in 0..1 and whether it was kept, of each draft that was judged."""
    rows = [
        (i, v.confidence[i], i < v.kept) for v in verdicts for i in range(min(v.kept + 1, len(v.drafts)))
    ]  # fmt: skip
    position, logit, kept = np.array(rows, np.float64).reshape(-1, 3).T
    return position.astype(np.int64), 1 / (1 + np.exp(-logit)), kept.astype(bool)


def positions(verdicts: Sequence[Verdict], block: int) -> list[tuple[int, int, float | None, float | None]]:
    """Of each position 1..block: blocks that had a draft there, the share of these that kept it, and the share of those
    that kept all before it."""
    out = []
    for i in range(block):
        had = [v.kept for v in verdicts if len(v.drafts) > i]
        reached = sum(k >= i for k in had)
        kept = sum(k > i for k in had)
        out.append((i + 1, len(had), kept / len(had) if had else None, kept / reached if reached else None))
    return out


def reliability(
    confidence: np.ndarray, kept: np.ndarray, bins: int = BINS
) -> list[tuple[float, float, int, float, float]]:
    """Of each bin of equal width that is not empty: from, to, drafts, mean confidence, share kept."""
    number = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    out = []
    for b in np.unique(number):
        own = number == b
        mean, share = float(confidence[own].mean()), float(kept[own].mean())
        out.append((b / bins, (b + 1) / bins, int(own.sum()), mean, share))
    return out


def ece(table: Sequence[tuple[float, float, int, float, float]]) -> float | None:
    """Expected calibration error: the gap between confidence and share kept, weighted by drafts (Guo et al. 2017)."""
    total = sum(row[2] for row in table)
    return sum(row[2] * abs(row[3] - row[4]) for row in table) / total if total else None


def judge(verdicts: Sequence[Verdict], block: int) -> dict[str, float | None]:
    """Tables and a plot of both; keys ``kept_p{i}``, ``kept_if_reached_p{i}``, ``ece``, ``brier``, ``confidence``,
    ``kept``."""
    where = positions(verdicts, block)
    report.table("positions", ("position", "blocks", "kept", "kept if all before are"), where)
    _, confidence, kept = judged(verdicts)
    table = reliability(confidence, kept)
    heads = ("confidence from", "to", "drafts", "mean confidence", "kept")
    report.table("reliability", heads, table)
    draw(where, table)
    out: dict[str, float | None] = {f"kept_p{i}": share for i, _, share, _ in where}
    out |= {f"kept_if_reached_p{i}": share for i, _, _, share in where}
    mean = lambda values: float(values.mean()) if len(values) else None  # noqa: E731
    out |= {"ece": ece(table), "brier": mean((confidence - kept) ** 2), "confidence": mean(confidence)}
    return out | {"kept": mean(kept), "drafts_judged": len(kept)}


def draw(where: Sequence[tuple], table: Sequence[tuple]) -> None:
    """acceptance.png: kept by position, and share kept over confidence."""
    with report.plot("acceptance", 2) as (left, right):
        left.plot([w[0] for w in where], [w[2] for w in where], marker="o", label="of all blocks")
        left.plot([w[0] for w in where], [w[3] for w in where], marker="s", label="if all before are kept")
        left.set(xlabel="position in the block", ylabel="share kept", ylim=(0, 1), xticks=[w[0] for w in where])
        left.legend()
        right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        right.plot([r[3] for r in table], [r[4] for r in table], marker="o")
        right.bar([r[3] for r in table], [r[2] / max(t[2] for t in table) for r in table], width=0.03, alpha=0.3)
        right.set(xlabel="confidence", ylabel="share kept (bars: drafts)", xlim=(0, 1), ylim=(0, 1))
