"""What a path is worth."""
