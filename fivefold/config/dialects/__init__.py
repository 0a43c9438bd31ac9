"""Other frameworks' configurations, read key by key: one module a framework."""
