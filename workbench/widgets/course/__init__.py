"""Show the course: its notebooks with questions, aims and minutes, and projector mode."""
