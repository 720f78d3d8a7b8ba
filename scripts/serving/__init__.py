"""From settings to engines: one in this process, or a process for each rank of a plan."""
