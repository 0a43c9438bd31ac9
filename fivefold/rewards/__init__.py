"""Rewards: functions that judge completions."""
