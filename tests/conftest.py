"""Set-up of all tests: exit statuses of child processes are kept, as in the command line."""

from fivefold.cluster.interrupt import keep_exit_statuses

keep_exit_statuses()
