"""The zoo: published techniques as user parts of a page each, measured as experiments with a rule written before."""
