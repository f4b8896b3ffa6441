"""The gateway before a server: who may ask, how much, what it costs, which model answers, what is remembered."""
