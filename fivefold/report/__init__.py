"""Pages about runs: a report in one file, the same page live, and lists of runs."""
