"""What a run reports: its journal, progress, plots, trackers, and the probes and samples of each checkpoint."""
