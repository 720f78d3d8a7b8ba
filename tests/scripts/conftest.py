"""Without Hydra there is no run folder: tables that a bench reports are kept for the test to see."""

import pytest

from scripts import report


@pytest.fixture
def tables(monkeypatch):
    """Name -> (columns, rows) of each table that was reported."""
    seen = {}
    monkeypatch.setattr(report, "table", lambda name, columns, rows: seen.update({name: (columns, rows)}))
    return seen
