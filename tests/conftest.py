"""What every test needs."""

from fivefold.cluster.interrupt import keep_exit_statuses

keep_exit_statuses()
