"""openpipe-art: the client of its library, and our trainer as one of its backends."""
