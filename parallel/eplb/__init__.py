"""Expert load balancing: how even the load is (metric), what it was lately (window), what to hold where (policy)."""
