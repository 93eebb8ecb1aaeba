"""Known errors and the doctor."""
