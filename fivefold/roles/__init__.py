"""The roles of a run, each with its handle on the driver beside the worker that serves it."""
