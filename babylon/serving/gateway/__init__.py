"""The gateway: keys, limits, routing, proxy and recording."""
