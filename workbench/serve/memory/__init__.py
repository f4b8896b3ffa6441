"""Remember calls, separately for each tenant: prompts, generated turns, stored responses."""
