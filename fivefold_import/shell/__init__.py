"""Launch scripts, read without running them."""
