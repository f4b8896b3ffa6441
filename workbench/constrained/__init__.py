"""Constrain a request's output: grammars, choices and thinking budgets, always completed within the token limit."""
