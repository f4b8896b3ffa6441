"""The zoo: published techniques as one-page custom parts, measured by experiments with a rule written beforehand."""
