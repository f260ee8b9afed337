"""Hidden states → candidates."""
