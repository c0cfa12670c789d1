"""OpenTelemetry: spans of the gateway's calls out, and spans of agents in."""
