"""The game itself: markets, orders, scenarios and prompts."""
