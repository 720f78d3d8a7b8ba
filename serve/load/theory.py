"""The hit rate that a prompt cache could reach: one that never ends, at the engine's page size."""

import numpy as np

from serve.schedule.pages import chain


class Endless:
    """Every full page of every prompt so far. The order of the calls is the order of play."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._pages: set[bytes] = set()

    def look(self, tokens: np.ndarray) -> int:
        """Tokens of the longest run of leading pages that came before, less the last one where it would leave nothing
        to compute; then the prompt's pages are kept."""
        pages = chain(tokens, self.page_size)
        found = next((i for i, page in enumerate(pages) if page not in self._pages), len(pages))
        self._pages.update(pages)
        return min(found, (len(tokens) - 1) // self.page_size) * self.page_size
