"""The arena: comparison of policies on worlds that no training has used."""
