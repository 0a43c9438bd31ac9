"""Plans of a run before a GPU is taken: memory, time, traffic, layout search, tables and pictures. No torch."""
