"""The vocabulary and the ground that every other package stands on."""
