"""A roofline of this machine and the work measured on it."""
