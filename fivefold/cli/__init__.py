"""The command line: one file a command, each of which imports what it runs only when it is called."""
