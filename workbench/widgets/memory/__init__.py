"""What a model takes in memory."""
