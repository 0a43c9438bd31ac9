"""What a run shows and records: screens, timers, metrics, samples, trackers, run folders."""
