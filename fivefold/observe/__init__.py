"""What a run shows and records: metrics, timers, console, TensorBoard, run folders."""
