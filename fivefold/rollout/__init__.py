"""Generation: the engine protocol, and the engines that speak it."""
