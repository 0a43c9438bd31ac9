"""Other frameworks' configurations, read key by key and written as recipes: one folder a framework."""
