"""Serving policies: gateway, engines and the wire formats they share."""
