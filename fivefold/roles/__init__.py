"""The roles of a run, each with its handle on the driver next to the worker that serves it."""
