"""What people see of a run: metrics, timers, console, TensorBoard, run folders."""
