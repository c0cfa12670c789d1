"""Commands for operators: up, doctor, demo."""
