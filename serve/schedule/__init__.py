"""Who takes part in the next step, with which pages and windows. Plain Python and numpy: no torch, no clock."""
