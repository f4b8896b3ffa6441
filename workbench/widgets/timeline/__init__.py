"""Show steps and requests over time, with the reasons of scheduling decisions."""
