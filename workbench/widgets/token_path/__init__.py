"""The path of a token: every stage of a prompt from its ids to the draw, with what each head and layer adds."""
