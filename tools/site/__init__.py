"""The site: `docs/` and what is made from code, records and notebooks, as one folder of HTML that needs no network."""
