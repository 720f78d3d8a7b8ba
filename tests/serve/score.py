"""The score that lm-eval's multiple choice gives, by the plain loop's runner in this process.

`python -m tests.serve.score tests/data/lm_eval/next_line.jsonl`
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir

from model.pack import Span
from scripts.build import build_runner, build_settings
from scripts.entry import CONF
from serve.runner import Runner
from serve.text import Text


def split(text: Text, context: str, choice: str) -> tuple[list[int], int]:
    """Ids of both, and how many are the context's; its last white space belongs to the choice, as lm-eval has it."""
    stem = context.rstrip()
    return text.encode(context + choice), len(text.encode(stem))


def likelihood(runner: Runner, ids: list[int], context: int) -> float:
    """Log-probability of ``ids[context:]``."""
    pages = range(1, 2 + len(ids) // runner.model.layout.page_size)
    logits, _ = runner.step([Span(np.array(ids, np.int64), 0, 1, pages)], torch.arange(context - 1, len(ids) - 1))
    known = torch.log_softmax(logits.float(), -1)
    return known.gather(-1, torch.tensor(ids[context:]).unsqueeze(-1)).sum().item()


def score(runner: Runner, text: Text, rows: list[dict]) -> dict[str, float]:
    """Share of rows whose answer is the most likely choice: by sum, and by character."""
    right, normed = 0, 0
    for row in rows:
        sums = [likelihood(runner, *split(text, row["context"], c)) for c in row["choices"]]
        right += int(np.argmax(sums)) == row["answer"]
        normed += int(np.argmax([s / len(c) for s, c in zip(sums, row["choices"])])) == row["answer"]
    return {"acc": right / len(rows), "acc_norm": normed / len(rows)}


if __name__ == "__main__":
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = build_settings(compose("config"))
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print(json.dumps(score(*build_runner(settings), [json.loads(line) for line in lines])))
