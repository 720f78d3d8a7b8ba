"""What was checked: one row a tap, with the error, its limit and where it was worst."""

import re
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

from scripts.verification.case import largest, relative_rms

LOGIT_LIMIT = 1e-3  # absolute, fp32
FP32_LIMIT = 1e-4  # relative RMS of other fp32 taps
QAT_LIMIT = 3e-3  # relative RMS on forced inputs: this path rounds where the official one does
NEAR_TIES = 2  # rows of ids that bf16 may decide otherwise; none in fp32


@dataclass
class Row:
    tap: str
    kind: str  # "abs", "rms", "rows" (ids that differ), "keys" or "bits"
    limit: float | None  # None: reported, not judged
    error: float = 0.0
    where: str = ""
    checks: int = 0

    @property
    def missed(self) -> bool:
        return self.limit is not None and not self.error <= self.limit


@dataclass
class Results:
    """Rows by tap; the worst of all places where a tap was compared."""

    rows: dict[str, Row] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # keys of the file that no check has read

    def add(self, tap: str, kind: str, error: float, limit: float | None, where: str) -> None:
        row = self.rows.setdefault(tap if limit is not None else f"{tap} (reported)", Row(tap, kind, limit))
        row.checks += 1
        if not row.where or not error <= row.error:
            row.error, row.where = error, where

    def close(self, tap: str, got: Tensor, want: Tensor, where: str, limit: float | None) -> None:
        """Compare values by relative RMS."""
        self.add(tap, "rms", relative_rms(got, want.reshape(got.shape)), limit, where)

    def logits(self, tap: str, got: Tensor, want: Tensor, where: str, limit: float | None = LOGIT_LIMIT) -> None:
        """Compare fp32 logits by absolute error."""
        self.add(tap, "abs", largest(got, want.reshape(got.shape)), limit, where)

    def ids(self, tap: str, got: Tensor, want: Tensor, where: str, limit: float | None) -> None:
        """Count rows [.., k] whose ids differ."""
        wrong = (got.long() != want.long().reshape(got.shape)).reshape(got.shape[0], -1).any(-1)
        self.add(tap, "rows", float(wrong.sum()), limit, where)

    def same(self, tap: str, equal: bool, where: str) -> None:
        """Note whether two results are equal bit for bit."""
        self.add(tap, "bits", 0.0 if equal else 1.0, 0.0, where)

    @property
    def failed(self) -> int:
        return sum(row.missed for row in self.rows.values())

    @property
    def passed(self) -> int:
        return sum(row.limit is not None and not row.missed for row in self.rows.values())

    def show(self, title: str) -> None:
        """Print the table to stdout."""
        table = RichTable("tap", "compared", "as", "max error", "limit", "worst at", "", title=title)
        for row in self.rows.values():
            limit = "-" if row.limit is None else f"{row.limit:g}"
            mark = "report" if row.limit is None else "MISS" if row.missed else "ok"
            table.add_row(row.tap, str(row.checks), row.kind, f"{row.error:.2e}", limit, row.where, mark)
        Console(width=120).print(table)
        if self.unread:
            print("not compared:", ", ".join(grouped(self.unread)))


def grouped(keys: list[str]) -> list[str]:
    """Keys that differ in their numbers as one, with their count."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", key) for key in keys)
    return [f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items()]
