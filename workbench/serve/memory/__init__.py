"""The memory that a server has of calls, each tenant's apart: prompts, generated turns, stored responses."""
