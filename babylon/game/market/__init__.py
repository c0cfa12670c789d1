"""The game: markets, orders, scenarios, prompts and scripted agents."""
