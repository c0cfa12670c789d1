"""Our trainer as a backend of ART (openpipe-art)."""
