"""The market game, the fleets that play it, and its views for Gymnasium and PettingZoo."""
