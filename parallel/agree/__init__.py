"""One row of integers from every rank to every rank, each step: over gloo, or over a node's memory."""
