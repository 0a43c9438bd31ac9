"""The command line: one file a command, which imports what it runs only when called."""
