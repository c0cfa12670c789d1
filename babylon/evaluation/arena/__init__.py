"""The arena: policies meet on worlds that nobody was trained on, and only a better one passes."""
