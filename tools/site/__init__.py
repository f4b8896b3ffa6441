"""Build the site: `docs/` and pages made from code, records and notebooks, as a folder of HTML that needs no
network."""
